"""Rules about exercises: 3 to 5, each with a stub, a check, wrong answers and a solution."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from infer_lab.course import lesson
from infer_lab.course.discovery import Chapter
from infer_lab.course.exercises import Exercise, run


def exercise_faults(notebook: Any, chapter: Chapter) -> Iterator[str]:
    """What is wrong with the chapter's exercises, as far as one sees without trying answers."""
    try:
        checks, solutions = chapter.load("checks"), chapter.load("solutions")
    except Exception as error:  # anything may be wrong in an unfinished file: that is the finding
        yield f"checks.py or solutions.py can't be imported: {type(error).__name__}: {error}"
        return
    exercises: list[Exercise] = list(getattr(checks, "EXERCISES", ()))
    names = [exercise.name for exercise in exercises]
    if not 3 <= len(exercises) <= 5:
        yield f"must have 3 to 5 exercises in EXERCISES of checks.py, got {len(exercises)}"
    code = lesson.code_cells(notebook)
    checked = re.findall(r"^check\((\w+)\)", "\n".join(c.source for c in code), re.MULTILINE)
    if checked != names:
        yield f"must check the exercises {names} in this order, got {checked}; add check(...) cells"
    for exercise in exercises:
        if len(exercise.wrong) < 2:
            yield (
                f"exercise {exercise.name} must list at least 2 plausible wrong answers,"
                f" got {len(exercise.wrong)}; add functions to wrong=[...] in checks.py"
            )
        yield from _solution_faults(exercise, getattr(solutions, exercise.name, None))
        yield from _stub_faults(exercise, code, lesson.is_executed(notebook))
    if any("load_model(" in cell.source for cell in code) and not hasattr(checks, "GREEDY"):
        yield (
            "uses the model, so checks.py must list its greedy examples: GREEDY ="
            " [GreedyExample(prompt, max_tokens=...)], or [] if nothing is chosen greedily"
        )
    everything = "\n".join(f"{cell.source}{cell.get('outputs', '')}" for cell in notebook.cells)
    for example in getattr(checks, "GREEDY", ()):
        if example.prompt not in everything:
            yield f"GREEDY names {example.prompt!r}, which the notebook doesn't use; drop it"


def _solution_faults(exercise: Exercise, solution: Any) -> Iterator[str]:
    if not callable(solution):
        yield f"solutions.py must define {exercise.name}, the solution of that exercise"
    elif "#" not in _source(solution):
        yield f"the solution of {exercise.name} must give its reasons; add comments"


def _source(solution: Any) -> str:
    """The source of a function or class; Python finds a class's by its module, which is private."""
    if isinstance(solution, type):
        methods = [each for each in vars(solution).values() if inspect.isfunction(each)]
        return "".join(map(inspect.getsource, methods))
    return inspect.getsource(solution)


def _stub_faults(exercise: Exercise, code: list[Any], executed: bool) -> Iterator[str]:
    for cell in code:
        if not re.search(rf"^check\({exercise.name}\)", cell.source, re.MULTILINE):
            continue
        tree = lesson.parse(cell.source)
        defined = [n.name for n in tree.body if hasattr(n, "name")] if tree else []
        if exercise.name not in defined:
            yield f"the cell that checks {exercise.name} must define its stub, too"
        printed = "".join(str(output.get("text", "")) for output in cell.outputs)
        if executed and printed.strip() != f"{exercise.name}: not attempted":
            yield (
                f"the stub of {exercise.name} must come out as 'not attempted'; let it raise"
                " NotImplementedError, and execute the notebook"
            )


def answer_faults(chapter: Chapter) -> Iterator[str]:
    """What comes out when all answers are tried: solutions must pass, wrong ones must not."""
    checks, solutions = chapter.load("checks"), chapter.load("solutions")
    for exercise in checks.EXERCISES:
        report = run(exercise, getattr(solutions, exercise.name))
        if report.status == "not attempted":
            yield f"the solution of {exercise.name} is a stub; write it"
        for claim in report.claims:
            if claim.counterexample:
                yield (
                    f"the solution of {exercise.name} must pass its check, and {claim.text!r}"
                    f" fails: {claim.counterexample}"
                )
        for answer in exercise.wrong:
            report = run(exercise, answer)
            if report.status != "failed":
                name = getattr(answer, "__name__", repr(answer))
                yield (
                    f"the check of {exercise.name} must reject {name}, and it {report.status};"
                    " add a claim that tells it from the solution"
                )
