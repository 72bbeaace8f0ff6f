"""`infer-lab new-chapter`: a whole chapter that keeps every rule, or nothing at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_output
from toy_chapter import a_chapter

from infer_lab import cli
from infer_lab.course import index, scaffold, template
from infer_lab.course.discovery import Chapter
from infer_lab.course.exercises import run
from infer_lab.course.lint.course import chapter_faults, shared_faults
from infer_lab.course.strict import strict_run

ROOT = Path(__file__).resolve().parent.parent


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


def pretend_to_execute(chapter: Chapter) -> Any:
    """Outputs as they would be as far as the linter looks."""
    notebook = nbformat.read(chapter.notebook, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(cells, 1):
        cell.execution_count = count
        text = "x\n"
        if "\ncheck(" in cell.source:
            text = f"{cell.source.split('check(')[1].rstrip(')')}: not attempted\n"
        cell.outputs = [new_output("stream", name="stdout", text=text)]
    return notebook


@pytest.fixture
def command(monkeypatch: Any, tmp_path: Path, capsys: Any) -> Any:
    """`infer-lab new-chapter` in a course with the chapter beginner/01_toy, without a kernel."""
    a_chapter(tmp_path)
    index.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scaffold, "execute", pretend_to_execute)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["new-chapter", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_chapter_is_written_and_its_author_told_what_to_do(
    command: Any, tmp_path: Path
) -> None:
    before = files(tmp_path)
    status, out, err = command("beginner", "2", "my_topic")
    assert (status, err) == (0, "")
    place = "beginner/02_my_topic"
    names = ("02_my_topic.ipynb", "checks.py", "solutions.py")
    assert files(tmp_path) - before == {place, *(f"{place}/{name}" for name in names)}
    for what in (f"lab {place}", f"course.execute {place}", f"lint {place}", "infer-lab index"):
        assert what in out
    text = "".join((tmp_path / place / name).read_text(encoding="utf-8") for name in names)
    assert "# 2 · My topic" in text and f'course.checks(\\"{place}\\")' in text
    assert "@" not in text and "mypy" not in text
    assert list(shared_faults(tmp_path)) == []


def test_a_track_may_begin_with_it(command: Any, tmp_path: Path) -> None:
    assert command("advanced", "07", "far_away")[0] == 0
    assert (tmp_path / "advanced" / "README.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("expert", "2", "a"), "track must be one of beginner, intermediate, advanced"),
        (("../beginner", "2", "a"), "track must be one of"),
        (("beginner", "0", "a"), "number must be from 1 to 99, got '0'"),
        (("beginner", "100", "a"), "number must be from 1 to 99"),
        (("beginner", "two", "a"), "number must be from 1 to 99"),
        (("beginner", "01", "other"), "01: that is beginner/01_toy; 2 is"),
        (("beginner", "2", "My-Topic"), "name must be lower-case words joined by underscores"),
        (("beginner", "2", "a/../b"), "name must be lower-case words"),
        (("beginner", "2", "_a"), "name must be lower-case words"),
        (("beginner", "2", ""), "name must be lower-case words"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_written(
    command: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = files(tmp_path)
    status, _, err = command(*arguments)
    assert status == 2
    assert err.startswith("infer-lab: error: ") and message in err
    assert files(tmp_path) == before


def test_what_is_there_is_never_overwritten(command: Any, tmp_path: Path) -> None:
    there = tmp_path / "beginner" / "02_mine"
    there.write_text("my notes", encoding="utf-8")
    status, _, err = command("beginner", "2", "mine")
    assert status == 2 and "is there already" in err
    assert there.read_text(encoding="utf-8") == "my notes"


@pytest.mark.parametrize("when", ["execute", "lint", "_move"])
def test_what_fails_half_way_leaves_nothing(
    command: Any, tmp_path: Path, monkeypatch: Any, when: str
) -> None:
    def fails(*arguments: Any) -> None:
        raise OSError("the disk is full")

    before = files(tmp_path)
    monkeypatch.setattr(scaffold, when, fails)
    assert command("beginner", "2", "mine")[0] == 2
    assert files(tmp_path) == before


def test_a_copy_that_fails_half_way_leaves_nothing(
    command: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    copied: list[str] = []

    def fails_at_the_second(source: Path, target: Path) -> None:
        copied.append(target.name)
        target.write_bytes(source.read_bytes())
        if len(copied) == 2:
            raise OSError("the disk is full")

    before = files(tmp_path)
    monkeypatch.setattr(scaffold.shutil, "copyfile", fails_at_the_second)
    assert command("beginner", "2", "mine")[0] == 2
    assert len(copied) == 2 and files(tmp_path) == before


def test_the_template_has_hints_and_all_kinds_of_cells() -> None:
    notebook = template.notebook(Chapter(Path(), "beginner", "10_x"))
    text = "\n".join(cell.source for cell in notebook.cells)
    assert text.count(template.HINT) >= 8
    assert text.count("\ncheck(") == 3 and text.count("<details>") == 3
    assert "viz.show(fig, alt=alt)" in text and 'load_model(dtype="float32")' in text
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@pytest.fixture(scope="session")
def made(default_dir: Path, tmp_path_factory: Any) -> Chapter:
    """A chapter as an instructor gets it."""
    return scaffold.new_chapter("beginner", "10", "my_topic", tmp_path_factory.mktemp("course"))


@pytest.mark.slow
def test_a_new_chapter_keeps_every_rule(made: Chapter) -> None:
    assert list(chapter_faults(made)) == []
    for exercise in made.load("checks").EXERCISES:
        reports = [run(exercise, answer) for answer in exercise.wrong]
        assert len(reports) >= 2 and all(report.status == "failed" for report in reports)


@pytest.mark.slow
def test_a_new_chapter_says_the_same_on_every_run(made: Chapter) -> None:
    assert not [run for run in strict_run(made) if run.fault]


@pytest.mark.slow
def test_a_new_chapter_is_in_good_style(made: Chapter) -> None:
    options = ["--config", str(ROOT / "pyproject.toml"), str(made.directory)]
    first_party = ["--config", "lint.isort.known-first-party = ['infer_lab']"]
    for command in (["check", *first_party], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, *options], check=True)
