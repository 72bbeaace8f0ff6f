"""What the course needs around its lessons: banner, exercise checks, discovery and the linter.

A notebook needs two names, `course.banner()` and `check = course.checks("beginner/02_sampling")`.
A chapter's `checks.py` needs `Exercise`, `Claims` and `GreedyExample`. The rest serves the tests.
"""

from infer_lab.course.discovery import Chapter, chapters, find_chapter
from infer_lab.course.environment import banner
from infer_lab.course.exercises import Checks, Claims, Exercise, checks
from infer_lab.course.greedy import GreedyExample

__all__ = [
    "Chapter",
    "Checks",
    "Claims",
    "Exercise",
    "GreedyExample",
    "banner",
    "chapters",
    "checks",
    "find_chapter",
]
