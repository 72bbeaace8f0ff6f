"""Run a chapter from top to bottom in a fresh kernel and save it in the form that is committed.

    python -m infer_lab.course.execute beginner/02_sampling      # no place: all chapters

Do this after every change and commit what it writes. It also lists what the linter finds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import nbformat
from nbclient import NotebookClient

from infer_lab.course.discovery import Chapter, chapters, find_chapter
from infer_lab.course.lint import lint

SECONDS_A_CELL = 300  # far more than the course allows: a busy machine is no error


def execute(chapter: Chapter) -> Any:
    """The chapter's notebook with fresh outputs; the file stays as it is. A failing cell raises."""
    notebook = nbformat.read(chapter.notebook, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(chapter.directory)}},
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # the kernel's own remarks are no news
    )
    return client.execute()


def tidy(notebook: Any) -> None:
    """Drop what changes from machine to machine without meaning anything; in place."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": list(tags)} if tags else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("place", nargs="*", help="such as beginner/02_sampling (default: all)")
    places = parser.parse_args().place
    for chapter in [find_chapter(place) for place in places] or chapters():
        began = time.perf_counter()
        notebook = execute(chapter)
        tidy(notebook)
        nbformat.write(notebook, chapter.notebook)
        print(f"{chapter}: {time.perf_counter() - began:.0f} s")
        for fault in lint(chapter):
            print(f"  {fault}")


if __name__ == "__main__":
    main()
