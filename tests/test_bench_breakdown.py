"""The stopwatch before an engine's parts: it adds up, changes nothing, leaves nothing behind."""

from __future__ import annotations

import pytest

from infer_lab import Engine
from infer_lab.bench import closed_loop, random_prompts
from infer_lab.bench.breakdown import PARTS, Breakdown, watch
from infer_lab.model.transformer import Transformer


def test_every_part_of_every_step_is_timed_and_the_tokens_stay_the_same(
    small_model: Transformer,
) -> None:
    jobs = random_prompts(3, 9, 6, vocab_size=97)
    expected = [r.token_ids for r in closed_loop(Engine(small_model, num_blocks=32), jobs).records]
    engine = Engine(small_model, num_blocks=32)
    with watch(engine) as found:
        run = closed_loop(engine, jobs)
    assert [record.token_ids for record in run.records] == expected
    assert found.steps == 6
    assert {*found.parts} == {*PARTS} and all(each > 0 for each in found.parts.values())
    assert 0 < found.rest < found.seconds <= run.seconds
    assert 0 < found.outside_model < 1
    assert "outside" not in found.table() and "model" in found.table()
    assert found.table().splitlines()[-1].split()[-2:] == ["100.0", "%"]


def test_afterwards_the_engine_is_as_it_was(small_model: Transformer) -> None:
    engine = Engine(small_model, num_blocks=32)
    before = {**vars(engine)}, {**vars(engine.scheduler)}
    with pytest.raises(KeyboardInterrupt), watch(engine):
        raise KeyboardInterrupt
    assert vars(engine).keys() == before[0].keys()
    assert vars(engine.scheduler).keys() == before[1].keys()
    assert engine.model is small_model and engine.sampler is before[0]["sampler"]


def test_shares_are_of_the_whole_step() -> None:
    found = Breakdown(4, 2.0, {"schedule": 0.1, "model": 1.5, "sample": 0.1, "commit": 0.2})
    assert found.rest == pytest.approx(0.1)
    assert found.outside_model == 0.25
    assert found.table().splitlines()[2].split() == ["model", "375.000", "75.0", "%"]
