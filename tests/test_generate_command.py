"""`infer-lab generate` on the default model, through the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from infer_lab.cli import main

Run = Callable[..., str]


@pytest.fixture
def run(default_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, status: int = 0) -> str:
        model = ("--model", str(default_dir), "--dtype", "float32", "--device", "cpu")
        assert main(["generate", *arguments, *model]) == status
        captured = capsys.readouterr()
        return captured.out if status == 0 else captured.err

    return run


FRANCE = "The capital of France is"


def test_a_stop_string_cuts_the_text_and_is_not_shown(run: Run) -> None:
    assert run(FRANCE, "--max-tokens", "8", "--stop", ".") == " Paris\n"
    assert run(FRANCE, "--max-tokens", "8", "--stop", ".", "--stream") == " Paris\n"


def test_a_seed_gives_the_same_samples_again(run: Run) -> None:
    options = ("--n", "3", "--seed", "7", "--temperature", "1", "--top-p", "0.9", "--top-k", "40")
    first = run("Once upon a time", *options, "--max-tokens", "8")
    assert first == run("Once upon a time", *options, "--max-tokens", "8", "--stream")
    texts = first.split("--- ")[1:]
    assert [text.splitlines()[0] for text in texts] == [f"prompt 1, sample {i}" for i in (1, 2, 3)]
    assert len({text.split("\n", 1)[1] for text in texts}) == 3


@pytest.mark.parametrize("option", [("--n", "2"), ("--seed", "3"), ("--top-p", "0.99")])
def test_asking_for_a_draw_is_enough_to_get_one(option: tuple[str, str], run: Run) -> None:
    words = ("Once upon a time", "--max-tokens", "12")
    assert run(*words, *option) != run(*words)
    assert run(*words, *option, "--temperature", "0").count(run(*words).strip()) >= 1


def test_several_prompts_are_answered_in_their_order(run: Run) -> None:
    both = run(FRANCE, "1, 2, 3, 4,", "--max-tokens", "4")
    assert both.index("prompt 1") < both.index("Paris") < both.index("prompt 2") < both.index(" 5")


def test_logprobs_are_listed_token_by_token(run: Run) -> None:
    lines = run(FRANCE, "--max-tokens", "2", "--logprobs", "2").splitlines()
    assert lines[0] == " Paris."
    assert [line.split(" -")[0] for line in lines[1:]] == ["  ' Paris'", "  '.'"]
    assert "of ' Paris' -" in lines[1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--top-p", "0"), "top_p must be"),
        (("--n", "0"), "n must be"),
        (("--stop", ""), "stop must hold"),
        (("--seed", str(2**70)), "seed must be"),
        (("--stop-token-id", "99999999"), "stop_token_ids must be"),
    ],
)
def test_options_out_of_range_are_named_in_one_line(
    run: Run, options: tuple[str, ...], named: str
) -> None:
    error = run(FRANCE, *options, status=2)
    assert named in error and error.startswith("infer-lab: error: ") and error.count("\n") == 1
