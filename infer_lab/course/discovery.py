"""Where the chapters are: a chapter is found by its place and by nothing else.

    beginner/02_sampling/02_sampling.ipynb        track/NN_name/NN_name.ipynb
    beginner/02_sampling/checks.py                what its exercises are checked with
    beginner/02_sampling/solutions.py             an answer to each exercise

No list has to be kept: tests, linter and index ask `chapters()`.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

TRACKS = ("beginner", "intermediate", "advanced")
_NAME = re.compile(r"\d\d_[a-z0-9_]+")


@dataclass(frozen=True)
class Chapter:
    """One directory of the course; `str(chapter)` is its place, "beginner/02_sampling"."""

    root: Path
    track: str
    name: str

    def __str__(self) -> str:
        return f"{self.track}/{self.name}"

    @property
    def directory(self) -> Path:
        return self.root / self.track / self.name

    @property
    def notebook(self) -> Path:
        return self.directory / f"{self.name}.ipynb"

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """All that a chapter consists of: notebook, checks, solutions."""
        return self.notebook, self.directory / "checks.py", self.directory / "solutions.py"

    def load(self, stem: str) -> ModuleType:
        """Import `checks` or `solutions` from the file itself, anew on every call."""
        path = self.directory / f"{stem}.py"
        spec = importlib.util.spec_from_file_location(f"{self.track}_{self.name}_{stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ValueError(f"{self} must have a {path.name}; there is none in {path.parent}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def chapters(root: Path | None = None) -> list[Chapter]:
    """All chapters below the course's root, in the order they are taught."""
    root = course_root() if root is None else root
    return [
        Chapter(root, track, directory.name)
        for track in TRACKS
        if (root / track).is_dir()
        for directory in sorted((root / track).iterdir())
        if directory.is_dir() and _NAME.fullmatch(directory.name)
    ]


def find_chapter(place: str, root: Path | None = None) -> Chapter:
    """The chapter at a place such as "beginner/02_sampling". ValueError names those there are."""
    places = {str(chapter): chapter for chapter in chapters(root)}
    if place not in places:
        raise ValueError(f"place must be one of {', '.join(places) or 'none found'}, got {place!r}")
    return places[place]


def course_root() -> Path:
    """The directory that holds the tracks.

    It is looked for from the working directory upwards (Jupyter starts a kernel beside its
    notebook), then beside the package (an editable install). ValueError if there is none.
    """
    here = Path.cwd()
    for directory in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if any(any((directory / track).glob("[0-9][0-9]_*")) for track in TRACKS):
            return directory
    raise ValueError(f"the course's root must hold {'/, '.join(TRACKS)}/; none found above {here}")
