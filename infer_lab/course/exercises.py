"""The exercise checks' runner: `check(my_function)` says what holds and what doesn't, and why.

A chapter's `checks.py` states each exercise as claims about the learner's function:

    def check_double(double, claim):
        with claim("doubles every number"):
            claim.returns(6, double, 3)              # double(3) must be 6
        with claim("keeps zero"):
            claim.returns(0, double, 0)

    EXERCISES = [Exercise("double", check_double, wrong=[squares, adds_two])]

A block ends at its first counterexample, the next claim is still tried. A function that raises
NotImplementedError or returns `...` is *not attempted*, so that an untouched notebook runs through.
`wrong` lists answers that the check must reject; the test suite runs them, and the solutions too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer_lab.course.discovery import find_chapter

Check = Callable[[Any, "Claims"], None]


@dataclass(frozen=True)
class Exercise:
    """A task: `name` is the function (or class) to write, `check` makes claims about it."""

    name: str
    check: Check
    wrong: Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class Claim:
    """One property, and how it failed if it did."""

    text: str
    counterexample: str | None = None


@dataclass(frozen=True)
class Report:
    """What a check found; no claims at all means not attempted."""

    name: str
    claims: tuple[Claim, ...]

    @property
    def status(self) -> str:
        """ "not attempted", "passed" or "failed"."""
        if not self.claims:
            return "not attempted"
        return "failed" if any(c.counterexample for c in self.claims) else "passed"

    def __str__(self) -> str:
        if not self.claims:
            return f"{self.name}: not attempted"
        held = sum(claim.counterexample is None for claim in self.claims)
        lines = [f"{self.name}: {held} of {len(self.claims)} properties hold"]
        for claim in self.claims:
            lines.append(f"  {'FAILS' if claim.counterexample else 'holds'}  {claim.text}")
            if claim.counterexample:
                lines.append(f"         {claim.counterexample}")
        return "\n".join(lines)


class NotAttempted(Exception):
    """The function under test is still the stub."""


class Mismatch(Exception):
    """A counterexample, in words."""


class Claims:
    """Collects the claims of one check; `with claim("..."):` opens one."""

    def __init__(self) -> None:
        self.found: list[Claim] = []

    @contextmanager
    def __call__(self, text: str) -> Iterator[None]:
        try:
            yield
        except (NotAttempted, NotImplementedError):
            raise NotAttempted from None
        except Mismatch as mismatch:
            self.found.append(Claim(text, str(mismatch)))
        except Exception as error:  # the learner's code may raise anything: that is the finding
            self.found.append(Claim(text, f"raised {type(error).__name__}: {error}"))
        else:
            self.found.append(Claim(text))

    def returns(
        self,
        expected: Any,
        function: Callable[..., Any],
        *args: Any,
        tolerance: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        """`function(*args, **kwargs)` must equal `expected`; floats within `tolerance`."""
        call = describe_call(function, args, kwargs)
        try:
            got = function(*args, **kwargs)
        except (NotAttempted, NotImplementedError):
            raise
        except Exception as error:
            raise Mismatch(f"{call} raised {type(error).__name__}: {error}") from error
        if difference := differs(got, expected, tolerance):
            raise Mismatch(f"{call}: {difference}")

    def true(self, condition: bool, counterexample: str) -> None:
        """`condition` must hold; `counterexample` says what was seen when it doesn't."""
        if not condition:
            raise Mismatch(counterexample)


class Checks:
    """A chapter's exercises; call it with an answer, which it finds by the function's name."""

    def __init__(self, exercises: Sequence[Exercise]) -> None:
        self.exercises = {exercise.name: exercise for exercise in exercises}

    def __call__(self, answer: Callable[..., Any]) -> None:
        """Print what the check of `answer` found."""
        name = getattr(answer, "__name__", repr(answer))
        if name not in self.exercises:
            allowed = ", ".join(self.exercises)
            raise ValueError(f"answer must be named one of {allowed}, got {name}")
        print(run(self.exercises[name], answer))


def checks(place: str) -> Checks:
    """The checks of a chapter: `check = course.checks("beginner/02_sampling")`."""
    return Checks(find_chapter(place).load("checks").EXERCISES)


def run(exercise: Exercise, answer: Callable[..., Any]) -> Report:
    """Try an answer; never raises because of it."""
    claims = Claims()
    try:
        exercise.check(_watched(answer), claims)
    except NotAttempted:
        return Report(exercise.name, ())
    return Report(exercise.name, tuple(claims.found))


def _watched(answer: Callable[..., Any]) -> Callable[..., Any]:
    """The answer, except that returning `...` counts as not attempted. Classes stay as they are."""
    if inspect.isclass(answer):
        return answer

    @functools.wraps(answer)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = answer(*args, **kwargs)
        if result is ... or result is NotImplemented:
            raise NotAttempted
        return result

    return watched


def differs(got: Any, expected: Any, tolerance: float = 1e-5) -> str:
    """How `got` differs from `expected`, in words; "" if it doesn't."""
    if isinstance(expected, Tensor):
        return _tensor_differs(got, expected, tolerance)
    if isinstance(expected, float):
        same = isinstance(got, int | float) and abs(got - expected) <= tolerance
    else:
        same = type(got) is type(expected) and got == expected
    return "" if same else f"expected {describe(expected)}, got {describe(got)}"


def _tensor_differs(got: Any, expected: Tensor, tolerance: float) -> str:
    if not isinstance(got, Tensor):
        return f"expected a {describe(expected)}, got {describe(got)}"
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if (got.dtype == torch.bool) != (expected.dtype == torch.bool):
        return f"expected dtype {expected.dtype}, got {got.dtype}"
    got = got.detach().to(expected.device)
    apart = ~torch.isclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance)
    if not apart.any():
        return ""
    at = tuple(apart.nonzero()[0].tolist())
    return (
        f"{int(apart.sum())} of {apart.numel()} entries differ, the first at {list(at)}:"
        f" expected {describe(expected[at].item())}, got {describe(got[at].item())}"
    )


def describe_call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """A call as one would write it, with tensors by their shape."""
    parts = [describe(value) for value in args]
    parts += [f"{name}={describe(value)}" for name, value in kwargs.items()]
    return f"{getattr(function, '__name__', 'it')}({', '.join(parts)})"


def describe(value: Any) -> str:
    """A short, stable spelling of a value."""
    if isinstance(value, Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, float):
        text = f"{value:.5g}"
        return f"{text}.0" if text.lstrip("-").isdigit() else text  # 1.0 is not 1
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
