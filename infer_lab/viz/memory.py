"""Memory maps: a cell for each block of KV memory, with the name of who holds it.

    viz.memory_map({"before": ["A", "A", "", "B"], "after": ["", "", "", "B"]}, title="A ends")

Every request has a colour of its own, and its name stands in the cell: colour is never all there
is to tell two apart. A block that several hold is hatched, and says how many they are where their
names don't fit. An unused one that can be found again is grey, a free one is white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infer_lab.engine_trace import EngineStep
from infer_lab.viz.style import luma, panels, show

CACHED = "cached"
# Light to dark and of different hues; used in turn.
FILLS = ("#f2b544", "#12355b", "#8fd0c8", "#c1440e", "#d9c2e9", "#2f7d76", "#f7dcb4", "#6a4c93")
GREY = "#d0d0d0"
SHARED = "+"  # between the names of those who share a block


def block_owners(step: EngineStep) -> list[str]:
    """Who holds each block behind a step: "A", "A+B" if shared, "cached", or "" for free."""
    holders: list[list[str]] = [[] for _ in range(step.blocks.total)]
    for name, table in step.tables.items():
        for block in table:
            holders[block].append(name)
    owners = [SHARED.join(names) for names in holders]
    for block in step.cached:
        owners[block] = CACHED
    return owners


def memory_map(maps: Mapping[str, Sequence[str]], *, title: str, columns: int = 16) -> None:
    """Show one or more maps of the same memory below each other.

    maps: a caption for each map, with the owner of each block as `block_owners` gives them.
    columns: blocks in a row.
    The alt text is made from the maps: it says who holds which blocks.
    Raises ValueError for no maps, or for maps without blocks.
    """
    if not maps or not all(maps.values()):
        raise ValueError(f"maps must hold maps with blocks, got {dict(maps)!r}")
    fig = draw_maps(maps, columns=columns)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12)
    alt = "; ".join(f"{caption}: {map_in_words(owners)}" for caption, owners in maps.items())
    show(fig, alt=f"Memory map, {title}. {alt}.")


def draw_maps(
    maps: Mapping[str, Sequence[str]], *, columns: int = 16, side_by_side: int = 1
) -> Figure:
    """A panel for each map, `side_by_side` of them in a row."""
    longest = max(len(owners) for owners in maps.values())
    columns = min(columns, longest)
    width = 7.2 / side_by_side
    cell = min(0.45, (width - 0.7) / columns)  # inches
    height = -(-longest // columns) * cell + 0.75
    fig, axes = panels(
        list(maps),
        xlabel="block",
        ylabel="first block of the row",
        columns=side_by_side,
        panel_size=(width, max(height, 1.35)),
        grid=None,
    )
    fill = _fills(maps)
    for ax, owners in zip(axes, maps.values(), strict=True):
        _draw(ax, owners, columns, fill, cell)
    return fig


def _fills(maps: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """A colour for each owner, in the order in which they appear."""
    names = {name: None for owners in maps.values() for owner in owners
             if owner not in ("", CACHED) for name in owner.split(SHARED)}  # fmt: skip
    colours = {name: FILLS[i % len(FILLS)] for i, name in enumerate(names)}
    return colours | {"": "white", CACHED: GREY}


def _draw(ax: Axes, owners: Sequence[str], columns: int, fill: dict[str, str], cell: float) -> None:
    rows = -(-len(owners) // columns)
    for block, owner in enumerate(owners):
        row, column = divmod(block, columns)
        colour = fill[owner.split(SHARED)[0]]
        shared = SHARED in owner
        box = mpl.patches.Rectangle(
            (column, row), 1, 1, facecolor=colour, edgecolor="gray", hatch="///" if shared else None
        )
        ax.add_patch(box)
        text = "" if owner == CACHED else owner
        points = _points(text, cell)
        if shared and points < 6.5:
            text = f"×{owner.count(SHARED) + 1}"
            points = _points(text, cell)
        ink = "white" if luma(colour) < 0.5 and not shared else "black"
        back = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if shared else None
        place = (column + 0.5, row + 0.5)
        ax.text(*place, text, ha="center", va="center", fontsize=points, color=ink, bbox=back)
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    ax.set_aspect("equal", anchor="W")
    step = max(1, columns // 8)
    ax.set_xticks([c + 0.5 for c in range(0, columns, step)], [*map(str, range(0, columns, step))])
    ax.set_yticks([r + 0.5 for r in range(rows)], [str(r * columns) for r in range(rows)])
    ax.set_ylabel("block" if rows == 1 else "first block")
    ax.tick_params(length=0, labelsize=8)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _points(text: str, cell: float) -> float:
    """The size of type with which a text fits into a cell, in points."""
    return min(9.0, 72 * cell * 0.85 / max(1, 0.62 * len(text)))


def map_in_words(owners: Sequence[str]) -> str:
    """The map as words: "0 to 3 A, 4 free, 5 A+B, 6 to 7 cached"."""
    parts, block = [], 0
    for owner, run in groupby(owners):
        last = block + len(list(run)) - 1
        span = f"{block}" if last == block else f"{block} to {last}"
        parts.append(f"{span} {owner or 'free'}")
        block = last + 1
    return "blocks " + ", ".join(parts)
