"""Draws the home page's speed chart from the committed results of one machine.

    python scripts/speed_chart.py [--check]

The numbers are the ratios in the table of bench/results/h200_cuda.md, and the line below the chart
is what that page says of its machine. `--check` writes nothing and exits 1 if the chart is not
current.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CHART", "RESULTS", "drawn_chart"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "h200_cuda.md"
CHART = ROOT / "docs" / "charts" / "h200.svg"

CASES = {
    "full B4 H16 S8192 D128": "no mask",
    "causal B4 H16 S8192 D128": "causal",
    "window B4 H16 S8192 D128": "sliding window",
    "documents B4 H16 S8192 D128": "packed documents",
    "prefix B4 H16 S8192 D128": "prefix-LM",
    "alibi B4 H16 S8192 D128": "ALiBi, causal",
    "softcap B4 H16 S8192 D128": "soft cap, causal",
}
"""Rows of the table, by case, and what the chart calls them."""
SHAPE = "B4 H16 S8192 D128, bfloat16"
DIRECTIONS = ("forward", "backward")
MACHINE = re.compile(
    r"on (?P<device>NVIDIA H\d+)s? \((?P<torch>torch [\w.+]+), (?P<triton>triton [\w.]+), "
    r"[^)]*\), (?P<date>\d{4}-\d\d-\d\d), all rows at commit (?P<commit>\w+)"
)
"""Machine and date in the page's first paragraph."""

OURS, THEIRS, TEXT = "#3f7fd0", "#d98a2b", "#737b87"
"""Colours that can be read on white and on black: an image doesn't know the page's theme."""
LEFT, COLUMN, GAP, RIGHT = 128, 250, 54, 44
"""Widths: of the cases' names, of a direction's bars, between directions, behind the last."""
TOP, ROW, BAR = 66, 38, 14


@dataclass(frozen=True)
class Speeds:
    """Speed of a row, where torch's compiled flex attention is 1.

    Args:
        ours: of the backend `cuda`.
        flash: of FlashAttention-4.
    """

    ours: float
    flash: float


def speeds(page: str) -> dict[tuple[str, str], Speeds]:
    """Read the page's first table: speeds by case and direction.

    Raises:
        KeyError, ValueError: the table lacks a column, a row, or a ratio.
    """
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    head = _cells(lines[0])
    found = {}
    for line in lines[1:]:
        cells = _cells(line)
        if len(cells) != len(head) or cells[0] not in CASES or cells[1] not in DIRECTIONS:
            continue
        row = dict(zip(head, cells, strict=True))
        # The table says how many times as long the peer takes as `cuda`.
        flex, flash = float(row["torch.flex"]), float(row["FA4"])
        found.setdefault((cells[0], cells[1]), Speeds(flex, flex / flash))
    return {(case, way): found[case, way] for case in CASES for way in DIRECTIONS}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def drawn_chart(page: str) -> str:
    """Return the chart of the results in `page`, as SVG text.

    Raises:
        KeyError, ValueError: the page lacks a row, or doesn't say machine and date.
    """
    machine = MACHINE.search(" ".join(page.split()))
    if machine is None:
        raise ValueError("the page doesn't begin with its machine, versions, date and commit")
    table = speeds(page)
    scale = COLUMN / max(max(each.ours, each.flash) for each in table.values())
    width = LEFT + 2 * COLUMN + GAP + RIGHT
    height = TOP + ROW * len(CASES) + 62
    names = f"anyflex's cuda backend and FlashAttention-4, torch's flex_attention being 1; {SHAPE}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="{TEXT}">',
        f"<title>Speed on one {machine['device']}: {names}</title>",
        _text(
            0, 16, f"Speed on one {machine['device']}, torch's compiled flex_attention = 1", 600
        ),
        *_legend(LEFT, 40),
    ]
    for column, direction in enumerate(DIRECTIONS):
        left = LEFT + column * (COLUMN + GAP)
        parts.append(_text(left, TOP - 6, direction, 600))
        for place, (case, name) in enumerate(CASES.items()):
            y = TOP + 4 + place * ROW
            if column == 0:
                parts.append(_text(LEFT - 10, y + BAR + 4, name, end=True))
            each = table[case, direction]
            parts += _bar(left, y, each.ours, scale, OURS)
            parts += _bar(left, y + BAR + 2, each.flash, scale, THEIRS)
        x, bottom = left + scale, TOP + ROW * len(CASES)
        line = f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{TEXT}" stroke-dasharray="3 3"/>'
        parts.append(line)
        parts.append(_text(x, bottom + 14, "torch", middle=True))
    parts += [
        _text(
            0,
            height - 20,
            f"{SHAPE}; medians of 7 rounds; longer is faster",
        ),
        _text(
            0,
            height - 4,
            f"{machine['torch']}, {machine['triton']}, {machine['date']}, commit "
            f"{machine['commit']}; bench/results/{RESULTS.name}",
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(x: int, y: int) -> list[str]:
    parts = []
    for place, (colour, name) in enumerate(
        ((OURS, "anyflex, cuda"), (THEIRS, "FlashAttention-4"))
    ):
        left = x + place * 130
        parts.append(f'<rect x="{left}" y="{y - 10}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(left + 16, y, name))
    return parts


def _bar(left: float, y: float, speed: float, scale: float, colour: str) -> list[str]:
    width = speed * scale
    return [
        f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
        _text(left + width + 5, y + BAR - 3, f"{speed:.2f}"),
    ]


def _text(
    x: float, y: float, text: str, weight: int = 400, *, end: bool = False, middle: bool = False
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y}"{bold}{anchor}>{text}</text>'


def main(arguments: list[str]) -> int:
    chart = drawn_chart(RESULTS.read_text(encoding="utf-8"))
    current = CHART.read_text(encoding="utf-8") if CHART.exists() else None
    if arguments == ["--check"]:
        if chart != current:
            print(f"the chart is not current: run {Path(__file__).name}", file=sys.stderr)
        return int(chart != current)
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text(chart, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
