"""`infer-lab new-chapter`: a chapter that runs, to be rewritten piece by piece.

The template is written into a temporary directory and executed there, so that its outputs are this
machine's. Only a whole chapter that the linter has passed is moved into the course.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import nbformat

from infer_lab.course import index, template
from infer_lab.course.discovery import TRACKS, Chapter, chapters, course_root
from infer_lab.course.execute import execute, tidy
from infer_lab.course.lint import lint

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def new_chapter(track: str, number: str, name: str, root: Path | None = None) -> Chapter:
    """Write TRACK/NN_NAME below the course's root and bring the track's index up to date.

    track: beginner, intermediate or advanced.
    number: 1 to 99, and free in the track.
    name: lower-case words joined by underscores.

    Raises ValueError for anything else, and when the place is taken. Takes some seconds: the
    notebook runs once on the default model.
    """
    root = course_root() if root is None else root
    chapter = _named(track, number, name, root)
    with tempfile.TemporaryDirectory() as temporary:
        draft = Chapter(Path(temporary).resolve(), chapter.track, chapter.name)
        draft.directory.mkdir(parents=True)
        template.write(draft)
        notebook = execute(draft)
        tidy(notebook)
        nbformat.write(notebook, draft.notebook)
        if faults := lint(draft):
            raise RuntimeError("the template breaks the rules:\n" + "\n".join(faults))
        _move(draft, chapter)
    index.write(root)
    return chapter


def _named(track: str, number: str, name: str, root: Path) -> Chapter:
    if track not in TRACKS:
        raise ValueError(f"track must be one of {', '.join(TRACKS)}, got {track!r}")
    if not re.fullmatch(r"[0-9]{1,2}", number) or int(number) == 0:
        raise ValueError(f"number must be from 1 to 99, got {number!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name must be lower-case words joined by underscores, such as my_topic, got {name!r}"
        )
    chapter = Chapter(root, track, f"{int(number):02}_{name}")
    taken = {c.name[:2]: str(c) for c in chapters(root) if c.track == track}
    if there := taken.get(chapter.name[:2]):
        free = next(i for i in range(1, 101) if f"{i:02}" not in taken)
        raise ValueError(
            f"number must be free in {track}, got {number}: that is {there}; {free} is"
        )
    if chapter.directory.exists():
        raise ValueError(
            f"{chapter.directory} is there already; move it away, or take another name"
        )
    return chapter


def _move(draft: Chapter, chapter: Chapter) -> None:
    """All of the chapter or nothing: files are copied beside the place and renamed into it."""
    partial = chapter.directory.with_name(f".{chapter.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for path in draft.files:
            shutil.copyfile(path, partial / path.name)
        partial.rename(chapter.directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def run(track: str, number: str, name: str) -> int:
    """Make the chapter and say what to do next; returns the exit status 0."""
    print("Running the template once; this takes some seconds", flush=True)
    chapter = new_chapter(track, number, name)
    print(f"""\
{chapter} is there: it runs, passes the linter and stands in {chapter.track}/{index.PAGE}.

Next
  1. infer-lab lab {chapter}     write the lesson; hints begin with "To do:"
  2. checks.py, solutions.py     beside the notebook: your exercises
  3. python -m infer_lab.course.execute {chapter}
  4. infer-lab lint {chapter}     says what is missing, and how to mend it
  5. pytest -k {chapter.name}     runs the notebook strictly, and all answers
  6. infer-lab index     once {chapter.track}/{index.PAGE} or GLOSSARY.md lag behind

CONTRIBUTING.md explains each step.""")
    return 0
