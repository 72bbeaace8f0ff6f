"""The linter: a chapter in good form passes, and each rule finds what breaks it and says a cure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output, new_raw_cell
from toy_chapter import CHECKS, FOLDED, SECTIONS, SOLUTIONS, a_chapter, code, prints

from infer_lab import cli
from infer_lab.course.lint import lint
from infer_lab.course.lint.exercises import answer_faults


def found(chapter: Any) -> str:
    return "\n".join(lint(chapter))


def edited(root: Path, edit: Any, **changes: Any) -> str:
    """The faults of a toy chapter after `edit(notebook)`."""
    chapter = a_chapter(root, **changes)
    notebook = nbformat.read(chapter.notebook, as_version=4)
    edit(notebook)
    nbformat.write(notebook, chapter.notebook)
    return found(chapter)


def test_a_chapter_in_good_form_has_no_faults(tmp_path: Path) -> None:
    assert lint(a_chapter(tmp_path)) == []


def shows(data: dict[str, Any]) -> Any:
    return new_output("display_data", data=data)


WIDGET = {"application/vnd.jupyter.widget-view+json": {}}


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        (code("model.cuda()"), "names CUDA"),
        (code("x.to(device='cuda')"), "names CUDA"),
        (code("x.to('cuda:0')"), "names CUDA"),
        (code("torch.device('mps')"), "names CUDA or another device"),
        (code("!pip install numpy"), "installs something"),
        (code("%pip install numpy"), "installs something"),
        (code("!wget https://example.com/x"), "needs a network"),
        (code("hf_hub_download('a/b', 'c')"), "needs a network"),
        (code("name = input('who?')"), "waits for somebody to type"),
        (code("# NBVAL_SKIP"), "use the cell's tags"),
        (code("open('/home/ann/x')"), "path of one machine"),
        (new_markdown_cell("Look into /home/ann/x."), "path of one machine"),
        (code("1", prints("C:\\Users\\ann\n")), "output holds a path of one machine"),
        (code("1", prints("careful\n", "stderr")), "wrote to stderr"),
        (code("1", new_output("error", ename="KeyError", evalue="")), "ended with KeyError"),
        (code("print(1)"), "calls print and has no output"),
        (code("print(x)", prints("0.123456789\n")), "round to 6 decimals"),
        (code("plt.show()"), "without alt text"),
        (code("1", shows({"image/png": "AAAA"})), "without alt text"),
        (code("1", shows({"text/html": "<img src='x'>"})), "needs alt text"),
        (code("1", shows({"text/html": "<img alt='x'>"})), "needs alt text"),
        (code("1", shows(WIDGET)), "shows a widget"),
        (code("\n".join("x = 1" for _ in range(16))), "has 16 lines; allowed: 15"),
        (code("1", tags=("skip-me",)), "has tags ['skip-me']"),
        (code("  "), "is empty"),
        (new_raw_cell("x"), "is a raw cell"),
        (new_markdown_cell("![](figure.png)"), "an image lacks alt text"),
        (new_markdown_cell("<img src='figure.png'>"), "needs alt text"),
        (new_markdown_cell("![a figure](https://example.com/a.png)"), "image from the network"),
        (new_markdown_cell("# Another title"), "the only heading of level 1"),
        (code("check(four)", prints("x")), "must check the exercises"),
        (code("load_model()"), "checks.py must list its greedy examples"),
        (new_code_cell("1", metadata={"execution": {}}), "has metadata ['execution']"),
        (code("'" + "x" * 600_000 + "'"), "bytes; draw fewer"),
    ],
)
def test_the_linter_finds_a_cell_that(tmp_path: Path, cell: Any, fault: str) -> None:
    assert fault in found(a_chapter(tmp_path, cell))


def test_what_is_ignored_may_be_as_fine_as_it_likes(tmp_path: Path) -> None:
    cell = code("print(x)", prints("0.123456789\n"), tags=("nbval-ignore-output",))
    assert lint(a_chapter(tmp_path, cell)) == []


LEADS = [
    ("# 1 · Toy", "# Toy", "write '# 1 · Toy' as the first line"),
    ("# 1 · Toy", "# 7 · Toy", "write '# 1 · Toy' as the first line"),
    ("why?", "this and that.", "**The question:**"),
    ("**The question:**", "Question:", "**The question:**"),
    ("- run it;\n", "", "3 to 5 objectives, each with '- ', got 2"),
    ("- run it;\n", "- run it;\n" * 4, "3 to 5 objectives, each with '- ', got 6"),
    ("After this chapter you can", "You learn to", "After this chapter you can"),
    ("**Builds on:**", "For", "**Builds on:**"),
    ("about 1 minute", "a while", "**Time:** in minutes"),
]


@pytest.mark.parametrize(("old", "new", "fault"), LEADS)
def test_the_first_cell_must_say_it_all(tmp_path: Path, old: str, new: str, fault: str) -> None:
    def edit(notebook: Any) -> None:
        assert old in notebook.cells[0].source
        notebook.cells[0].source = notebook.cells[0].source.replace(old, new)

    assert fault in edited(tmp_path, edit)


SWAPPED = (SECTIONS[1], SECTIONS[0], *SECTIONS[2:])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sections": SWAPPED}, "the sections must be"),
        ({"sections": SECTIONS[1:]}, "the sections must be"),
        ({"library": "import math\n\nassert math"}, "must import the modules of infer_lab"),
        ({"library": "from infer_lab import decode"}, "must prove the two equal"),
        ({"engines": "Somebody does it."}, "must name a file or class of one of vLLM"),
        ({"questions": 2 * FOLDED}, "three questions with folded answers"),
        ({"questions": 3 * "<details>Yes.</details>"}, "three questions with folded answers"),
        ({"checks": CHECKS.replace("[zero, two]", "[zero]")}, "at least 2 plausible wrong"),
        ({"checks": CHECKS.replace(', "eins"', "")}, "3 to 5 exercises in EXERCISES"),
        ({"checks": CHECKS.replace('"uno", "eins"', '"eins", "uno"')}, "in this order"),
        ({"checks": "import nowhere"}, "can't be imported: ModuleNotFoundError"),
        ({"solutions": SOLUTIONS.replace("eins", "drei")}, "solutions.py must define eins"),
        ({"solutions": SOLUTIONS.replace("# by definition", "")}, "must give its reasons"),
        (
            {
                "checks": CHECKS
                + "from infer_lab.course import GreedyExample as G\nGREEDY = [G('Not there', 1)]\n"
            },
            "GREEDY names 'Not there'",
        ),
    ],
)
def test_the_linter_finds_a_chapter_that(tmp_path: Path, changes: Any, fault: str) -> None:
    assert fault in found(a_chapter(tmp_path, **changes))


def set_count(notebook: Any) -> None:
    notebook.cells[2].execution_count = 7


def clear(notebook: Any) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def untag(notebook: Any) -> None:
    notebook.cells[1].metadata = {}


def renumber(notebook: Any) -> None:
    cell = next(c for c in notebook.cells if "3. Measure it" in c.source)
    cell.source = "## 4. Measure it"


def drop_code(notebook: Any) -> None:
    notebook.cells = [cell for cell in notebook.cells if cell.source != "2"]


def solve(notebook: Any) -> None:
    cell = next(c for c in notebook.cells if "check(uno)" in c.source)
    cell.outputs[0].text = "uno: 1 of 1 properties hold\n"


def drop_stub(notebook: Any) -> None:
    cell = next(c for c in notebook.cells if "check(uno)" in c.source)
    cell.source = "check(uno)"


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (set_count, "execution counts must be 1 to 10, and that of cell"),
        (clear, "has no outputs; run `python -m infer_lab.course.execute beginner/01_toy`"),
        (untag, "must call course.banner() and have the tag"),
        (renumber, "write '## 3. Measure it' instead of '## 4. Measure it'"),
        (drop_code, "the section 'Measure it' has no code"),
        (solve, "the stub of uno must come out as 'not attempted'"),
        (drop_stub, "the cell that checks uno must define its stub"),
        (lambda n: n.metadata.update(widgets={}), "holds widget state"),
        (lambda n: n.metadata.kernelspec.update(name="mine"), "the kernel must be python3"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_linter_finds_a_notebook_after(tmp_path: Path, edit: Any, fault: str) -> None:
    assert fault in edited(tmp_path, edit)


def test_a_notebook_that_never_ran_gets_one_fault_and_not_one_a_cell(tmp_path: Path) -> None:
    assert edited(tmp_path, clear).count("\n") == 0


def test_the_linter_names_missing_files(tmp_path: Path) -> None:
    chapter = a_chapter(tmp_path)
    (chapter.directory / "solutions.py").unlink()
    (fault,) = lint(chapter)
    assert fault.startswith("solutions.py is missing")


def test_what_is_no_notebook_is_one_fault(tmp_path: Path) -> None:
    chapter = a_chapter(tmp_path)
    chapter.notebook.write_text("{", encoding="utf-8")
    (fault,) = lint(chapter)
    assert fault.startswith("not a valid notebook")


def test_answers_are_tried(tmp_path: Path) -> None:
    assert list(answer_faults(a_chapter(tmp_path / "good"))) == []
    wrong = SOLUTIONS.replace("return 1", "return 3", 1)
    (fault,) = answer_faults(a_chapter(tmp_path / "a", solutions=wrong))
    assert "of one must pass its check, and 'is right' fails: one(): expected 1, got 3" in fault
    lets_two_through = CHECKS.replace("claim.returns(1, answer)", "claim.true(answer() > 0, '0')")
    faults = list(answer_faults(a_chapter(tmp_path / "b", checks=lets_two_through)))
    assert len(faults) == 3 and all("must reject two, and it passed" in f for f in faults)


# The command ----------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: Any, tmp_path: Path, capsys: Any) -> Any:
    """Run `infer-lab` in a course of its own; returns (status, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_lint_says_what_it_checked(command: Any, tmp_path: Path) -> None:
    a_chapter(tmp_path)
    assert command("index")[1].splitlines() == [
        f"wrote {Path('beginner/README.md')}",
        "wrote GLOSSARY.md",
    ]
    assert command("index")[1] == "up to date\n"
    status, out, _ = command("lint")
    assert status == 0
    assert out.splitlines() == [
        "beginner/01_toy: no faults",
        "",
        "Checked 1 chapter, the indexes and the glossary: no faults.",
    ]


def test_lint_ends_with_1_if_anything_is_wrong(command: Any, tmp_path: Path) -> None:
    a_chapter(tmp_path, code("x.cuda()"))
    status, out, _ = command("lint", "beginner/01_toy")
    assert status == 1
    assert re.search(r"cell 5 \(\w+\): names CUDA .*; take model.device", out)
    assert out.endswith("Checked beginner/01_toy: 1 fault.\n")


def test_lint_takes_what_a_shell_completes(command: Any, tmp_path: Path) -> None:
    chapter = a_chapter(tmp_path)
    for place in ("beginner/01_toy/", str(chapter.notebook)):
        status, out, _ = command("lint", place)
        assert (status, out.splitlines()[0]) == (0, "beginner/01_toy: no faults")
    status, _, err = command("lint", "beginner/09_none")
    assert (status, "place must be one of beginner/01_toy, got 'beginner/09_none'" in err) == (
        2,
        True,
    )
