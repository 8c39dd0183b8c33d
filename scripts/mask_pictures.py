"""Draws the pictures of docs/masks.md from the code of that page.

    python scripts/mask_pictures.py [--check]

A link ``![text](pictures/NAME.svg "24 queries, 24 keys")`` is drawn from the mask mod that the
page's code calls NAME. `--check` writes nothing and exits 1 if a picture is not current.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "PICTURES", "drawn_pictures"]

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "masks.md"
PICTURES = DOCS / "pictures"
CODE = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"^!\[(?P<text>[^\]]*)\]\(pictures/(?P<name>\w+)\.svg "
    r'"(?P<q>\d+) queries, (?P<kv>\d+) keys"\)',
    flags=re.MULTILINE,
)

BLOCK = 4
"""Side of the pictures' blocks, in elements."""
PIXELS = 9
"""Side of an element."""
DEAD, LIVE, FULL = "#f4f4f4", "#8fb8de", "#1f4e79"
"""Colours of an element; FULL: a live one in a block that is live as a whole."""


def drawn_pictures() -> dict[str, str]:
    """Return the SVG text of each picture that the page links to, by name.

    Raises:
        KeyError: the page's code defines no mask mod of that name.
    """
    import anyflex

    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "documentation_masks"}
    for code in CODE.findall(text):
        exec(code, names)
    pictures = {}
    for link in LINK.finditer(text):
        q_length, kv_length = int(link["q"]), int(link["kv"])
        mask_mod = names[link["name"]]
        live = anyflex.create_mask(mask_mod, 1, 1, q_length, kv_length)[0, 0]
        pictures[link["name"]] = svg(live.tolist(), link["text"])
    return pictures


def svg(live: list[list[bool]], title: str) -> str:
    """Draw a mask; lengths that are no multiple of BLOCK end in smaller blocks."""
    rows, columns = len(live), len(live[0])
    paths = {LIVE: "", FULL: ""}
    for row, column, width, colour in spans(live):
        paths[colour] += f"M{column} {row}h{width}v1h-{width}z"
    lines = "".join(f"M0 {y}h{columns}" for y in range(BLOCK, rows, BLOCK))
    lines += "".join(f"M{x} 0v{rows}" for x in range(BLOCK, columns, BLOCK))
    size = f'width="{columns * PIXELS}" height="{rows * PIXELS}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {columns} {rows}" '
            'role="img">',
            f"<title>{title}</title>",
            f'<path fill="{DEAD}" d="M0 0h{columns}v{rows}h-{columns}z"/>',
            *(f'<path fill="{colour}" d="{path}"/>' for colour, path in paths.items() if path),
            f'<path stroke="#ffffff" stroke-width="0.12" d="{lines}"/>',
            "</svg>\n",
        ]
    )


def spans(live: list[list[bool]]) -> Iterator[tuple[int, int, int, str]]:
    """Yield (row, first column, width, colour) of live elements side by side of one colour."""
    for row, line in enumerate(live):
        top = row - row % BLOCK
        column = 0
        while column < len(line):
            colour = colour_at(live, top, row, column)
            end = column + 1
            while end < len(line) and colour_at(live, top, row, end) == colour:
                end += 1
            if colour != DEAD:
                yield row, column, end - column, colour
            column = end


def colour_at(live: list[list[bool]], top: int, row: int, column: int) -> str:
    if not live[row][column]:
        return DEAD
    left = column - column % BLOCK
    block = [line[left : left + BLOCK] for line in live[top : top + BLOCK]]
    return FULL if all(map(all, block)) else LIVE


def main(arguments: list[str]) -> int:
    pictures = drawn_pictures()
    current = {path.stem: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    if arguments == ["--check"]:
        if pictures != current:
            print(f"the pictures are not current: run {Path(__file__).name}", file=sys.stderr)
        return int(pictures != current)
    PICTURES.mkdir(exist_ok=True)
    for name in current.keys() - pictures.keys():
        (PICTURES / f"{name}.svg").unlink()
    for name, text in pictures.items():
        if current.get(name) != text:
            (PICTURES / f"{name}.svg").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
