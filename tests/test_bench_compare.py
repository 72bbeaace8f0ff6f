"""Engines in turn: fair turns, ratios and agreement of known runs, peers that fail."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from infer_lab.bench import Job, Record, Run, peers, worker
from infer_lab.bench.compare import Load, agreement, ratios, take_turns
from infer_lab.bench.peers import Peer, PeerError, model_file


class Fake:
    """Writes down what it is asked."""

    def __init__(self, name: str, log: list[tuple[str, int, Load]]) -> None:
        self.name = name
        self.log = log

    def run(self, jobs: Sequence[Job], load: Load, on_tokens: object = None) -> Run:
        self.log.append((self.name, jobs[0].prompt_token_ids[0], load))
        records = [
            Record(0.0, tuple(range(1, job.output_len + 1)), (7,) * job.output_len, 1)
            for job in jobs
        ]
        return Run(tuple(records))


def make_jobs(seed: str) -> list[Job]:
    number = 0 if seed == "warm-up" else int(seed.removeprefix("round-"))
    return [Job(0.0, (number,), 20)]


def test_all_are_warmed_up_then_take_turns_with_the_same_fresh_prompts() -> None:
    log: list[tuple[str, int, Load]] = []
    load = Load(is_open=True)
    runs = take_turns([Fake("a", log), Fake("b", log)], make_jobs, 3, load)
    turns = [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert [entry[:2] for entry in log] == [("a", 0), ("b", 0), *turns]
    assert [entry[2] for entry in log] == [Load(), Load(), *[load] * 6]
    assert {name: len(each) for name, each in runs.items()} == {"a": 3, "b": 3}
    assert [*runs] == ["a", "b"]


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        take_turns([Fake("a", [])], make_jobs, 0)


def run_of(seconds: float, *answers: tuple[int, ...]) -> Run:
    records = []
    for answer in answers:
        times = tuple(seconds * (i + 1) / len(answer) for i in range(len(answer)))
        records.append(Record(0.0, times, answer, 10))
    return Run(tuple(records))


def test_ratios_are_taken_pair_by_pair() -> None:
    ours = [run_of(seconds, (1, 2), (3, 4)) for seconds in (1.0, 2.0, 4.0)]
    theirs = [run_of(seconds, (1, 2), (3, 4)) for seconds in (2.0, 3.0, 16.0)]
    found = ratios(ours, theirs)
    speed = found["output_tokens_per_s"]
    assert (speed.median, speed.min, speed.max, speed.pairs) == (2.0, 1.5, 4.0, (2.0, 1.5, 4.0))
    assert found["ttft_p50"].pairs == (0.5, 2 / 3, 0.25)
    assert found["itl_p99"].median == found["latency_p50"].median == 0.5


def test_what_one_has_and_the_other_has_not_is_not_compared() -> None:
    found = ratios([run_of(1.0, (1, 2))], [run_of(1.0, (1,))])
    assert "itl_p50" not in found and "ttft_p50" in found


def test_agreement_counts_what_comes_before_the_first_difference() -> None:
    ours = [run_of(1.0, (1, 2, 3), (4, 5, 6)), run_of(1.0, (1, 2, 3), (9, 9, 9))]
    theirs = [run_of(1.0, (1, 2, 3), (4, 0, 6)), run_of(1.0, (1, 2, 3), (0, 9, 9))]
    found = agreement(ours, theirs)
    assert (found.answers, found.equal_answers, found.tokens, found.equal_tokens) == (4, 2, 12, 7)
    first = found.first
    assert first is not None
    assert (first.round, first.job, first.position, first.ours, first.theirs) == (1, 1, 1, 5, 0)
    assert agreement(ours, ours).first is None


# The other process -----------------------------------------------------------------------------


def peer_with(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A peer whose process runs this instead of worker.py."""
    path = tmp_path / "worker.py"
    path.write_text("import json, sys\n" + textwrap.dedent(script), encoding="utf-8")
    monkeypatch.setattr(peers, "WORKER", path)
    return Peer("transformers", tmp_path, dtype="float32")


READY = "input(); print(json.dumps({'versions': {}}), flush=True)\n"
JOBS = [Job(0.0, (1, 2), 2), Job(0.5, (3,), 1)]


def test_a_peer_is_told_the_jobs_and_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
        input(); print(json.dumps({"versions": {"it": "1.0"}}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            users = -1 if asked["users"] is None else asked["users"]
            records = [[a, [1.0] * n, [users] * n, len(p)] for a, p, n in asked["jobs"]]
            print(json.dumps({"records": records}), flush=True)
    """
    told: list[int] = []
    with peer_with(script, tmp_path, monkeypatch) as peer:
        assert peer.versions == {"it": "1.0"}
        run = peer.run(JOBS, Load(is_open=True), told.append)
        assert run.records[0] == Record(0.0, (1.0, 1.0), (-1, -1), 2, 2)
        assert run.records[1] == Record(0.5, (1.0,), (-1,), 1, 1)
        assert told == [3]
        assert peer.run(JOBS, Load()).records[1].token_ids == (2,)
        assert peer.run(JOBS, Load(concurrency=5)).records[1].token_ids == (5,)
    assert peer._process.returncode == 0


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ("sys.exit('no such luck')", "ended unexpectedly. no such luck"),
        ("input(); print(json.dumps({'error': 'ValueError: x'}))", "transformers failed: Value"),
        (
            "input(); print(json.dumps({'error': 'ModuleNotFoundError: it'}))",
            "(?s)ModuleNotFoundError: it.*To get it: pip install transformers",
        ),
    ],
)
def test_a_peer_that_does_not_start_says_why(
    script: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PeerError, match=named):
        peer_with(script, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("{'records': [[0, [1, 2], [3, 4], 0], [0, [], [], 0]]}", "gave 0 tokens at 0 .* 1 were"),
        ("{'records': [[0, [1], [3, 4], 0], [0, [1], [3], 0]]}", "gave 2 tokens at 1 times"),
        ("{'error': 'OutOfMemoryError: too much'}", "transformers failed: OutOfMemoryError"),
    ],
)
def test_a_peer_that_gives_something_else_is_an_error(
    answer: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = READY + f"input(); print(json.dumps({answer}), flush=True)"
    with (
        peer_with(script, tmp_path, monkeypatch) as peer,
        pytest.raises(PeerError, match=named),
    ):
        peer.run(JOBS, Load())


def test_a_peer_needs_a_python_and_a_model_that_it_can_read(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="'/no/such/python' cannot be run"):
        Peer("transformers", tmp_path, dtype="float32", python="/no/such/python")
    with pytest.raises(ValueError, match=r"name must be one of transformers, vllm, llama\.cpp"):
        Peer("tgi", tmp_path, dtype="float32")
    with pytest.raises(ValueError, match=r"must be a \.gguf file for llama\.cpp"):
        Peer("llama.cpp", tmp_path, dtype="float32")
    file = tmp_path / "model.gguf"
    file.touch()
    assert model_file(file) == model_file(tmp_path) == file
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ValueError, match=r"must be a \.gguf file"):
        model_file(tmp_path)
    with pytest.raises(ValueError, match="must be a Hugging Face directory for vllm"):
        Peer("vllm", file, dtype="float32")


def test_an_engine_that_is_not_installed_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(PeerError, match=r"(?s)llama_cpp.*To get it: .*llama-cpp-python"):
        Peer("llama.cpp", tmp_path, dtype="float32", python=sys.executable)


# The loops in worker.py ------------------------------------------------------------------------


class FakeTime:
    """Time that passes when somebody sleeps or serves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("users", "batches", "arrivals"),
    [
        (4, [[0, 1, 2], [3, 4]], [0, 0, 0, 0, 10]),  # one is sent when a batch of 3 is done
        (2, [[0, 1], [2, 3], [4]], [0, 0, 10, 10, 20]),
        (None, [[0], [1, 2, 3], [4]], [0, 1, 2, 3, 50]),  # those who came meanwhile
    ],
)
def test_static_batches_take_who_waits_when_one_has_ended(
    users: int | None,
    batches: list[list[int]],
    arrivals: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeTime()
    monkeypatch.setattr(worker, "time", clock)
    served = []

    def serve(jobs: list[worker.Job], answers: list[worker.Answer], source: worker.Source) -> None:
        served.append([job.prompt[0] for job in jobs])
        clock.sleep(10)
        for answer in answers:
            answer.add([1], source.now())

    jobs = [worker.Job(arrival, [i], 1) for i, arrival in enumerate([0, 1, 2, 3, 50])]
    answers = worker.in_batches(jobs, users, 3, serve)
    assert served == batches
    assert [answer.arrival for answer in answers] == arrivals
