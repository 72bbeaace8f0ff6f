"""What a result depends on besides the code: hardware, versions, and what else was going on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from infer_lab import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
# Instructions that decide how fast a CPU multiplies matrices.
FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)


def hardware() -> dict[str, Any]:
    """CPU, cores, memory in bytes, the GPU if there is one, and how busy the machine is."""
    info = _cpu_info()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [flag for flag in FLAGS if flag in flags],
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": _usable_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": _gpu(),
        "system": platform.platform(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],  # 1, 5, 15 minutes
    }


def versions() -> dict[str, str]:
    """Python, infer_lab with its commit, and the packages that compute."""
    found = {"infer_lab": __version__, "python": platform.python_version()}
    if commit := _commit():
        found["infer_lab_commit"] = commit
    for package in PACKAGES:
        found[package] = metadata.version(package)
    return found


def _cpu_info() -> dict[str, str]:
    """The first CPU's entries in /proc/cpuinfo; nothing where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _usable_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _commit() -> str | None:
    """The commit that is checked out, with "+changes" if files differ from it; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
