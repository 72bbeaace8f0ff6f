"""The index of each track, beginner/README.md and so on, made from the notebooks' first cells.

`infer-lab index` writes them and puts the glossary in order; `infer-lab lint` compares.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from infer_lab.course import glossary, lesson
from infer_lab.course.discovery import TRACKS, Chapter, chapters

PAGE = "README.md"
_SUBJECT = {
    "beginner": "One request, then many, then their memory.",
    "intermediate": "One engine, under real demands.",
    "advanced": "The metal and the fleet.",
}
_TEXT = """\
# {title}

{subject}

| | chapter | question | time | builds | exercises |
|---|---|---|---|---|---|
{rows}

## How to work through it

Take the chapters in order: each uses the words and the code of those before it.
`infer-lab lab {example}` opens one; `make lab` opens the first of the course.

1. Read up to a cell, say what you expect, then run it. If it surprises you, change it and run it
   again: any cell can be run twice.
2. Do the exercises at the end. `check(...)` says which properties your answer has and shows a
   counterexample for each that it lacks. Solutions with their reasons are in `solutions.py` beside
   the notebook. They take about as long as the lesson.
3. Answer the three questions at the very end before you unfold the answers.

A word in bold is explained where it stands; the [glossary](../{glossary}) has them all.
This page is made from the notebooks by `infer-lab index`.
"""


def page(track: str, taught: list[Chapter]) -> str:
    """The index of a track with these chapters."""
    rows = "\n".join(_row(chapter) for chapter in taught)
    return _TEXT.format(
        title=track.capitalize(),
        subject=_SUBJECT[track],
        rows=rows,
        example=str(taught[0]),
        glossary=glossary.PAGE,
    )


def _row(chapter: Chapter) -> str:
    notebook = lesson.read(chapter)
    question = lesson.lead(notebook, "The question")
    cells = [
        str(int(chapter.name[:2])),
        f"[{lesson.title(notebook)[1]}]({chapter.name}/{chapter.name}.ipynb)",
        question[:1].upper() + question[1:],
        re.split(r"[,.;]", lesson.lead(notebook, "Time"))[0],
        ", ".join(_link(chapter.root, module) for module in lesson.builds(notebook)),
        str(len(chapter.load("checks").EXERCISES)),
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _link(root: Path, module: str) -> str:
    path = f"infer_lab/{module.replace('.', '/')}"
    path += ".py" if (root / f"{path}.py").is_file() else ""
    return f"[`{module}`](../{path})"


def pages(root: Path) -> dict[Path, str]:
    """Every page that is generated, with the text that it must have."""
    whole = [chapter for chapter in chapters(root) if all(p.is_file() for p in chapter.files)]
    found = {
        root / track / PAGE: page(track, taught)
        for track in TRACKS
        if (taught := [chapter for chapter in whole if chapter.track == track])
    }
    found[root / glossary.PAGE] = glossary.page(glossary.read(root), whole)
    return found


def write(root: Path) -> list[Path]:
    """Write the pages that differ; returns their paths."""
    changed = []
    for path, text in pages(root).items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8", newline="\n")
            changed.append(path)
    return changed


def index_faults(root: Path) -> Iterator[str]:
    """Indexes that differ from the chapters, and numbers that two chapters share."""
    taught = chapters(root)
    for (track, number), count in Counter((c.track, c.name[:2]) for c in taught).items():
        if count > 1:
            yield f"{track}: {count} chapters have the number {number}; rename all but one"
    for path, text in pages(root).items():
        if path.name == PAGE and not (path.is_file() and path.read_text(encoding="utf-8") == text):
            place = path.relative_to(root).as_posix()
            yield f"{place}: doesn't say what the chapters say; run `infer-lab index`"
