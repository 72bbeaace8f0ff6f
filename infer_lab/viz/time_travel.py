"""Time travel: an engine's steps, one by one, with a slider.

    engine = Engine(model, tokenizer, record_steps=True, ...)
    engine.generate(prompts, params)
    viz.replay(engine.steps, decode=tokenizer.decode, title="Three requests, twelve blocks")

Each frame shows the queue, who ran and with which tokens, what came out, and who holds which block.
The slider is a few lines of JavaScript inside the output, without a widget library: it works in
JupyterLab, VS Code and exported HTML. Where scripts don't run (a notebook that isn't trusted yet,
a printed page), a figure of a few chosen steps stands in its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from IPython.display import display

from infer_lab.engine_trace import EngineStep
from infer_lab.viz.memory import CACHED, FILLS, GREY, block_owners, draw_maps
from infer_lab.viz.style import image_tag, luma

STILLS = 6  # steps in the figure that stands in for the slider
_SCRIPT = Path(__file__).with_name("time_travel.js").read_text(encoding="utf-8")


def replay(
    steps: Sequence[EngineStep],
    *,
    title: str,
    decode: Callable[[list[int]], str] | None = None,
    columns: int = 16,
    first: int = 0,
) -> None:
    """Show an engine's recorded steps as frames that a slider runs through.

    decode: turns token ids into text, for what each request got. None: the ids are shown.
    columns: blocks in a row of the memory map.
    first: the frame to begin with.
    Raises ValueError when there are no steps, or no such first frame.
    """
    if not steps:
        raise ValueError("steps must hold at least one step: Engine(record_steps=True), got none")
    if not 0 <= first < len(steps):
        raise ValueError(f"first must lie in 0..{len(steps) - 1}, got {first}")
    names = dict.fromkeys(name for step in steps for name in (*_ran(step), *step.waiting))
    colours = {name: FILLS[i % len(FILLS)] for i, name in enumerate(names)}
    data = {
        "title": title,
        "columns": columns,
        "first": first,
        "cached": CACHED,
        "grey": GREY,
        "fill": {name: [c, "white" if luma(c) < 0.5 else "black"] for name, c in colours.items()},
        "frames": [frame(step, decode) for step in steps],
    }
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    mark = "replay-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    chosen = stills(steps)
    maps = {_caption(steps[i]): block_owners(steps[i]) for i in chosen}
    fig = draw_maps(maps, columns=min(columns, 8), side_by_side=2)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12)
    alt = f"{title}: {len(steps)} steps. " + " ".join(in_words(steps[i]) for i in chosen)
    page = (
        f'<div class="{mark}"><div class="still">{image_tag(fig, alt)}</div>'
        f"<script>({_SCRIPT.strip()})('{mark}', {text})</script></div>"
    )
    display({"text/html": page, "text/plain": f"[replay] {alt}"}, raw=True)


def frame(step: EngineStep, decode: Callable[[list[int]], str] | None = None) -> dict[str, Any]:
    """What one frame shows, ready for JSON."""
    rows = []
    for chunk in step.chunks:
        token = ""
        if chunk.token is not None:
            token = str(chunk.token) if decode is None else repr(decode([chunk.token]))
        state = "finished" if chunk.request in step.finished else ""
        rows.append([chunk.request, chunk.start, chunk.start + chunk.length, token, state])
    return {
        "step": step.step,
        "waiting": step.waiting,
        "preempted": step.preempted,
        "rows": rows,
        "blocks": block_owners(step),
    }


def stills(steps: Sequence[EngineStep]) -> list[int]:
    """The steps worth a picture: where most changes, spread over the whole, first and last too."""
    if len(steps) <= STILLS:
        return list(range(len(steps)))

    def change(i: int) -> tuple[int, int]:
        now, before = steps[i], steps[i - 1]
        events = len(now.preempted) + len(now.finished)
        events += len(set(_ran(now)) ^ set(_ran(before)))
        return -events, i

    middle = sorted(range(1, len(steps) - 1), key=change)[: STILLS - 2]
    return sorted({0, *middle, len(steps) - 1})


def in_words(step: EngineStep) -> str:
    """A step as a sentence, for those who can't see it."""
    parts = [", ".join(f"{c.request} computes {c.start} to {c.start + c.length - 1}"
                       for c in step.chunks)]  # fmt: skip
    for word, names in (
        ("waiting", step.waiting),
        ("preempted", step.preempted),
        ("finished", step.finished),
    ):
        if names:
            parts.append(f"{word} {', '.join(names)}")
    parts.append(f"{step.blocks.live} of {step.blocks.total} blocks held")
    return f"Step {step.step}: {'; '.join(parts)}."


def _ran(step: EngineStep) -> list[str]:
    return [chunk.request for chunk in step.chunks]


def _caption(step: EngineStep) -> str:
    """Who ran and who waits, short enough for a panel's title."""
    ran, waits = " ".join(_ran(step)), " ".join(step.waiting)
    text = f"step {step.step}: {ran}" + (f" | waits: {waits}" if waits else "")
    return text if len(text) <= 44 else text[:43] + "…"
