"""The course's own tools: the exercise checks' runner, discovery, figures, strict runs."""

from __future__ import annotations

import base64
import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image
from toy_chapter import a_chapter, code, prints

from infer_lab import course, viz
from infer_lab.course.discovery import chapters, find_chapter
from infer_lab.course.exercises import Claims, Exercise, run
from infer_lab.course.strict import strict_run

ALT = "One line that rises from the lower left to the upper right."


# Exercise checks ----------------------------------------------------------------------------------


def check_double(double: Any, claim: Claims) -> None:
    with claim("doubles numbers"):
        claim.returns(6, double, 3)
        claim.returns(8, double, 4)
    with claim("doubles tensors"):
        claim.returns(torch.tensor([2.0, 4.0]), double, torch.tensor([1.0, 2.0]))


DOUBLE = Exercise("double", check_double, wrong=[lambda x: x, lambda x: x + 3])


def test_a_right_answer_passes() -> None:
    report = run(DOUBLE, lambda x: 2 * x)
    assert report.status == "passed"
    assert str(report).splitlines() == [
        "double: 2 of 2 properties hold",
        "  holds  doubles numbers",
        "  holds  doubles tensors",
    ]


def test_a_wrong_answer_gets_its_first_counterexample_in_each_property() -> None:
    def adds_three(x: Any) -> Any:
        return x + 3

    report = run(DOUBLE, adds_three)
    assert report.status == "failed"
    assert "adds_three(4): expected 8, got 7" in str(report)
    assert "2 of 2 entries differ, the first at [0]: expected 2.0, got 4.0" in str(report)


def test_an_answer_that_raises_is_a_counterexample_and_the_rest_is_still_tried() -> None:
    def for_tensors(x: Any) -> Any:
        return x.mul(2)

    report = run(DOUBLE, for_tensors)
    assert [claim.counterexample is None for claim in report.claims] == [False, True]
    assert "for_tensors(3) raised AttributeError" in str(report)


@pytest.mark.parametrize("unfinished", [NotImplementedError, ...], ids=str)
def test_a_stub_is_not_attempted(unfinished: Any) -> None:
    def double(x: Any) -> Any:
        if unfinished is ...:
            return ...
        raise unfinished

    report = run(DOUBLE, double)
    assert report.status == "not attempted"
    assert str(report) == "double: not attempted"


@pytest.mark.parametrize(
    "almost",
    [
        lambda x: 2 * x if isinstance(x, int) else (2 * x)[None],
        lambda x: 2 * x if isinstance(x, int) else (2 * x).tolist(),
        lambda x: 2 * x if isinstance(x, int) else x * float("nan"),
        lambda x: float(2 * x) if isinstance(x, int) else 2 * x,
        lambda x: True,
        lambda x: None,
    ],
    ids=["shape", "type", "nan", "float for int", "bool", "nothing"],
)
def test_almost_right_is_wrong(almost: Any) -> None:
    assert run(DOUBLE, almost).status == "failed"


def test_a_float_where_a_whole_number_is_due_looks_like_one() -> None:
    report = run(DOUBLE, lambda x: float(2 * x) if isinstance(x, int) else 2 * x)
    assert "expected 6, got 6.0" in str(report)


def test_check_finds_the_exercise_by_the_functions_name(capsys: pytest.CaptureFixture[str]) -> None:
    check = course.Checks([DOUBLE])

    def double(x: Any) -> Any:
        raise NotImplementedError

    check(double)
    assert capsys.readouterr().out == "double: not attempted\n"
    with pytest.raises(ValueError, match="answer must be named one of double, got triple"):
        check(lambda_named("triple"))


def lambda_named(name: str) -> Any:
    def function(x: Any) -> Any:
        return x

    function.__name__ = name
    return function


# Discovery ----------------------------------------------------------------------------------------


def test_chapters_are_found_by_their_place_in_the_order_they_are_taught(tmp_path: Path) -> None:
    for place in (
        "intermediate/01_b",
        "beginner/02_c",
        "beginner/01_d",
        "beginner/notes",
        "x/01_e",
    ):
        (tmp_path / place).mkdir(parents=True)
    assert list(map(str, chapters(tmp_path))) == [
        "beginner/01_d",
        "beginner/02_c",
        "intermediate/01_b",
    ]
    with pytest.raises(ValueError, match=r"place must be one of beginner/01_d.*got '01_d'"):
        find_chapter("01_d", tmp_path)


def test_checks_are_found_from_any_directory_of_the_course(monkeypatch: Any) -> None:
    place = "beginner/01_manual_llm_inference"
    root = find_chapter(place).root
    for directory in (root, root / place, root / "tests"):
        monkeypatch.chdir(directory)
        assert "tokens_that_fit" in course.checks(place).exercises


def test_checks_are_found_outside_the_course_too(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert course.checks("beginner/01_manual_llm_inference").exercises


# Figures ------------------------------------------------------------------------------------------


def a_figure(**changes: Any) -> Any:
    fig, ax = viz.figure(**{"title": "Up", "xlabel": "step", "ylabel": "time (ms)"} | changes)
    ax.plot([0, 1], [0, 1], **viz.line(0), label="a line")
    return fig


def shown(monkeypatch: Any, fig: Any, alt: str = ALT) -> dict[str, str]:
    displayed: list[dict[str, str]] = []
    monkeypatch.setattr(viz.style, "display", lambda data, raw: displayed.append(data))
    viz.show(fig, alt=alt)
    (data,) = displayed
    return data


def test_alt_text_reaches_the_page(monkeypatch: Any) -> None:
    data = shown(monkeypatch, a_figure(), 'It says "up" & goes <up> from left to right.')
    output = new_output("display_data", data=data)
    notebook = new_notebook(cells=[new_code_cell("x", outputs=[output], execution_count=1)])
    page, _ = HTMLExporter().from_notebook_node(notebook)
    (image,) = BeautifulSoup(page, "html.parser").find_all("img")
    assert image["alt"] == 'It says "up" & goes <up> from left to right.'
    assert data["text/plain"] == '[figure] It says "up" & goes <up> from left to right.'


def test_a_figure_is_a_small_png_and_the_same_each_time(monkeypatch: Any) -> None:
    first, second = (shown(monkeypatch, a_figure()) for _ in range(2))
    assert first == second
    png = base64.b64decode(re.search(r"base64,([^\"]+)", first["text/html"])[1])
    image = Image.open(io.BytesIO(png))
    assert (image.format, image.width) == ("PNG", 1080)
    assert len(png) < 40_000


def test_a_figure_without_alt_text_or_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="alt must say what the figure shows"):
        viz.show(a_figure(), alt="A line")
    with pytest.raises(ValueError, match="the figure lacks: title"):
        viz.show(a_figure(title=""), alt=ALT)
    with pytest.raises(ValueError, match="the figure lacks: x label, y label"):
        viz.show(a_figure(xlabel="", ylabel=""), alt=ALT)


def test_figures_leave_matplotlibs_settings_alone(monkeypatch: Any) -> None:
    before = dict(mpl.rcParams)
    shown(monkeypatch, a_figure())
    assert dict(mpl.rcParams) == before


def test_colours_survive_greyscale() -> None:
    luma = [viz.luma(color) for color in viz.COLORS]
    assert luma == sorted(luma) and luma[-1] < 0.8  # still seen on white
    assert all(b - a >= 0.14 for a, b in pairwise(luma))
    ramp = [viz.luma(mpl.colormaps[viz.COLORMAP](i / 20)[:3]) for i in range(21)]
    assert ramp == sorted(ramp, reverse=True)


# Strict runs --------------------------------------------------------------------------------------


def figure_output(alt: str, png: str) -> Any:
    image = f'<img src="data:image/png;base64,{png}" width="720" alt="{alt}">'
    data = {"text/html": image, "text/plain": f"[figure] {alt}"}
    return new_output("display_data", data=data)


def test_a_strict_run_compares_all_but_pixels_and_runs_each_cell_twice(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)  # a strict run must not spin by default
    draw = f"fig, ax = viz.figure(title='t', xlabel='x', ylabel='y')\nviz.show(fig, alt={ALT!r})"
    warn = "import sys\nprint('careful', file=sys.stderr)"
    cells = {
        "start": code("from infer_lab import viz\nnumbers = []"),
        "right": code("print(len('abc'))", prints("3\n")),
        "wrong": code("print(len('abc'))", prints("4\n")),
        "ignored": code("print(len('abc'))", prints("4\n"), tags=("nbval-ignore-output",)),
        "moves-on": code("numbers.append(1)\nprint(numbers)", prints("[1]\n")),
        "fails-twice": code("numbers.remove(1) if len(numbers) == 2 else numbers[1]"),
        "waits": code("import os\nprint(os.getenv('OMP_WAIT_POLICY'))", prints("PASSIVE\n")),
        "stderr": code(warn),
        "other-pixels": code(draw, figure_output(ALT, "AAAA")),
        "other-alt": code(draw, figure_output(ALT.replace("One", "Two"), "AAAA")),
    }
    for cell_id, cell in cells.items():
        cell.id = cell_id
    runs = [r for r in strict_run(a_chapter(tmp_path, *cells.values())) if r.cell_id in cells]
    assert [r.cell_id for r in runs if r.fault and not r.again] == ["wrong", "stderr", "other-alt"]
    assert {r.cell_id for r in runs if r.fault and r.again} == {
        "wrong",
        "moves-on",
        "fails-twice",
        "stderr",
        "other-alt",
    }
