"""The pages made from the chapters: each track's index, and the glossary with its terms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nbformat.v4 import new_markdown_cell, new_notebook
from toy_chapter import a_chapter

from infer_lab.course import glossary, index, lesson
from infer_lab.course.discovery import Chapter, chapters, course_root
from infer_lab.course.lint.course import shared_faults

ROOT = course_root()


def faults(root: Path) -> str:
    return "\n".join([*glossary.term_faults(root, chapters(root)), *shared_faults(root)])


# The course's own -----------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", chapters(ROOT), ids=str)
def test_the_glossary_defines_every_word_that_a_chapter_explains(chapter: Chapter) -> None:
    missing = list(glossary.term_faults(ROOT, [chapter]))
    assert not missing, "\n".join(missing)


def test_indexes_and_glossary_say_what_the_chapters_say() -> None:
    found = list(shared_faults(ROOT))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", index.pages(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    assert links and not [link for link in links if not (path.parent / link).exists()]


# Terms ----------------------------------------------------------------------------------------


def terms(*texts: str) -> list[str]:
    return list(lesson.terms(new_notebook(cells=[new_markdown_cell(text) for text in texts])))


def test_terms_are_the_bold_words_of_the_prose() -> None:
    assert terms("A **token** and an **id**.\n\n- **top-k**: the k likeliest.") == [
        "token",
        "id",
        "top-k",
    ]
    assert terms("This is **first come,\nfirst served**.") == ["first come, first served"]
    assert terms("One **word**, again **word**.", "And **word**.") == ["word"]


@pytest.mark.parametrize(
    "text",
    [
        "**Time:** a minute. **Norm.** Divide. **1.** Why?",
        "**T** tokens, **Hq** and **Hkv** heads",
        "| **decode** | one token |",
        "### **Bold** heading",
        "```\n**code**\n```",
        "<details><summary>Answer</summary>\n\nA **word**.\n\n</details>",
        "only *stressed*, 2 ** 3 ** 4, **`name`**",
        "## 7. In real engines\n\nSee **vLLM**.",
    ],
)
def test_labels_sizes_tables_code_and_engines_are_no_terms(text: str) -> None:
    assert terms(text) == []


def test_nothing_after_the_last_section_begins_is_a_term() -> None:
    assert terms("A **word**.\n\n## 7. In real engines\n\n**vLLM**", "**SGLang**") == ["word"]


# The glossary ---------------------------------------------------------------------------------


def a_course(root: Path, *texts: str) -> Path:
    """A course with a toy chapter for each text, and its pages."""
    for i, text in enumerate(texts, 1):
        a_chapter(root, new_markdown_cell(text), place=f"beginner/0{i}_toy")
    index.write(root)
    return root


def add(root: Path, *lines: str) -> None:
    with (root / glossary.PAGE).open("a", encoding="utf-8") as page:
        page.write("".join(f"{line}\n" for line in lines))


def test_a_line_becomes_an_entry_in_its_place_with_a_link_to_the_first_chapter(
    tmp_path: Path,
) -> None:
    root = a_course(tmp_path, "A **step**.", "A **step** has **chunks**, a **Gantt chart** too.")
    add(root, "step: One forward pass.", "Gantt chart: A drawing.", "chunk: A run of tokens.")
    index.write(root)
    text = (root / glossary.PAGE).read_text(encoding="utf-8")
    assert text.startswith(glossary.HEAD)
    assert text.removeprefix(glossary.HEAD).split("\n") == [
        "",
        "## C",
        "",
        "- **chunk**: A run of tokens. [beginner 2](beginner/02_toy/02_toy.ipynb)",
        "",
        "## G",
        "",
        "- **Gantt chart**: A drawing. [beginner 2](beginner/02_toy/02_toy.ipynb)",
        "",
        "## S",
        "",
        "- **step**: One forward pass. [beginner 1](beginner/01_toy/01_toy.ipynb)",
        "",
    ]
    assert faults(root) == ""
    assert index.write(root) == []  # writing again changes nothing


def test_a_term_without_an_entry_is_a_fault(tmp_path: Path) -> None:
    root = a_course(tmp_path, "A **step**.")
    assert "explains **step**, which GLOSSARY.md lacks" in faults(root)


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["chunk: A run of tokens."], "no chapter explains chunk"),
        (["step: A pass.", "step: Something else."], "defines step twice"),
        (["step: A pass"], "step must be defined in one or two sentences"),
        (["step: A pass. Of a model. On a machine."], "step must be defined in one or two"),
        ([f"step: A {'very ' * 70}long pass."], "step must be defined in one or two"),
    ],
)
def test_the_glossary_must_have(tmp_path: Path, lines: list[str], fault: str) -> None:
    root = a_course(tmp_path, "A **step**.")
    add(root, *lines)
    index.write(root)
    assert fault in faults(root)


def test_an_entry_out_of_place_and_one_with_another_link_are_faults(tmp_path: Path) -> None:
    root = a_course(tmp_path, "A **step**.", "A **step**.")
    add(root, "step: A pass.")
    assert "isn't sorted and linked; run `infer-lab index`" in faults(root)
    index.write(root)
    page = root / glossary.PAGE
    page.write_text(page.read_text().replace("beginner/01_toy/01_toy", "beginner/02_toy/02_toy"))
    assert "isn't sorted and linked" in faults(root)


def test_a_line_that_is_no_entry_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    root = a_course(tmp_path, "A **step**.")
    add(root, "somebody's note")
    before = (root / glossary.PAGE).read_text()
    with pytest.raises(ValueError, match=r"GLOSSARY.md, line \d+, must be `term: What it means.`"):
        index.write(root)
    assert (root / glossary.PAGE).read_text() == before
    assert "somebody's note" in "".join(shared_faults(root))


# The index ------------------------------------------------------------------------------------


def test_the_index_has_a_row_for_each_chapter_from_its_first_cell(tmp_path: Path) -> None:
    a_chapter(tmp_path, place="beginner/01_toy", question="what | why?")
    a_chapter(tmp_path, place="beginner/02_toy", question="how?")
    a_chapter(tmp_path, place="advanced/07_far", question="where?")
    index.write(tmp_path)
    text = (tmp_path / "beginner" / "README.md").read_text(encoding="utf-8")
    builds = "[`decode`](../infer_lab/decode)"
    assert re.findall(r"^\| \d.*$", text, re.MULTILINE) == [
        f"| 1 | [Toy](01_toy/01_toy.ipynb) | What / why? | about 1 minute | {builds} | 3 |",
        f"| 2 | [Toy](02_toy/02_toy.ipynb) | How? | about 1 minute | {builds} | 3 |",
    ]
    assert (tmp_path / "advanced" / "README.md").is_file()
    assert not (tmp_path / "intermediate").exists()
    assert faults(tmp_path) == ""


def test_an_index_that_lags_behind_is_a_fault(tmp_path: Path) -> None:
    root = a_course(tmp_path, "Text.")
    a_chapter(root, place="beginner/02_new")
    assert "beginner/README.md: doesn't say what the chapters say" in faults(root)


def test_a_number_taken_twice_is_a_fault(tmp_path: Path) -> None:
    a_chapter(tmp_path, place="beginner/02_a")
    a_chapter(tmp_path, place="beginner/02_b")
    index.write(tmp_path)
    assert "beginner: 2 chapters have the number 02; rename all but one" in faults(tmp_path)


def test_half_a_chapter_is_left_out_of_the_index(tmp_path: Path) -> None:
    root = a_course(tmp_path, "Text.")
    half = a_chapter(root, place="beginner/02_half")
    half.notebook.unlink()
    assert index.write(root) == []
    half.notebook.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="does not appear to be JSON"):
        index.write(root)
