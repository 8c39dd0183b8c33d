"""Three kinds of charts, as SVG text: lines by length, dots by row, bars by row.

Text stays text, so that it can be read aloud, searched and scaled. An image doesn't know the
page's theme: the background is transparent, and each colour can be read on white and on black.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

__all__ = ["COLORS", "INK", "Heading", "bars", "dots", "lines"]

INK = "#78808c"
COLORS = ("#3f7fd0", "#cf7c26", "#3d9a50", "#a268cf", "#8a8f2f")
MARKERS = "osD^v"
"""Shapes of the series: colour is never all that tells two of them apart."""
WIDTH, ROW = 7.2, 0.19
"""Inches: a chart's width, which a page of the site shows at its size, and a row's height."""
TOP, BOTTOM = 0.62, 0.75
"""Inches above and below the panels: title and titles of panels, without the legend; axis, and one
line of origin."""
STYLE: dict[str, Any] = {
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    # Names of the file's elements are hashes, salted by something random otherwise.
    "svg.hashsalt": "anyflex",
}

Panels = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Value by panel, row and series."""


@dataclass(frozen=True)
class Heading:
    """Words of a chart.

    Args:
        title: one line.
        axis: what is shown along the axis of values, with its unit.
        origin: lines at the bottom that say where the figures come from.
    """

    title: str
    axis: str
    origin: Sequence[str]


def lines(
    heading: Heading,
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    along: str = "length of the sequence, tokens",
) -> str:
    """Draw a panel for each entry of `panels`: a line for each series, value by length.

    Args:
        along: what a length is, for the axis.
    """
    columns = 2
    rows = -(-len(panels) // columns)
    names = _series(panel for panel in panels.values())

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for axes, (title, series) in zip(grid.flat, panels.items(), strict=True):
            axes.set_title(title, loc="left")
            for place, name in enumerate(names):
                if name in series:
                    lengths, values = zip(*sorted(series[name].items()), strict=True)
                    axes.plot(
                        lengths, values, color=COLORS[place], marker=MARKERS[place], linewidth=1.5
                    )
            axes.set_xscale("log", base=2)
            highest = max(value for each in series.values() for value in each.values())
            axes.set_ylim(0, 1.1 * highest)
            ticks = sorted({length for each in series.values() for length in each})
            _set_ticks(axes, ticks, [str(length) for length in ticks])
        for axes in grid[-1]:
            axes.set_xlabel(along)
        for axes in grid[:, 0]:
            axes.set_ylabel(heading.axis)
        figure.subplots_adjust(hspace=0.32, wspace=0.2)

    described = {
        title: {
            name: {f"{length}:": value for length, value in each.items()}
            for name, each in series.items()
        }
        for title, series in panels.items()
    }
    return _svg(heading, names, 1.75 * rows, 0.62, draw, _described(described), filled=False)


def dots(
    heading: Heading,
    panels: Panels,
    ticks: Sequence[float],
    left: float,
    reference: float | None = 1,
) -> str:
    """Draw a dot for each value, on a logarithmic axis.

    Args:
        panels: the rows of all panels, in the order of the first that names them, share a place.
        ticks: values that the axis names; it ends a little beyond the first and the last.
        left: inches that the rows' names take.
        reference: value at which a line is drawn.
    """
    return _rows(heading, panels, ticks, left, reference, filled=False)


def bars(
    heading: Heading,
    panels: Panels,
    ticks: Sequence[float],
    left: float,
    reference: float | None = None,
) -> str:
    """Draw a bar with its value for each value, on an axis that begins at 0.

    Args:
        panels, left, reference: as in `dots`.
        ticks: values that the axis names, from 0.
    """
    return _rows(heading, panels, ticks, left, reference, filled=True)


def _rows(
    heading: Heading,
    panels: Panels,
    ticks: Sequence[float],
    left: float,
    reference: float | None,
    *,
    filled: bool,
) -> str:
    rows = list(dict.fromkeys(row for panel in panels.values() for row in panel))
    names = _series(series for panel in panels.values() for series in panel.values())
    shown = [
        value for panel in panels.values() for row in panel.values() for value in row.values()
    ]
    if not ticks[0] / 1.1 <= min(shown) <= max(shown) <= ticks[-1] * 1.1:
        raise ValueError(f"{heading.title!r} would leave out values beyond {ticks}")
    height = ROW * len(rows) * (0.85 * len(names) if filled else 1)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
        for axes, (title, panel) in zip(grid.flat, panels.items(), strict=True):
            axes.set_title(title, loc="left")
            axes.set_yticks(range(len(rows)), rows)
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.set_xlabel(heading.axis)
            for place, name in enumerate(names):
                # Series keep apart a little, so that equal values don't hide each other.
                shift = (place - (len(names) - 1) / 2) * (0.8 if filled else 0.4) / len(names)
                points = [
                    (rows.index(row) + shift, series[name])
                    for row, series in panel.items()
                    if name in series
                ]
                if filled:
                    _bars(axes, points, COLORS[place], 0.72 / len(names))
                else:
                    axes.plot(
                        [value for _, value in points],
                        [at for at, _ in points],
                        color=COLORS[place],
                        marker=MARKERS[place],
                        linestyle="none",
                    )
            if filled:
                axes.grid(visible=False, axis="y")
                axes.set_xlim(0, ticks[-1] * 1.1)
            else:
                axes.set_xscale("log", base=2)
                axes.set_xlim(ticks[0] / 1.1, ticks[-1] * 1.1)
            if reference is not None:
                axes.axvline(reference, color=INK, linewidth=1.2)
            _set_ticks(axes, ticks, [f"{tick:g}" for tick in ticks])
        figure.subplots_adjust(left=left / WIDTH, wspace=0.12)

    return _svg(heading, names, height, left, draw, _described(panels), filled=filled)


def _bars(axes: Axes, shown: Sequence[tuple[float, float]], color: str, thickness: float) -> None:
    for at, value in shown:
        axes.barh(at, value, thickness, color=color)
        axes.text(value, at, f" {value:.2f}", va="center", fontsize=8)


def _set_ticks(axes: Axes, ticks: Sequence[float], labels: Sequence[str]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(labels)


def _series(panels: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for panel in panels for name in panel))


def _described(panels: Panels) -> str:
    """Every value in words: what the picture says to those who don't see it."""
    return ". ".join(
        f"{title}: "
        + "; ".join(
            f"{row}: " + ", ".join(f"{name} {value:.4g}" for name, value in series.items())
            for row, series in panel.items()
        )
        for title, panel in panels.items()
    )


def _svg(
    heading: Heading,
    names: Sequence[str],
    panels_height: float,
    left: float,
    draw: Callable[[Figure], None],
    description: str,
    *,
    filled: bool,
) -> str:
    bottom = BOTTOM + 0.14 * (len(heading.origin) - 1)
    # A legend's line has room for some ninety letters.
    columns = min(len(names), 3 if sum(map(len, names)) > 75 else 5)
    legend = -(-len(names) // columns) * 0.18 if len(names) > 1 else 0
    top = TOP + legend
    height = top + panels_height + bottom
    with matplotlib.rc_context():
        # A user's own settings would draw another file.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, height))
        figure.subplots_adjust(
            left=left / WIDTH, right=0.975, top=1 - top / height, bottom=bottom / height
        )
        draw(figure)
        edge = 0.06 / WIDTH
        figure.text(edge, 1 - 0.2 / height, heading.title, fontsize=10, fontweight="bold")
        for line, text in enumerate(reversed(heading.origin)):
            figure.text(edge, (0.08 + 0.14 * line) / height, text, fontsize=8)
        if legend:
            _legend(figure, names, columns, 1 - 0.34 / height, filled=filled)
        file = io.StringIO()
        figure.savefig(
            file,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Title": heading.title},
        )
    text = file.getvalue()
    if 'role="img"' in text or text.count("</title>") != 1:
        raise ValueError("this matplotlib writes another head: see what follows")
    # matplotlib has no field for a description, and doesn't say that the file is one picture.
    text = text.replace("<svg ", '<svg role="img" aria-labelledby="title desc" ', 1)
    text = text.replace("<title>", '<title id="title">', 1)
    return text.replace(
        "</title>", f'</title>\n <desc id="desc">{html.escape(description)}</desc>', 1
    )


def _legend(
    figure: Figure, names: Sequence[str], columns: int, top: float, *, filled: bool
) -> None:
    handles = [
        Patch(color=COLORS[place])
        if filled
        else Line2D([], [], color=COLORS[place], marker=MARKERS[place], linestyle="none")
        for place in range(len(names))
    ]
    figure.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0, top),
        ncols=columns,
        borderpad=0,
        handletextpad=0.4,
        columnspacing=1.4,
        handlelength=1.2,
    )
