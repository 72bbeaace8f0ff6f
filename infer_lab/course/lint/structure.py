"""Rules about a notebook as a whole: its first cell, its sections, its counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from infer_lab.course import lesson
from infer_lab.course.discovery import Chapter
from infer_lab.course.lesson import IGNORE_OUTPUT, LAST_SECTION, LIBRARY_SECTION

HEADINGS = (
    "Build it by hand",
    LIBRARY_SECTION,
    "Measure it",
    "Back to chapter 1",
    "What breaks",
    "Exercises",
    LAST_SECTION,
)
ENGINES = ("vLLM", "SGLang", "llama.cpp", "TensorRT-LLM")
EXECUTE = "run `python -m infer_lab.course.execute {}` and commit what it writes"


def structure_faults(notebook: Any, chapter: Chapter) -> Iterator[str]:
    """What is wrong with the notebook's form, apart from its single cells."""
    yield from _file_faults(notebook, EXECUTE.format(chapter))
    yield from _lead_faults(notebook, chapter)
    yield from _banner_faults(notebook)
    yield from _heading_faults(notebook)
    yield from _section_faults(notebook)


def _file_faults(notebook: Any, execute: str) -> Iterator[str]:
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        yield "nbformat must be 4.5 or later, so that cells have ids; save it in JupyterLab 4"
    if "widgets" in notebook.metadata:
        yield f"holds widget state; {execute}"
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield f"the kernel must be python3; {execute}"
    code = lesson.code_cells(notebook)
    if not lesson.is_executed(notebook):
        yield f"has no outputs; {execute}"
    elif wrong := [c for i, c in enumerate(code, 1) if c.execution_count != i]:
        yield (
            f"execution counts must be 1 to {len(code)}, and that of cell {wrong[0].get('id')}"
            f" is {wrong[0].execution_count}; {execute}"
        )


def _lead_faults(notebook: Any, chapter: Chapter) -> Iterator[str]:
    number, title = lesson.title(notebook)
    if number != int(chapter.name[:2]):
        wanted = f"# {int(chapter.name[:2])} · {title or 'Its title'}"
        yield f"must begin with its number and title; write {wanted!r} as the first line"
    if not lesson.lead(notebook, "The question").endswith("?"):
        yield "the first cell must say **The question:** and ask it in a sentence that ends in '?'"
    if not 3 <= len(found := lesson.objectives(notebook)) <= 5:
        yield f"the first cell must list 3 to 5 objectives, each with '- ', got {len(found)}"
    if "you can" not in notebook.cells[0].source:
        yield "the first cell must lead its objectives in with 'After this chapter you can'"
    if not lesson.lead(notebook, "Builds on"):
        yield "the first cell must say **Builds on:** and name the chapters that come before it"
    if not re.search(r"\d.*\b(minutes?|hours?)\b", lesson.lead(notebook, "Time")):
        yield "the first cell must say **Time:** in minutes, such as '**Time:** about 45 minutes.'"


def _banner_faults(notebook: Any) -> Iterator[str]:
    first = next(iter(lesson.code_cells(notebook)), None)
    if first is None or "banner()" not in first.source or not lesson.ignores_output(first):
        yield f"the first code cell must call course.banner() and have the tag {IGNORE_OUTPUT}"


def _heading_faults(notebook: Any) -> Iterator[str]:
    found = lesson.headings(notebook)
    if not found or found[0][0] != 1 or [level for level, _ in found].count(1) != 1:
        yield "its title must be the only heading of level 1; begin the others with ## or ###"
    second = [text for level, text in found if level == 2]
    names = [lesson.without_number(text) for text in second]
    if [name for name in names if name in HEADINGS] != list(HEADINGS):
        yield f"the sections must be {list(HEADINGS)} in this order, got {names}"
    wanted = [f"{i}. {name}" for i, name in enumerate(names, 1)]
    if wrong := next((pair for pair in zip(second, wanted, strict=True) if pair[0] != pair[1]), ()):
        yield f"sections are numbered from 1 on; write '## {wrong[1]}' instead of '## {wrong[0]}'"


def _section_faults(notebook: Any) -> Iterator[str]:
    sections = lesson.sections(notebook)
    for name in HEADINGS[:-1]:
        if name in sections and not any(c.cell_type == "code" for c in sections[name]):
            yield f"the section {name!r} has no code; show what it says"
    library = [c.source for c in sections.get(LIBRARY_SECTION, ()) if c.cell_type == "code"]
    if library and not lesson.builds(notebook):
        yield f"{LIBRARY_SECTION!r} must import the modules of infer_lab that do the same"
    if library and not re.search(r"^\s*assert ", "\n".join(library), re.MULTILINE):
        yield f"{LIBRARY_SECTION!r} must prove the two equal; assert it"
    last = "\n".join(cell.source for cell in sections.get(LAST_SECTION, ()))
    if last and not any(engine in last for engine in ENGINES):
        yield f"{LAST_SECTION!r} must name a file or class of one of {', '.join(ENGINES)}"
    source = notebook.cells[-1].source
    folded = re.findall(r"<details>\s*<summary>.*?</summary>.*?</details>", source, re.DOTALL)
    if len(folded) != 3:
        yield (
            "the last cell must hold three questions with folded answers,"
            f" <details><summary>Answer</summary> ... </details>; got {len(folded)}"
        )
