"""A report as a picture: bars of GFLOP/s, a group for each case and direction, as SVG."""

from __future__ import annotations

import html
from typing import Any

__all__ = ["svg_plot"]

_COLORS = ("#2f6fde", "#e0862c", "#3d9a50", "#c2413b", "#8464c4", "#7a5a3c", "#d06cb2", "#6b7280")
_BAR, _GAP, _TITLE = 14, 14, 20
_LEFT, _WIDTH, _RIGHT = 190, 520, 150


def svg_plot(report: dict[str, Any]) -> str:
    """Return the picture. A row that was not measured shows its status in place of the bar."""
    rows = report["measurements"]
    # Right end of the names: the minimum has room for 26 letters.
    left = max(_LEFT, 7 * max((len(row["contender"]) for row in rows), default=0) + 12)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["direction"]), []).append(row)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    colors = {name: _COLORS[place % len(_COLORS)] for place, name in enumerate(names)}
    machine = report["machine"]
    where = machine["device_name"] or f"{machine['cpu']}, {machine['threads']} threads"
    parts = [_text(10, 20, f"GFLOP/s on {where}, torch {report['versions']['torch']}", bold=True)]
    y = 40
    for (case, direction), group in groups.items():
        # Each group has a scale of its own: cases differ by orders of magnitude.
        largest = max((row["gflops"] or 0.0 for row in group), default=0.0) or 1.0
        parts.append(_text(10, y + 12, f"{case}, {direction}", bold=True))
        y += _TITLE
        for row in group:
            parts.append(_text(left - 6, y + 11, row["contender"], end=True))
            if row["gflops"] is None:
                parts.append(_text(left + 4, y + 11, row["status"], faint=True))
            else:
                parts += _bar(row, left, y, largest, colors[row["contender"]])
            y += _BAR + 3
        y += _GAP
    width = left + _WIDTH + _RIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" font-family="system-ui, sans-serif" font-size="12">'
    )
    background = f'<rect width="{width}" height="{y}" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _bar(row: dict[str, Any], left: int, y: int, largest: float, color: str) -> list[str]:
    """The median as a bar, the range of the rounds as a line across its end."""
    median, flops = row["gflops"], row["flops"]
    low, high = (flops / row[name] / 1e6 for name in ("max_ms", "min_ms"))
    scale = _WIDTH / largest
    ends = [left + min(value * scale, _WIDTH + 20) for value in (low, high)]
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f}x"
    middle = y + _BAR / 2
    return [
        f'<rect x="{left}" y="{y}" width="{median * scale:.1f}" height="{_BAR}" fill="{color}"/>',
        f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{middle}" y2="{middle}" '
        'stroke="#1d1f24" stroke-width="1.5"/>',
        _text(max(left + median * scale, ends[1]) + 6, y + 11, f"{median:.4g}{ratio}"),
    ]


def _text(
    x: float, y: float, text: str, *, bold: bool = False, end: bool = False, faint: bool = False
) -> str:
    style = ' font-weight="600"' if bold else ""
    style += ' text-anchor="end"' if end else ""
    fill = "#777777" if faint else "#1d1f24"
    return f'<text x="{x:.1f}" y="{y}" fill="{fill}"{style}>{html.escape(text)}</text>'
