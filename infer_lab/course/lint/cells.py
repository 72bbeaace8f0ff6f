"""Rules about single cells: what may stand in them, and what may have come out."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infer_lab.course import lesson
from infer_lab.course.lesson import IGNORE_OUTPUT
from infer_lab.viz.style import MIN_ALT_LENGTH

MAX_LINES = 15
MAX_DECIMALS = 6
_TAGS = {IGNORE_OUTPUT, "raises-exception"}

_FORBIDDEN_SOURCE = {
    r"\.cuda\(|(device=|\.to\(|torch\.device\()\s*[\"'](cuda|mps)": (
        "names CUDA or another device; take model.device, or load_model's own choice"
    ),
    r"^\s*[!%]+\s*(pip|conda|mamba|uv|apt)|pip(3)? install|ensurepip": (
        "installs something; name the package in pyproject.toml instead"
    ),
    r"^\s*[!%]+\s*(wget|curl|git)\b|hf_hub_download|snapshot_download|load_dataset\(": (
        "needs a network; use what set-up has brought"
    ),
    r"(?<![\w.])input\(": "waits for somebody to type; give it the text",
    r"NBVAL_": "uses a comment marker of nbval; use the cell's tags",
    r"^\s*%matplotlib|plt\.show\(": "shows a figure without alt text; end the cell with viz.show",
}
_MACHINE_PATH = re.compile(r"(?<![\w.])/(home|Users|root|tmp|var|opt|mnt)/\w|\b[A-Z]:\\\w")
_IMAGE = re.compile(r"<img\b[^>]*>")
_DATA_URI = re.compile(r"data:image/\w+;base64,[A-Za-z0-9+/=]+")
_ALT_MISSING = re.compile(r"!\[\s*\]\(")
_REMOTE_IMAGE = re.compile(r"!\[[^\]]*\]\(https?:|<img[^>]+src=[\"']https?:")
_FINE_FLOAT = re.compile(rf"\d\.\d{{{MAX_DECIMALS + 1},}}")
_SHOWS = {"print", "check", "viz.show"}


def cell_faults(notebook: Any) -> Iterator[str]:
    """What is wrong with single cells; each fault begins with the cell's index and id."""
    executed = lesson.is_executed(notebook)
    for index, cell in enumerate(notebook.cells):
        for fault in _faults_of(cell, executed):
            yield f"cell {index} ({cell.get('id', 'no id')}): {fault}"


def _faults_of(cell: Any, executed: bool) -> Iterator[str]:
    if extra := set(cell.metadata) - {"tags"}:
        yield f"has metadata {sorted(extra)}; delete all but tags, as course.execute does"
    if extra := set(cell.metadata.get("tags", ())) - _TAGS:
        yield f"has tags {sorted(extra)}; known are {sorted(_TAGS)}"
    if _MACHINE_PATH.search(cell.source):
        yield "its text holds a path of one machine; make it relative"
    if not cell.source.strip():
        yield "is empty; delete it"
    if cell.cell_type == "code":
        yield from _code_faults(cell, executed)
    elif cell.cell_type == "raw":
        yield "is a raw cell, which nobody sees; make it markdown"
    else:
        if _ALT_MISSING.search(cell.source):
            yield "an image lacks alt text; write it between the square brackets"
        if _REMOTE_IMAGE.search(cell.source):
            yield "shows an image from the network; draw it with viz"
        yield from _image_faults(cell.source)


def _code_faults(cell: Any, executed: bool) -> Iterator[str]:
    for pattern, fault in _FORBIDDEN_SOURCE.items():
        if re.search(pattern, cell.source, re.MULTILINE):
            yield fault
    lines = [line for line in cell.source.splitlines() if line.strip()]
    if len(lines) > MAX_LINES:
        yield f"has {len(lines)} lines; allowed: {MAX_LINES}. Split it where a new idea begins"
    if executed and not cell.outputs and (call := _shown(cell.source)):
        yield f"calls {call} and has no output; execute the notebook and commit what it writes"
    for output in cell.outputs:
        yield from _output_faults(output)
        text = _text_of(output)
        if not lesson.ignores_output(cell) and (number := _FINE_FLOAT.search(text)):
            yield (
                f"prints {number[0]}..., finer than it is stable on other machines; round to"
                f" {MAX_DECIMALS} decimals at most, or tag the cell {IGNORE_OUTPUT}"
            )


def _shown(source: str) -> str:
    """The call by which a cell shows something, whatever comes before it."""
    for node in tree.body if (tree := lesson.parse(source)) else ():
        match node:
            case ast.Expr(ast.Call(function)) if ast.unparse(function) in _SHOWS:
                return ast.unparse(function)
    return ""


def _output_faults(output: Any) -> Iterator[str]:
    if output.output_type == "error":
        yield f"ended with {output.ename}; catch the error that the lesson is about, mend others"
    if output.get("name") == "stderr":
        yield f"wrote to stderr: {output.text.strip()[:80]!r}; mend the cause, or print it"
    data = output.get("data", {})
    for kind in data:
        if "widget" in kind:
            yield "shows a widget; print text, or draw with viz"
        if kind.startswith("image/"):
            yield "shows an image without alt text; use viz.show"
    text = _text_of(output)
    if _MACHINE_PATH.search(text) or str(Path.home()) in text:
        yield "its output holds a path of one machine; print the file's name only"
    yield from _image_faults(_DATA_URI.sub("", str(data.get("text/html", ""))))


def _text_of(output: Any) -> str:
    """All that an output shows, pictures left out."""
    data = output.get("data", {})
    return _DATA_URI.sub("", str(output.get("text", "")) + "".join(map(str, data.values())))


def _image_faults(source: str) -> Iterator[str]:
    for image in _IMAGE.findall(source):
        alt = re.search(r'\balt="([^"]*)"', image)
        if not alt or len(html.unescape(alt[1])) < MIN_ALT_LENGTH:
            yield (
                f"an image needs alt text of at least {MIN_ALT_LENGTH} characters; say in a"
                " sentence what it shows"
            )
