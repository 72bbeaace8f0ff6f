"""Does a chapter still say what its committed outputs say? `strict_run(chapter)` finds out.

nbval runs the notebook and compares every output with the committed one, except in cells tagged
`nbval-ignore-output`. We hand it a copy in which each code cell stands twice:

    cell 1 | cell 1 again | cell 2 | cell 2 again | ...

Both times the outputs must be the committed ones. So one run shows that the chapter is true and
that any of its cells can be run twice in a row without harm. Text on stderr counts as an output.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import nbformat

from infer_lab.course.discovery import Chapter
from infer_lab.course.execute import SECONDS_A_CELL

SANITIZE = Path(__file__).with_name("nbval-sanitize.cfg")


@dataclass(frozen=True)
class CellRun:
    """One run of one code cell: its id, whether it is the repeat, seconds, and what was wrong."""

    cell_id: str
    again: bool
    seconds: float
    fault: str


def strict_run(chapter: Chapter) -> list[CellRun]:
    """Run every code cell of a chapter twice; `fault` is "" where the outputs are as committed."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Chapter(Path(temporary), chapter.track, chapter.name)
        shutil.copytree(chapter.directory, copy.directory)
        notebook = nbformat.read(chapter.notebook, as_version=4)
        ids = [cell.id for cell in notebook.cells if cell.cell_type == "code"]
        _double(notebook)
        nbformat.write(notebook, copy.notebook)
        report = Path(temporary) / "report.xml"
        done = _nbval(copy, report)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    if len(cases) != 2 * len(ids):
        raise RuntimeError(f"nbval did not run {chapter}:\n{done.stdout[-4000:]}")
    return [
        CellRun(ids[i // 2], i % 2 == 1, float(case.get("time", 0)), _fault(case))
        for i, case in enumerate(cases)
    ]


def _double(notebook: nbformat.NotebookNode) -> None:
    doubled = []
    for cell in notebook.cells:
        doubled.append(cell)
        if cell.cell_type == "code":
            again = deepcopy(cell)
            again.id = f"again-{len(doubled)}"
            doubled.append(again)
    notebook.cells = doubled


def _nbval(chapter: Chapter, report: Path) -> subprocess.CompletedProcess[str]:
    # Nothing of the caller's pytest settings: an empty configuration beside the copy.
    configuration = chapter.root / "pytest.ini"
    configuration.write_text("[pytest]\n")
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    options = ["--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}"]
    options += [f"--nbval-cell-timeout={SECONDS_A_CELL}", f"--junitxml={report}", "--color=no"]
    # Threads that wait give their core away: spinning makes everybody slow on a busy machine.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", configuration, *options, chapter.notebook],
        cwd=chapter.root,
        env=environment | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _fault(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            return (found.text or found.get("message") or kind).strip()
    return ""
