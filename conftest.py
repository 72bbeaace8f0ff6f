"""`pytest --nbval` by hand, too, compares figures by alt text, not pixels; see viz/style.py."""

from pathlib import Path

import pytest

SANITIZE = Path(__file__).parent / "infer_lab" / "course" / "nbval-sanitize.cfg"


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "nbval", False) and not config.option.nbval_sanitize_with:
        config.option.nbval_sanitize_with = str(SANITIZE)
