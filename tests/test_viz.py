"""Charts of what an engine did: schedules, memory maps, replays."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from infer_lab import Engine, SamplingParams, viz
from infer_lab.engine_trace import EngineStep
from infer_lab.viz import style, time_travel
from infer_lab.viz.memory import map_in_words
from infer_lab.viz.schedule import in_words
from tests.conftest import random_model

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def steps() -> list[EngineStep]:
    """Four requests and too little memory: one waits, one is preempted."""
    engine = Engine(
        random_model(), block_size=4, num_blocks=13, max_num_seqs=3, max_batch_tokens=8,
        record_steps=True,
    )  # fmt: skip
    for name, prompt in {"A": range(1, 12), "B": range(1, 10), "C": range(20, 36)}.items():
        engine.add(list(prompt), PARAMS, request_id=name)
    engine.add([5, 6, 7], PARAMS, request_id="D")
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().num_preemptions
    return engine.steps


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What the figures put on the page."""
    found: list[dict[str, str]] = []
    for module in (style, time_travel):
        monkeypatch.setattr(module, "display", lambda data, raw: found.append(data))
    return found


def test_every_request_is_at_work_or_waits_from_its_arrival_to_its_end(
    steps: list[EngineStep],
) -> None:
    found = viz.bars(steps)
    assert list(dict.fromkeys(bar.request for bar in found)) == ["A", "B", "C", "D"]
    for name in "ABCD":
        own = sorted((bar.start, bar.end) for bar in found if bar.request == name)
        (last,) = (step.step for step in steps if name in step.finished)
        covered = [step for start, end in own for step in range(int(start), int(end))]
        assert covered == list(range(last + 1))


def test_bars_tell_first_prefill_decode_and_prefill_again_apart(steps: list[EngineStep]) -> None:
    for bar in viz.bars(steps):
        if bar.kind == "waits":
            continue
        step = steps[int(bar.start)]
        (chunk,) = (chunk for chunk in step.chunks if chunk.request == bar.request)
        before = [s for s in steps[: step.step] if bar.request in s.preempted]
        had_token = any(
            c.token is not None for s in steps[: step.step] for c in s.chunks
            if c.request == bar.request
        )  # fmt: skip
        if bar.kind == "prefill again":
            assert before
        else:
            assert bar.kind == ("decode" if had_token else "prefill")
        assert chunk.length == 1 or bar.kind != "decode" or before
    assert {bar.kind for bar in viz.bars(steps)} == {
        "waits", "prefill", "decode", "prefill again",
    }  # fmt: skip


def test_a_gantt_chart_says_in_words_what_it_shows(shown: list[dict[str, str]]) -> None:
    some = [
        viz.Bar("A", "prefill", 0, 1),
        viz.Bar("A", "decode", 1, 2),
        viz.Bar("A", "decode", 2, 3),
    ]
    viz.gantt([*some, viz.Bar("B", "waits", 0, 3)], title="Two")
    assert (
        "A prefill from 0 to 1, decode from 1 to 3; B waits from 0 to 3" in shown[0]["text/plain"]
    )


def test_a_gantt_chart_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(ValueError, match="bars must hold at least one bar"):
        viz.gantt([], title="None")
    with pytest.raises(ValueError, match=r"kind must be one of waits.*got sleeps"):
        viz.gantt([viz.Bar("A", "sleeps", 0, 1)], title="One")


def test_a_map_has_each_block_once_and_agrees_with_the_counts(steps: list[EngineStep]) -> None:
    for step in steps:
        owners = viz.block_owners(step)
        assert len(owners) == 13
        assert sum(owner == "" for owner in owners) == step.blocks.free
        assert sum(owner == "cached" for owner in owners) == step.blocks.cached
        for name, table in step.tables.items():
            assert all(name in owners[block].split("+") for block in table)


def test_shared_blocks_name_all_who_hold_them() -> None:
    engine = Engine(random_model(), block_size=4, num_blocks=20, record_steps=True)
    engine.add(list(range(1, 12)), SamplingParams(max_tokens=4, n=2, seed=3), request_id="S")
    while engine.has_unfinished():
        engine.step()
    assert any("S[0]+S[1]" in viz.block_owners(step) for step in engine.steps)


def test_maps_are_put_into_words(shown: list[dict[str, str]]) -> None:
    owners = ["A", "A", "", "A+B", "cached", "cached"]
    words = "blocks 0 to 1 A, 2 free, 3 A+B, 4 to 5 cached"
    assert map_in_words(owners) == words
    viz.memory_map({"before": owners}, title="One map")
    assert words in shown[0]["text/plain"]
    with pytest.raises(ValueError, match="maps must hold maps with blocks"):
        viz.memory_map({"before": []}, title="None")


def replayed(page: dict[str, str]) -> dict[str, Any]:
    return json.loads(re.search(r"\)\('replay-\w+', (.*)\)</script>", page["text/html"])[1])


def test_a_replay_has_a_frame_for_each_step_and_a_figure_where_scripts_do_not_run(
    steps: list[EngineStep], shown: list[dict[str, str]]
) -> None:
    viz.replay(steps, title="All of it")
    data = replayed(shown[0])
    assert [frame["step"] for frame in data["frames"]] == list(range(len(steps)))
    assert [frame["waiting"] for frame in data["frames"]] == [list(s.waiting) for s in steps]
    assert shown[0]["text/html"].count("<img ") == 1
    assert "preempted" in shown[0]["text/plain"]


def test_text_in_a_replay_cannot_leave_its_script(
    steps: list[EngineStep], shown: list[dict[str, str]]
) -> None:
    viz.replay(steps, title="Odd </script><b>", decode=lambda ids: "</script><script>alert(1)")
    assert shown[0]["text/html"].count("</script>") == 1
    assert "&lt;/script&gt;&lt;b&gt;" in shown[0]["text/html"]  # the alt text
    assert replayed(shown[0])["title"] == "Odd </script><b>"


def test_a_replay_of_nothing_is_refused(steps: list[EngineStep]) -> None:
    with pytest.raises(ValueError, match="steps must hold at least one step"):
        viz.replay([], title="None")
    with pytest.raises(ValueError, match="first must lie in 0"):
        viz.replay(steps, title="Past the end", first=len(steps))


def test_words_follow_the_order_of_time() -> None:
    some = [viz.Bar("B", "decode", 4, 5), viz.Bar("B", "waits", 0, 4)]
    assert in_words(some) == "B waits from 0 to 4, decode from 4 to 5"
