"""Every chapter of the course: it runs, it says what it said, and it has the form of a chapter.

Chapters are found by their place; there is nothing to register here.
"""

from __future__ import annotations

from functools import cache

import pytest

from infer_lab.course.discovery import TRACKS, Chapter, chapters
from infer_lab.course.lint import lint
from infer_lab.course.strict import CellRun, strict_run

CHAPTERS = chapters()
every_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=str)
whole_run = pytest.mark.timeout(1800)  # a safety net on a busy machine, no measurement


@cache  # both tests below read the same run
def run_of(chapter: Chapter) -> list[CellRun]:
    return strict_run(chapter)


def faults(runs: list[CellRun], *, again: bool) -> str:
    return "\n\n".join(f"{r.cell_id}: {r.fault}" for r in runs if r.fault and r.again == again)


def test_the_course_is_found() -> None:
    assert "beginner/01_manual_llm_inference" in map(str, CHAPTERS)
    assert {chapter.track for chapter in CHAPTERS} <= set(TRACKS)


@every_chapter
def test_a_chapter_has_the_committed_form(chapter: Chapter) -> None:
    assert not lint(chapter), "\n".join(lint(chapter))


@pytest.mark.slow
@whole_run
@every_chapter
def test_every_output_is_the_committed_one(default_dir: object, chapter: Chapter) -> None:
    runs = run_of(chapter)
    print(f"{chapter}: {sum(run.seconds for run in runs if not run.again):.0f} s a run")
    assert not faults(runs, again=False)


@pytest.mark.slow
@whole_run
@every_chapter
def test_every_cell_can_be_run_twice_in_a_row(default_dir: object, chapter: Chapter) -> None:
    assert not faults(run_of(chapter), again=True)
