"""Every exercise of every chapter: its check accepts the solution and nothing less.

Chapters are found by their place; there is nothing to register here.
"""

from __future__ import annotations
import __future__

from typing import Any

import nbformat
import pytest

from infer_lab.course.discovery import Chapter, chapters
from infer_lab.course.exercises import Exercise, run
from infer_lab.course.greedy import MIN_MARGIN, GreedyExample, margins
from infer_lab.course.lint import code_cells
from infer_lab.model.transformer import Transformer
from infer_lab.tokenize import Tokenizer

EXERCISES = [
    pytest.param(chapter, exercise, id=f"{chapter}:{exercise.name}")
    for chapter in chapters()
    for exercise in chapter.load("checks").EXERCISES
]
GREEDY = [
    pytest.param(chapter, example, id=f"{chapter}:{example.prompt}")
    for chapter in chapters()
    for example in getattr(chapter.load("checks"), "GREEDY", ())
]
every_exercise = pytest.mark.parametrize(("chapter", "exercise"), EXERCISES)


@every_exercise
def test_the_solution_passes(chapter: Chapter, exercise: Exercise) -> None:
    report = run(exercise, getattr(chapter.load("solutions"), exercise.name))
    assert report.status == "passed", str(report)


@every_exercise
def test_wrong_answers_fail(chapter: Chapter, exercise: Exercise) -> None:
    assert len(exercise.wrong) >= 2
    for answer in exercise.wrong:
        report = run(exercise, answer)
        assert report.status == "failed", f"{answer.__name__} got through:\n{report}"


@every_exercise
def test_the_untouched_stub_is_not_attempted(chapter: Chapter, exercise: Exercise) -> None:
    assert run(exercise, stub(chapter, exercise.name)).status == "not attempted"


@every_exercise
def test_a_check_says_the_same_on_every_run(chapter: Chapter, exercise: Exercise) -> None:
    for answer in exercise.wrong:
        again = chapter.load("checks")
        same = next(e for e in again.EXERCISES if e.name == exercise.name)
        assert str(run(same, getattr(again, answer.__name__))) == str(run(exercise, answer))


@pytest.mark.parametrize(("chapter", "example"), GREEDY)
def test_greedy_examples_are_never_close(
    chapter: Chapter,
    example: GreedyExample,
    default_model: Transformer,
    default_tokenizer: Tokenizer,
) -> None:
    lead = margins(default_model, default_tokenizer, example)
    assert min(lead) > MIN_MARGIN, [round(x, 2) for x in lead]
    notebook = nbformat.read(chapter.notebook, as_version=4)
    cells = [cell.source + str(cell.get("outputs", "")) for cell in notebook.cells]
    assert any(example.prompt in text for text in cells), "the notebook does not use this prompt"


def stub(chapter: Chapter, name: str) -> Any:
    """The function (or class) as the notebook defines it for the learner to fill in."""
    notebook = nbformat.read(chapter.notebook, as_version=4)
    (cell,) = [c for c in code_cells(notebook) if f"check({name})" in c.source]
    # Annotations stay unevaluated: the stub needs nothing of the lesson to be defined.
    flags = __future__.annotations.compiler_flag
    namespace: dict[str, Any] = {"check": lambda answer: None}
    exec(compile(cell.source, str(chapter), "exec", flags=flags), namespace)
    return namespace[name]
