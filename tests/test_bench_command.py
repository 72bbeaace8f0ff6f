"""`infer-lab bench` on a tiny model: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from naive import byte_tokenizer
from PIL import Image
from test_bench_workloads import AZURE, MOONCAKE, write
from test_model_families import SIZES, save_random
from transformers import LlamaConfig

from infer_lab.bench import figures, growth
from infer_lab.bench.report import to_json
from infer_lab.cli import main
from infer_lab.viz.style import unlabelled

Run = Callable[..., str]
SMALL = ("--num-prompts", "3", "--output-len", "4", "--repeats", "2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and a tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_tokenizer()
    save_random(LlamaConfig(**SIZES | {"vocab_size": tokenizer.vocab_size}), directory)
    (directory / "tokenizer.json").write_text(tokenizer._tokenizer.to_str(), encoding="utf-8")
    return directory


@pytest.fixture
def bench(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, status: int = 0) -> str:
        model = ("--model", str(tiny), "--dtype", "float32", "--device", "cpu")
        assert main(["bench", *arguments, *model]) == status
        captured = capsys.readouterr()
        return captured.out if status == 0 else captured.err

    return run


def test_alone_it_prints_a_table(bench: Run) -> None:
    lines = bench(*SMALL, "--input-len", "8").splitlines()
    assert lines[0].split() == ["infer_lab"]
    assert lines[1].startswith("output tokens/s") and float(lines[1].split()[-1]) > 0
    assert "ratio" not in lines[0]


def test_beside_transformers_it_gives_ratios_and_checks_the_tokens(
    bench: Run, tmp_path: Path
) -> None:
    file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    output = bench(*SMALL, "--vs", "transformers", "--json", str(file), "--plot", str(plot))
    assert output.splitlines()[0].split() == ["infer_lab", "transformers", "ratio", "min", "max"]
    assert "6 of 6 greedy answers are equal" in output
    assert f"wrote {plot}: Throughput by round" in output
    assert Image.open(plot).format == "PNG"

    found = json.loads(file.read_text(encoding="utf-8"))
    assert {"created", "hardware", "versions", "settings", "engines", "ratio", "agreement"} <= {
        *found
    }
    assert found["versions"]["transformers"]["torch"] == found["versions"]["infer_lab"]["torch"]
    assert found["settings"]["dtype"] == "float32" and found["settings"]["num_prompts"] == 3
    assert found["hardware"]["memory_bytes"] > 0
    speed = found["ratio"]["output_tokens_per_s"]
    assert speed["min"] <= speed["median"] <= speed["max"] and len(speed["pairs"]) == 2
    assert found["agreement"]["equal_tokens"] == found["agreement"]["tokens"] == 24
    for engine in ("infer_lab", "transformers"):
        runs = found["engines"][engine]["runs"]
        assert len(runs) == 2
        for run in runs:
            assert run["summary"]["output_tokens"] == 12
            assert [len(record["token_times"]) for record in run["records"]] == [4, 4, 4]
            assert {record["prompt_len"] for record in run["records"]} == {64}
    first, second = (found["engines"]["infer_lab"]["runs"][i]["summary"] for i in (0, 1))
    theirs = found["engines"]["transformers"]["runs"]
    pairs = [
        mine["output_tokens_per_s"] / yours["summary"]["output_tokens_per_s"]
        for mine, yours in zip((first, second), theirs, strict=True)
    ]
    assert speed["pairs"] == pytest.approx(pairs)


def test_several_rates_make_a_curve(bench: Run, tmp_path: Path) -> None:
    file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ("--vs", "static", "--rate", "40", "200", "--ttft-objective", "1000")
    output = bench(*SMALL, *options, "--json", str(file), "--plot", str(plot))
    assert "40 requests/s arrive" in output and "200 requests/s arrive" in output
    assert "requests/s fast enough" in output
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [load["rate"] for load in found["loads"]] == [40.0, 200.0]
    for load in found["loads"]:
        assert {*load["engines"]} == {"infer_lab", "static"} and load["ratio"]
        assert "goodput" in load["engines"]["static"]["runs"][0]["summary"]
    assert Image.open(plot).format == "PNG"


def test_hits_in_the_prefix_cache_have_a_row(bench: Run) -> None:
    shape = ("--workload", "shared-prefix", "--prefix-len", "64", "--suffix-len", "4")
    output = bench(*SMALL, *shape, "--vs", "uncached", "--concurrency", "1")
    assert "if its prefix is cached, p50" in output and "if nothing is cached, p50" in output
    assert "greedy answers are equal" in output


def test_a_breakdown_follows_the_table(bench: Run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    output = bench(*SMALL, "--breakdown", "--json", str(file))
    assert "ms a step" in output and "pack, hand out" in output
    assert json.loads(file.read_text(encoding="utf-8"))["breakdown"]["steps"] == 4


def test_ragged_work_and_traces_run(bench: Run, tmp_path: Path) -> None:
    ragged = ("--workload", "ragged", "--output-lens", "2", "9", "--rate", "500")
    assert "output tokens/s" in bench(*ragged, "--num-prompts", "5", "--repeats", "1")
    for name, content in (("a.csv", AZURE), ("m.jsonl", MOONCAKE)):
        file = write(tmp_path / name, content)
        trace = ("--workload", "trace", "--trace", str(file), "--time-scale", "0.01")
        result = tmp_path / "bench.json"
        assert "output tokens/s" in bench(*trace, "--repeats", "1", "--json", str(result))
        settings = json.loads(result.read_text(encoding="utf-8"))["settings"]
        assert 0 < settings["length_scale"] < 1  # they are longer than the context


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--repeats", "0"), "--repeats must be >= 1, got 0"),
        (("--concurrency", "-1"), "--concurrency must be >= 1, got -1"),
        (("--num-prompts", "0"), "num_prompts must be >= 1, got 0"),
        (("--max-num-seqs", "0"), "--max-num-seqs must be >= 1, got 0"),
        (("--threads", "0"), "--threads must be >= 1, got 0"),
        (("--rate", "0"), "rate must be > 0"),
        (("--rate", "1", "--concurrency", "2"), "--concurrency is for a closed loop"),
        (("--prefix-len", "9"), "--prefix-len is for --workload shared-prefix, not random"),
        (("--workload", "ragged", "--output-len", "9"), "--output-len is for --workload random"),
        (("--workload", "ragged", "--output-lens", "9", "3"), r"(shortest, longest)"),
        (("--workload", "trace"), "--trace FILE"),
        (("--workload", "trace", "--trace", "/no/such/file"), "/no/such/file"),
        (("--trace", "x"), "--trace is for --workload trace, not random"),
        (("--workload", "trace", "--trace", "x", "--rate", "1"), "--rate is for"),
        (("--peer-python", "x"), "--peer-python needs --vs"),
        (("--vs", "static", "--peer-python", "x"), "--peer-python needs --vs"),
        (("--itl-objective", "-5"), "--itl-objective must be > 0 ms, got -5"),
        (("--json", "/no/such/directory/x.json"), "/no/such/directory"),
        (("--input-len", "250"), "at most 256 tokens together (max_model_len), got 250 + 64"),
        (("--vs", "llama.cpp"), "must be a .gguf file for llama.cpp"),
    ],
)
def test_bad_options_end_in_one_line_that_names_them(
    options: tuple[str, ...], named: str, bench: Run
) -> None:
    error = bench(*options, status=2)
    assert named in error and error.startswith("infer-lab: error: ") and error.count("\n") == 1


def test_bad_options_are_found_before_torch_is_loaded(bench: Run, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "infer_lab.engine", None)
    assert "num_prompts must be" in bench("--num-prompts", "0", status=2)


def test_json_keeps_a_line_for_what_is_short_or_only_numbers() -> None:
    value = {"a": {"b": 1}, "long": [*range(200)], "list": [{"x": "y" * 60}, {"x": "z" * 60}]}
    text = to_json(value)
    assert json.loads(text) == value
    lines = text.splitlines()
    assert ' "a": {"b": 1},' in lines and len(lines) == 8


# Growth ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def growths() -> list[growth.Growth]:
    return growth.measure(waiting=(1, 50), running=(1, 8), blocks=(8, 80), repeats=5)


def test_every_operation_is_measured_at_every_size(growths: list[growth.Growth]) -> None:
    names = ["schedule", "pack", "commit", "match", "evict"]
    assert [each.operation for each in growths] == names
    for each in growths:
        assert len(each.sizes) == len(each.seconds) == 2
        assert all(seconds > 0 for seconds in each.seconds)


def test_the_exponent_is_the_power_of_the_size() -> None:
    sizes = (1, 10, 100)
    for power in (0, 1, 2):
        costs = tuple(3e-6 * size**power for size in sizes)
        assert growth.Growth("x", "y", "flat", sizes, costs).exponent == pytest.approx(power)


def test_growth_has_a_table_and_a_figure(growths: list[growth.Growth]) -> None:
    text = growth.table(growths)
    assert "schedule   requests waiting: flat is expected" in text and "µs" in text
    fig, alt = figures.growth_figure(growths)
    assert not unlabelled(fig)
    assert [ax.get_xlabel() for ax in fig.axes] == [
        "requests waiting", "requests running", "cached blocks",
    ]  # fmt: skip
    assert "schedule from" in alt and "1 to 50 requests waiting" in alt


def test_growth_is_a_command(
    bench: Run, growths: list[growth.Growth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "measure", lambda: growths)
    file, plot = tmp_path / "growth.json", tmp_path / "growth.png"
    assert "schedule" in bench("--growth", "--json", str(file), "--plot", str(plot))
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["growth"][0]["operation"] == "schedule"
    assert found["growth"][0]["exponent"] == growths[0].exponent
    assert Image.open(plot).format == "PNG"
