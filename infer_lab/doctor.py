"""`infer-lab doctor`: what is here, what it runs on, and what is wrong with what to do about it.

Each section is a function that adds lines to the report, and problems where it finds any. Nothing
is fetched and nothing is changed.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from infer_lab import __version__

# Shown one by one; the other dependencies only when something is wrong with them.
SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "jupyterlab")
VARIABLES = (
    "INFER_LAB_HOME",
    "INFER_LAB_MODEL",
    "INFER_LAB_WHEEL",
    "HF_HUB_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
REINSTALL = "Run `make setup`, or `pip install -c constraints.txt -e '.[dev]'` in the repository."
HUB_ID = r"[\w.-]+/[\w.-]+"
MEMORY_NEEDED = 2 * 10**9  # bytes, for a chapter's notebook


@dataclass
class Report:
    """What was found: lines of (name, value), and problems, each with what to do."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = [f"{name:<16}{value}" for name, value in self.lines]
        text += [f"\nWRONG  {problem}" for problem in self.problems]
        return "\n".join([*text, *([] if self.problems else ["\nNothing is wrong."])])

    def add(self, name: str, value: object) -> None:
        self.lines.append((name, str(value)))

    def wrong(self, what: str, todo: str) -> None:
        self.problems.append(f"{what}\n       {todo}")


def examine(*, verify: bool = False) -> Report:
    """Look at versions, device, model, cache and memory; verify: hash the model's files too."""
    report = Report()
    _versions(report)
    if _imports(report):
        _device(report)
        _model(report, verify)
        _cache(report)
    _memory(report)
    for name in VARIABLES:
        if name in os.environ:
            report.add(name, os.environ[name])
    return report


def _versions(report: Report) -> None:
    tested = tested_versions()
    report.add("infer_lab", f"{__version__} in {Path(__file__).parent}")
    report.add("python", f"{platform.python_version()}, {sys.executable}")
    for requirement in requirements():
        name = requirement.name
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            report.wrong(f"{name} is not installed.", REINSTALL)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            report.wrong(f"{name} is {found}, but must be {requirement.specifier}.", REINSTALL)
        if name in SHOWN:
            pin = tested.get(name.lower(), found)
            note = "" if found.split("+")[0] == pin else f" (tested with {pin})"
            report.add(name, found + note)


def requirements() -> Iterator[Requirement]:
    """What the installed infer_lab depends on, on this platform and without extras."""
    try:
        lines = metadata.requires("infer_lab") or []
    except metadata.PackageNotFoundError:  # run from the source directory
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def tested_versions() -> dict[str, str]:
    """Name -> version from constraints.txt; nothing when there is no repository around."""
    file = Path(__file__).parent.parent / "constraints.txt"
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower(): version for name, version in pins}


def _imports(report: Report) -> bool:
    """Whether what the rest of the report needs can be imported; an install may be broken."""
    for name in ("torch", "infer_lab.model.fetch", "infer_lab.model.load"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a shared library doesn't load
            report.wrong(f"{name} cannot be imported: {error}", REINSTALL)
            return False
    return True


def _device(report: Report) -> None:
    import torch

    from infer_lab.model.load import has_fast_bfloat16, pick_device, pick_dtype

    cpu = torch.device("cpu")
    native = "bfloat16 in hardware" if has_fast_bfloat16(cpu) else "no bfloat16 in hardware"
    cores = psutil.cpu_count(logical=False) or os.cpu_count()
    threads = f"{cores} cores, torch uses {torch.get_num_threads()} threads"
    report.add("cpu", f"{cpu_model()}: {threads}, {native}")
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        size = f"{card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
        report.add(f"cuda:{i}", f"{card.name}, {size}")
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        report.add("cuda", "this build of torch is for CPUs; see CUDA in README.md for another")
    elif torch.version.cuda is not None and not torch.cuda.is_available():
        report.add("cuda", f"torch is built for CUDA {torch.version.cuda}, but finds no device")
    device = pick_device("auto")
    report.add("device", f"auto is {device}")
    report.add("dtype", f"auto is {str(pick_dtype('auto', device)).removeprefix('torch.')}")


def cpu_model() -> str:
    """The processor's name as its maker gives it, where the system tells."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    if named:
        return named[1]
    return platform.processor() or platform.machine()


def _model(report: Report, verify: bool) -> None:
    from infer_lab.model import fetch

    other = os.environ.get("INFER_LAB_MODEL")
    if other:
        report.add("model", f"{other} (INFER_LAB_MODEL)")
        if not re.fullmatch(HUB_ID, other) or Path(other).exists():
            try:
                fetch.resolve(other)
            except ValueError as error:
                report.wrong(f"INFER_LAB_MODEL: {error}.", "Correct it, or unset it.")
    label = "default model" if other else "model"
    directory = fetch.home() / "models" / fetch.SMOLLM2.name
    if not directory.is_dir():
        report.add(label, f"{fetch.SMOLLM2.name}, not fetched yet")
        if not other:
            report.wrong("The default model is not here.", "Run `infer-lab fetch`.")
        return
    problems = fetch.verify(directory) if verify else fetch._problems(directory, fetch.SMOLLM2)
    size = sum(path.stat().st_size for path in directory.iterdir())
    state = "damaged" if problems else "hashes right" if verify else "whole by file sizes"
    report.add(label, f"{directory}, {size / 1e6:,.0f} MB, {state}")
    if problems:
        todo = f"Remove {directory}, then run `infer-lab fetch`."
        report.wrong(f"The default model is damaged: {'; '.join(problems)}.", todo)


def _cache(report: Report) -> None:
    from infer_lab.model.fetch import SMOLLM2, home

    directory = home()
    there = next(p for p in (directory, *directory.parents) if p.exists())
    free = shutil.disk_usage(there).free
    report.add("cache", f"{directory}, {free / 1e9:.1f} GB free")
    todo = "Name another directory with INFER_LAB_HOME."
    if not there.is_dir():
        report.wrong(f"{there} is not a directory.", todo)
    elif not os.access(there, os.W_OK):
        report.wrong(f"{there} cannot be written to.", todo)
    elif free < SMOLLM2.disk_bytes and not (directory / "models" / SMOLLM2.name).is_dir():
        needed = f"{SMOLLM2.disk_bytes / 1e9:.1f} GB"
        report.wrong(f"The model needs {needed} of disk.", f"Free some space. {todo}")


def _memory(report: Report) -> None:
    memory = psutil.virtual_memory()
    amounts = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"
    report.add("memory", amounts)
    if memory.available < MEMORY_NEEDED:
        report.wrong(f"There is little memory: {amounts}.", "Close other programs or notebooks.")
