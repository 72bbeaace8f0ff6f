"""Figures that everybody can read: named colours, hatches and alt text for all.

fig, ax = viz.figure(title="Cost of a step", xlabel="step", ylabel="tokens computed")
ax.plot(steps, tokens, **viz.line(0), label="recompute")
viz.show(fig, alt="One line per method; recompute climbs, cached stays at one.")

style       figure, panels, line, bar, show
schedule    gantt: who does what when
memory      memory_map: who holds which block
replay      replay: an engine's steps, one by one
"""

from infer_lab.viz.memory import block_owners, memory_map
from infer_lab.viz.schedule import Bar, bars, gantt
from infer_lab.viz.style import (
    COLORMAP,
    COLORS,
    DASHES,
    HATCHES,
    MARKERS,
    bar,
    figure,
    line,
    luma,
    panels,
    show,
)
from infer_lab.viz.time_travel import replay

__all__ = [
    "COLORMAP",
    "COLORS",
    "DASHES",
    "HATCHES",
    "MARKERS",
    "Bar",
    "bar",
    "bars",
    "block_owners",
    "figure",
    "gantt",
    "line",
    "luma",
    "memory_map",
    "panels",
    "replay",
    "show",
]
