"""`infer-lab lint`: chapters one by one, then what no chapter can know alone.

The exercises' answers are tried, too: the solution must pass its check, wrong answers must not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from infer_lab.course import lesson
from infer_lab.course.discovery import Chapter, chapters, course_root, find_chapter
from infer_lab.course.glossary import page_faults, term_faults
from infer_lab.course.index import index_faults
from infer_lab.course.lint import lint
from infer_lab.course.lint.exercises import answer_faults
from infer_lab.course.template import HINT


def run(places: Iterable[str] = (), root: Path | None = None) -> int:
    """Lint and print; returns 1 if anything is wrong, else 0.

    places: such as "beginner/02_sampling"; none: all chapters, the indexes and the glossary.
    Raises ValueError for a place that is no chapter.
    """
    root = course_root() if root is None else root
    taught = chapters(root)
    named = [find_chapter(_place(place), root) for place in places]
    wrong = 0
    for chapter in named or taught:
        faults = [*chapter_faults(chapter), *_page_faults(term_faults(root, [chapter]))]
        hints = _hints(chapter)
        note = f"; {hints} hints of the template to follow and delete" if hints else ""
        print(f"{chapter}: {_count(len(faults), 'fault')}{note}", flush=True)
        wrong += _show(faults)
    if not named:
        wrong += _show(list(shared_faults(root)))
    what = (
        ", ".join(map(str, named))
        or f"{_count(len(taught), 'chapter')}, the indexes and the glossary"
    )
    print(f"\nChecked {what}: {_count(wrong, 'fault')}.")
    return 1 if wrong else 0


def chapter_faults(chapter: Chapter) -> Iterator[str]:
    """A chapter's faults; its exercises' answers are tried once the form is right."""
    faults = lint(chapter)
    yield from faults
    if not faults:
        yield from answer_faults(chapter)


def shared_faults(root: Path) -> Iterator[str]:
    """What is wrong with the glossary and the indexes."""
    yield from _page_faults(page_faults(root, chapters(root)))
    yield from _page_faults(index_faults(root))


def _page_faults(faults: Iterator[str]) -> Iterator[str]:
    """The faults; a page or notebook that can't be read is one, too."""
    try:
        yield from faults
    except (ValueError, OSError) as error:
        yield str(error)


def _place(given: str) -> str:
    """A place from what a shell completes: a directory or the notebook in it."""
    path = Path(given)
    path = path.parent if path.suffix == ".ipynb" else path
    return "/".join(path.resolve().parts[-2:]) if path.is_dir() else given


def _hints(chapter: Chapter) -> int:
    if not chapter.notebook.is_file():
        return 0
    return sum(cell.source.count(HINT) for cell in lesson.read(chapter).cells)


def _show(faults: list[str]) -> int:
    for fault in faults:
        print(f"  {fault}")
    return len(faults)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
