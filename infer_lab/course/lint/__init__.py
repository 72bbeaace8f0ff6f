"""What a committed chapter must look like, whatever it teaches: `lint(chapter)` lists the faults.

The rules follow the course's definition of a chapter, a module for each kind of rule:

    structure   the notebook as a whole: first cell, sections, counts, size
    cells       cell by cell: length, tags, devices, outputs, figures
    exercises   checks, wrong answers, solutions
    course      what no chapter can know alone: indexes, glossary (`infer-lab lint`)

Each fault is one line that says what is wrong and how to mend it.
"""

from __future__ import annotations

import nbformat

from infer_lab.course.discovery import Chapter
from infer_lab.course.lesson import code_cells, headings, ignores_output
from infer_lab.course.lint.cells import cell_faults
from infer_lab.course.lint.exercises import exercise_faults
from infer_lab.course.lint.structure import structure_faults

__all__ = ["MAX_BYTES", "code_cells", "headings", "ignores_output", "lint"]

MAX_BYTES = 600_000


def lint(chapter: Chapter) -> list[str]:
    """Every fault of a chapter's committed form, one line each; an empty list means none.

    The chapter's checks.py and solutions.py are imported; no cell and no check is run.
    """
    if missing := [path.name for path in chapter.files if not path.is_file()]:
        return [
            f"{name} is missing; `infer-lab new-chapter` shows what it holds" for name in missing
        ]
    if (size := chapter.notebook.stat().st_size) >= MAX_BYTES:
        return [
            f"the notebook has {size:,} bytes; draw fewer or smaller figures,"
            f" print less (allowed: fewer than {MAX_BYTES:,})"
        ]
    try:
        notebook = nbformat.read(chapter.notebook, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook)
    except (nbformat.ValidationError, nbformat.reader.NotJSONError) as error:
        reason = str(error).splitlines()[0]
        return [f"not a valid notebook: {reason}; open it in JupyterLab and save it"]
    return [
        *structure_faults(notebook, chapter),
        *exercise_faults(notebook, chapter),
        *cell_faults(notebook),
    ]
