"""What a lesson says about itself, read from its notebook.

    cell 0        "# 2 · Sampling", **The question:**, objectives, **Builds on:**, **Time:**
    "## ..."      its sections, each with the cells up to the next one
    **bold**      the terms that it explains

A term stands in bold where it is explained. It may be written anywhere in prose but the last
section, and it ends in a letter. So these are no terms: labels, whose punctuation is bold too
(**Time:**, **Norm.**), letters for sizes (**T**, **Hkv**), code, and whatever stands in headings,
tables, code blocks and folded answers. Words that are only stressed are *italic*.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import nbformat

from infer_lab import _HOME
from infer_lab.course.discovery import Chapter

IGNORE_OUTPUT = "nbval-ignore-output"
LAST_SECTION = "In real engines"
LIBRARY_SECTION = "The library's version"

_NO_PROSE = re.compile(
    r"^```.*?^```|<details>.*?</details>|^#+ .*?$|^\s*\|.*?$", re.MULTILINE | re.DOTALL
)
_LAST_HEADING = re.compile(rf"^## (?:\d+\W+)?{LAST_SECTION}$", re.MULTILINE)
_BOLD = re.compile(r"\*\*(?!\s)([^*`]+?)\*\*")
_SIZE = re.compile(r"[A-Z](q|kv)?")


def read(chapter: Chapter) -> Any:
    """The chapter's notebook, as it is committed."""
    return nbformat.read(chapter.notebook, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    """The code cells of a notebook, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_executed(notebook: Any) -> bool:
    """Whether any cell has an output."""
    return any(cell.outputs for cell in code_cells(notebook))


def ignores_output(cell: Any) -> bool:
    """Whether nbval leaves the cell's outputs alone."""
    return IGNORE_OUTPUT in cell.metadata.get("tags", ())


def headings(notebook: Any) -> list[tuple[int, str]]:
    """(level, text) of every heading in the markdown cells, fenced code left out."""
    return [
        heading
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for heading in _headings_of(cell)
    ]


def _headings_of(cell: Any) -> list[tuple[int, str]]:
    text = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
    return [(len(h), t.strip()) for h, t in re.findall(r"^(#+) (.*)$", text, re.MULTILINE)]


def without_number(heading: str) -> str:
    """ "2. The library's version" -> "The library's version"."""
    return re.sub(r"^\d+\W+", "", heading)


def sections(notebook: Any) -> dict[str, list[Any]]:
    """The cells below each heading of level 2, by its text without number."""
    found: dict[str, list[Any]] = {}
    current: list[Any] = []
    for cell in notebook.cells:
        for level, text in _headings_of(cell) if cell.cell_type == "markdown" else ():
            if level == 2:
                current = found.setdefault(without_number(text), [])
        current.append(cell)
    return found


def title(notebook: Any) -> tuple[int | None, str]:
    """(2, "Sampling") of a lesson that begins with "# 2 · Sampling"; the number may be missing."""
    first = headings(notebook)[:1]
    text = first[0][1] if first else ""
    numbered = re.fullmatch(r"(\d+) · (.+)", text)
    return (int(numbered[1]), numbered[2]) if numbered else (None, text)


def lead(notebook: Any, label: str) -> str:
    """What the first cell says behind **label:**, up to the end of the paragraph; "" if nothing."""
    source = notebook.cells[0].source if notebook.cells else ""
    found = re.search(rf"\*\*{label}:\*\*(.*?)(?=\n\s*\n|\Z)", source, re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def objectives(notebook: Any) -> list[str]:
    """The first line of each list item of the first cell."""
    source = notebook.cells[0].source if notebook.cells else ""
    return re.findall(r"^[-*] (.+)$", source, re.MULTILINE)


def builds(notebook: Any) -> list[str]:
    """The modules of infer_lab that the section on the library imports first."""
    for cell in sections(notebook).get(LIBRARY_SECTION, ()):
        if cell.cell_type == "code" and (found := _library_imports(cell.source)):
            return found
    return []


def _library_imports(source: str) -> list[str]:
    modules = []
    for node in tree.body if (tree := parse(source)) else ():
        if isinstance(node, ast.ImportFrom) and node.module == "infer_lab":
            modules += [_HOME.get(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infer_lab."):
            modules.append(str(node.module).removeprefix("infer_lab."))
    return list(dict.fromkeys(modules))


def parse(source: str) -> ast.Module | None:
    """The syntax tree of a cell, None where it is more than Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def terms(notebook: Any) -> dict[str, int]:
    """The terms that the lesson explains, each with the index of the first cell that does."""
    found: dict[str, int] = {}
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        prose, *engines = _LAST_HEADING.split(cell.source, maxsplit=1)
        for bold in _BOLD.findall(_NO_PROSE.sub("", prose)):
            term = " ".join(bold.split())
            if term[-1].isalnum() and not _SIZE.fullmatch(term):
                found.setdefault(term, index)
        if engines:
            break
    return found
