"""A whole chapter in a few cells, in good form, for the tests to break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from infer_lab.course.discovery import Chapter

LEAD = """\
# {number} · Toy

**The question:** {question}

After this chapter you can

- run it;
- break it;
- mend it.

**Builds on:** nothing.

**Time:** about 1 minute.
"""
CHECKS = """
from infer_lab.course import Exercise

def check(answer, claim):
    with claim("is right"):
        claim.returns(1, answer)

def zero():
    return 0

def two():
    return 2

EXERCISES = [Exercise(name, check, wrong=[zero, two]) for name in ("one", "uno", "eins")]
"""
SOLUTIONS = "\n".join(
    f"def {n}():\n    return 1  # by definition\n" for n in ("one", "uno", "eins")
)
SECTIONS = (
    "Build it by hand",
    "The library's version",
    "Measure it",
    "Back to chapter 1",
    "What breaks",
    "Exercises",
    "In real engines",
)
LIBRARY = "from infer_lab import decode\n\nassert decode"
FOLDED = "<details><summary>Answer</summary>\n\nYes.\n\n</details>\n\n"


def code(source: str, *outputs: Any, tags: tuple[str, ...] = ()) -> Any:
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, outputs=list(outputs), metadata=metadata)


def prints(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


def stub(name: str) -> Any:
    source = f"def {name}():\n    raise NotImplementedError\n\n\ncheck({name})"
    return code(source, prints(f"{name}: not attempted\n"))


def a_chapter(
    root: Path,
    *cells: Any,
    place: str = "beginner/01_toy",
    question: str = "why?",
    sections: tuple[str, ...] = SECTIONS,
    engines: str = "**vLLM** does it, too.",
    library: str = LIBRARY,
    questions: str = 3 * FOLDED,
    checks: str = CHECKS,
    solutions: str = SOLUTIONS,
) -> Chapter:
    """A toy chapter with `cells` at the end of its first section, committed form and all."""
    chapter = Chapter(root, *place.split("/"))
    chapter.directory.mkdir(parents=True)
    banner = code(
        "from infer_lab import course  # course.banner()",
        prints("x\n"),
        tags=("nbval-ignore-output",),
    )
    check = code(f'check = course.checks("{place}")')
    lead = LEAD.format(number=int(chapter.name[:2]), question=question)
    below = {
        "Build it by hand": [code("1 + 1"), *cells],
        "The library's version": [code(library)],
        "Exercises": [stub(name) for name in ("one", "uno", "eins")],
        "In real engines": [new_markdown_cell(engines)],
    }
    everything = [new_markdown_cell(lead), banner, check]
    for i, section in enumerate(sections, 1):
        everything += [new_markdown_cell(f"## {i}. {section}"), *below.get(section, [code("2")])]
    notebook = new_notebook(
        cells=[*everything, new_markdown_cell(questions)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.execution_count = count
    nbformat.write(notebook, chapter.notebook)
    (chapter.directory / "checks.py").write_text(checks, encoding="utf-8")
    (chapter.directory / "solutions.py").write_text(solutions, encoding="utf-8")
    return chapter
