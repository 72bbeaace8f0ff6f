"""The template of a chapter: a small whole lesson that runs, with hints for its author.

    lesson.py      the notebook, as text
    checks.py      the exercises' checks, as they are copied
    solutions.py   their solutions, as they are copied

In them @PLACE@, @NUMBER@ and @TITLE@ stand for beginner/10_my_topic, 10 and My topic. A hint is a
paragraph of the notebook that begins with `HINT`; the author follows it and deletes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from infer_lab.course.discovery import Chapter
from infer_lab.course.template.lesson import LESSON

HINT = "> **To do:**"
_NOT_COPIED = "# mypy: ignore-errors\n\n"


def write(chapter: Chapter) -> None:
    """Write the chapter's three files into its directory, the notebook without outputs."""
    for path in chapter.files[1:]:
        text = Path(__file__).with_name(path.name).read_text(encoding="utf-8")
        text = _filled(text.replace(_NOT_COPIED, ""), chapter)
        path.write_text(text, encoding="utf-8", newline="\n")
    nbformat.write(notebook(chapter), chapter.notebook)


def notebook(chapter: Chapter) -> nbformat.NotebookNode:
    """The lesson's cells, in which "%% code banner nbval-ignore-output" begins a tagged one."""
    cells = []
    for block in re.split(r"^%% ", _filled(LESSON, chapter), flags=re.MULTILINE)[1:]:
        head, source = block.split("\n", maxsplit=1)
        kind, name, *tags = head.split()
        make = new_code_cell if kind == "code" else new_markdown_cell
        metadata = {"tags": tags} if tags else {}
        cells.append(make(source.strip(), id=name, metadata=metadata))
    return new_notebook(cells=cells)


def _filled(text: str, chapter: Chapter) -> str:
    number, name = chapter.name.split("_", maxsplit=1)
    values = {
        "PLACE": str(chapter),
        "NUMBER": str(int(number)),
        "TITLE": name.replace("_", " ").capitalize(),
    }
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], text)
