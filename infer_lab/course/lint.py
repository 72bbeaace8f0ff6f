"""What a committed chapter must look like, whatever it teaches: `lint(chapter)` lists the faults.

The rules follow the course's definition of a chapter: its sections in their order, cells that fit
on a screen, outputs as they come from one run from top to bottom in a fresh kernel, figures that
a screen reader can tell, and nothing that ties the notebook to one machine.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from infer_lab.course.discovery import Chapter
from infer_lab.viz.style import MIN_ALT_LENGTH

HEADINGS = (
    "Build it by hand",
    "The library's version",
    "Measure it",
    "Back to chapter 1",
    "What breaks",
    "Exercises",
    "In real engines",
)
MAX_BYTES = 600_000
MAX_CELL_LINES = 15
IGNORE_OUTPUT = "nbval-ignore-output"
_TAGS = {IGNORE_OUTPUT, "raises-exception"}

_FORBIDDEN_SOURCE = {
    r"\.cuda\(|device=[\"']cuda": "names CUDA; take the device from the model",
    r"^\s*[!%]+\s*(pip|conda|mamba|uv|apt)|pip(3)? install|ensurepip": "installs something",
    r"NBVAL_": "uses a comment marker of nbval; use the cell's tags",
    r"^\s*%matplotlib|plt\.show\(": "shows a figure without alt text; end the cell with viz.show",
}
_MACHINE_PATH = re.compile(r"(?<![\w.])/(home|Users|root|tmp|var|opt|mnt)/\w|\b[A-Z]:\\\w")
_IMAGE = re.compile(r"<img\b[^>]*>")
_DATA_URI = re.compile(r"data:image/\w+;base64,[A-Za-z0-9+/=]+")
_MARKDOWN_IMAGE_WITHOUT_ALT = re.compile(r"!\[\s*\]\(")


def lint(chapter: Chapter) -> list[str]:
    """Every fault of a chapter's committed form, one line each; an empty list means none."""
    if missing := [path.name for path in chapter.files if not path.is_file()]:
        return [f"{name} is missing" for name in missing]
    if chapter.notebook.stat().st_size >= MAX_BYTES:
        size = chapter.notebook.stat().st_size
        return [f"the notebook has {size:,} bytes; allowed: fewer than {MAX_BYTES:,}"]
    try:
        notebook = nbformat.read(chapter.notebook, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook)
    except (nbformat.ValidationError, nbformat.reader.NotJSONError) as error:
        return [f"not a valid notebook: {error}"]
    return [*_notebook_faults(notebook, chapter), *_cell_faults(notebook)]


def _notebook_faults(notebook: Any, chapter: Chapter) -> Iterator[str]:
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        yield "nbformat must be 4.5 or later, so that cells have ids"
    if "widgets" in notebook.metadata:
        yield "holds widget state"
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "the kernel must be python3"
    yield from _heading_faults(notebook)
    code = code_cells(notebook)
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"execution counts must be 1 to {len(code)}, got {counts}"
    if not any(cell.outputs for cell in code):
        yield "has no outputs"
    if not code or "banner()" not in code[0].source or not ignores_output(code[0]):
        yield f"the first code cell must call course.banner() and have the tag {IGNORE_OUTPUT}"
    exercises = [exercise.name for exercise in chapter.load("checks").EXERCISES]
    checked = re.findall(r"^check\((\w+)\)", "\n".join(c.source for c in code), re.MULTILINE)
    if checked != exercises:
        yield f"must check the exercises {exercises} in this order, got {checked}"
    if not 3 <= len(exercises) <= 5:
        yield f"must have 3 to 5 exercises, got {len(exercises)}"
    if (folded := notebook.cells[-1].source.count("<details>")) != 3:
        yield f"must end with three questions whose answers are folded, got {folded}"


def _heading_faults(notebook: Any) -> Iterator[str]:
    found = headings(notebook)
    if not found or found[0][0] != 1 or [level for level, _ in found].count(1) != 1:
        yield "must begin with its title, the only heading of level 1"
    sections = [re.sub(r"^\d+\W+", "", text) for level, text in found if level == 2]
    wanted = [section for section in sections if section in HEADINGS]
    if wanted != list(HEADINGS):
        yield f"the sections must be {list(HEADINGS)} in this order, got {sections}"
    lead = notebook.cells[0].source
    for word in ("The question", "you can", "Builds on", "Time"):
        if word.lower() not in lead.lower():
            yield f"the first cell must say {word!r}: question, objectives, what it builds on, time"


def _cell_faults(notebook: Any) -> Iterator[str]:
    for index, cell in enumerate(notebook.cells):
        for fault in _faults_of(cell):
            yield f"cell {index} ({cell.id}): {fault}"


def _faults_of(cell: Any) -> Iterator[str]:
    if extra := set(cell.metadata) - {"tags"}:
        yield f"has metadata {sorted(extra)}"
    if extra := set(cell.metadata.get("tags", ())) - _TAGS:
        yield f"has tags {sorted(extra)}; known are {sorted(_TAGS)}"
    if _MACHINE_PATH.search(cell.source):
        yield "its text holds a path of one machine"
    if cell.cell_type != "code":
        if _MARKDOWN_IMAGE_WITHOUT_ALT.search(cell.source):
            yield "an image lacks alt text"
        return
    for pattern, fault in _FORBIDDEN_SOURCE.items():
        if re.search(pattern, cell.source, re.MULTILINE):
            yield fault
    lines = [line for line in cell.source.splitlines() if line.strip()]
    if len(lines) > MAX_CELL_LINES:
        yield f"has {len(lines)} lines; allowed: {MAX_CELL_LINES}"
    for output in cell.outputs:
        yield from _output_faults(output)


def _output_faults(output: Any) -> Iterator[str]:
    if output.output_type == "error":
        yield f"ended with {output.ename}"
    if output.get("name") == "stderr":
        yield f"wrote to stderr: {output.text.strip()[:80]!r}"
    data = output.get("data", {})
    for kind in data:
        if "widget" in kind:
            yield "shows a widget"
        if kind.startswith("image/"):
            yield "shows an image without alt text; use viz.show"
    text = _DATA_URI.sub("", str(output.get("text", "")) + "".join(map(str, data.values())))
    if _MACHINE_PATH.search(text) or str(Path.home()) in text:
        yield "its output holds a path of one machine"
    for image in _IMAGE.findall(_DATA_URI.sub("", str(data.get("text/html", "")))):
        alt = re.search(r'\balt="([^"]*)"', image)
        if not alt or len(html.unescape(alt[1])) < MIN_ALT_LENGTH:
            yield f"an image needs alt text of at least {MIN_ALT_LENGTH} characters"


def code_cells(notebook: Any) -> list[Any]:
    """The code cells of a notebook, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def ignores_output(cell: Any) -> bool:
    """Whether nbval leaves the cell's outputs alone."""
    return IGNORE_OUTPUT in cell.metadata.get("tags", ())


def headings(notebook: Any) -> list[tuple[int, str]]:
    """(level, text) of every heading in the markdown cells, fenced code left out."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
            found += [
                (len(h), t.strip()) for h, t in re.findall(r"^(#+) (.*)$", text, re.MULTILINE)
            ]
    return found
