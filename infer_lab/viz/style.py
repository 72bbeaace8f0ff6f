"""What all figures have in common: `figure` makes one, `show` puts it into the notebook.

    fig, ax = viz.figure(title="Cost of a step", xlabel="step", ylabel="tokens computed")
    ax.plot(steps, tokens, **viz.line(0), label="recompute")
    viz.show(fig, alt="One line per method; recompute climbs, cached stays at one.")

Alt text has to reach the page's `<img>`. Neither JupyterLab nor nbconvert's default template takes
it from the metadata of an `image/png` output, so `show` writes the `<img alt="...">` itself, with
the PNG inside it, as `text/html`. Beside it stands the same sentence as `text/plain` for terminals.

nbval compares `text/html`. The title and the alt text should be compared; the PNG's bytes must
not be, since fonts, zlib and the last bit of a float differ between machines. The patterns in
`course/nbval-sanitize.cfg` take them out; the repository's `conftest.py` hands that file to nbval.

Colours differ in lightness as well as in hue, so that they survive a grey printer, and each line
style has its own marker and dash. pyplot isn't used, so there is no figure to forget to close.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib as mpl
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

# From dark to light; neighbours are at least 0.14 apart in luma (0 black, 1 white).
COLORS = ("#12355b", "#c1440e", "#4fb3a9", "#f2b544")
COLORMAP = "Blues"  # from white (least) to dark (most), in grey as well
HATCHES = ("", "//", "..", "xx")
MARKERS = ("o", "s", "^", "D")
DASHES = ("-", "--", "-.", ":")

MIN_ALT_LENGTH = 30  # characters; less can't say what a figure shows
_PIXELS_PER_INCH = 100  # on the page
_DPI = 150  # in the file: sharp on dense screens, still small
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, hence the same everywhere
    "font.size": 11.0,
    "axes.titlesize": 12.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def figure(
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    size: tuple[float, float] = (7.2, 3.4),
    grid: Literal["x", "y", "both"] | None = "both",
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; `size` in inches. Labels carry their unit: "time (ms)"."""
    with mpl.rc_context(_STYLE):
        fig = Figure(figsize=size, layout="constrained")
        ax = fig.add_subplot()
    if grid:
        ax.grid(axis=grid)
    ax.set_title(title, loc="left")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    return fig, ax


def panels(
    titles: Sequence[str],
    *,
    xlabel: str,
    ylabel: str,
    columns: int = 2,
    panel_size: tuple[float, float] = (3.6, 2.6),
    share: bool = True,
    grid: Literal["x", "y", "both"] | None = "both",
) -> tuple[Figure, list[Axes]]:
    """A figure with a pair of axes for each title, row by row, `panel_size` inches each.

    share: the same scale in all of them, so that they can be compared.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    size = (panel_size[0] * columns, panel_size[1] * rows)
    with mpl.rc_context(_STYLE):
        fig = Figure(figsize=size, layout="constrained")
        grid_of_axes = fig.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
    axes = [*grid_of_axes.flat]
    for ax, title in zip(axes, titles, strict=False):
        if grid:
            ax.grid(axis=grid)
        ax.set_title(title, loc="left")
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        ax.tick_params(labelbottom=True, labelleft=True)
    for ax in axes[len(titles) :]:
        ax.remove()
    return fig, axes[: len(titles)]


def line(index: int, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of `ax.plot` for the index-th line: colour, marker, dash, then changes."""
    i = index % len(COLORS)
    style = {"color": COLORS[i], "marker": MARKERS[i], "linestyle": DASHES[i], "markersize": 5}
    return style | changes


def bar(index: int, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of `ax.bar` for the index-th series: colour and hatch, then changes."""
    i = index % len(COLORS)
    return {"color": COLORS[i], "hatch": HATCHES[i], "edgecolor": "white"} | changes


def show(fig: Figure, *, alt: str) -> None:
    """Display `fig` as an image with alternative text, as the last line of a cell.

    `alt` says in a sentence or two what there is to see, for those who can't see it.

    Raises ValueError when `alt` is too short to do that, or when axes lack a title or a label.
    """
    alt = " ".join(alt.split())
    if len(alt) < MIN_ALT_LENGTH:
        raise ValueError(f"alt must say what the figure shows (>= {MIN_ALT_LENGTH} characters), "
                         f"got {alt!r}")  # fmt: skip
    if missing := unlabelled(fig):
        raise ValueError(f"the figure lacks: {', '.join(missing)}")
    display({"text/html": image_tag(fig, alt), "text/plain": f"[figure] {alt}"}, raw=True)


def image_tag(fig: Figure, alt: str) -> str:
    """The figure as an HTML image that holds its own data."""
    for ax in fig.axes:
        if legend := ax.get_legend():
            legend.set_frame_on(False)
    width = round(fig.get_figwidth() * _PIXELS_PER_INCH)
    source = base64.b64encode(to_png(fig)).decode("ascii")
    return f'<img src="data:image/png;base64,{source}" width="{width}" alt="{html.escape(alt)}">'


def to_png(fig: Figure) -> bytes:
    """The figure as a PNG file, the same bytes each time on one machine.

    128 colours are enough for lines, bars and a colour map, and a third of the size: notebooks are
    kept in git with their figures.
    """
    full, small = io.BytesIO(), io.BytesIO()
    with mpl.rc_context(_STYLE):
        fig.savefig(full, format="png", dpi=_DPI)
    image = Image.open(full).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(small, format="PNG", optimize=True)
    return small.getvalue()


def unlabelled(fig: Figure) -> list[str]:
    """What the axes of a figure lack: "title", "x label", "y label"; colour bars need no title."""
    missing = []
    for ax in fig.axes:
        is_colorbar = ax.get_label() == "<colorbar>"
        if not (is_colorbar or ax.get_title("left") or ax.get_title()):
            missing.append("title")
        if not (is_colorbar or ax.get_xlabel()):
            missing.append("x label")
        if not ax.get_ylabel():
            missing.append("y label")
    return missing


def luma(color: str) -> float:
    """How light a colour is once the hue is gone, from 0 (black) to 1 (white); ITU-R BT.601."""
    red, green, blue = mpl.colors.to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue
