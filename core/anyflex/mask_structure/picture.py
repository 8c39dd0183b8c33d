"""Drawing a block mask: with characters, as a PNG file, as HTML."""

from __future__ import annotations

import base64
import itertools
import struct
import zlib

import torch
from torch import Tensor

from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.runs import FULL, PARTIAL, unpack_rows

__all__ = ["COLOURS", "coarse_grid", "draw", "html", "png"]

COLOURS = {"not visited": "#f4f4f4", "PARTIAL": "#8fb8de", "FULL": "#1f4e79"}
"""Kind -> colour. A cell that stands for many blocks has the mean of theirs."""

_CELLS = 512
"""Maximum number of cells along each side of a picture; more blocks share cells."""
_PIXELS = 512
"""A picture's longer side, roughly."""
_SHORTEST = 16
"""Minimum pixels of a picture's shorter side: a decoding mask is one block high."""
_LINED = 8
"""Minimum pixels of cells that get a line of lighter pixels between them."""


def draw(views: MaskViews, grid_size: tuple[int, int], limit: int) -> str:
    """Return the drawing that `BlockMask.to_string` describes."""
    rows, columns = views.q_blocks, views.kv_blocks
    row_step, column_step = (
        1 if cells < 0 else max(1, -(-count // cells))
        for count, cells in zip((rows, columns), grid_size, strict=True)
    )
    batch, heads, _ = views.offsets.shape
    drawn = []
    for b, h in itertools.islice(itertools.product(range(batch), range(heads)), limit):
        full, partial, size = coarse_grid(views, b, h, row_step, column_step)
        visited = full + partial
        shades = (visited > 0).to(torch.int64) + (visited == size)
        lines = ["".join(" ░█"[shade] * 2 for shade in line) for line in shades.tolist()]
        drawn.append(f"({b}, {h})\n" + "".join(line + "\n" for line in lines))
    if batch * heads > limit:
        drawn += [
            "...",
            "To print out more, set BlockMask.to_string(limit=N)",
            "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
        ]
    return "\n".join(drawn)


def coarse_grid(
    views: MaskViews, batch: int, head: int, row_step: int, column_step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cells of ``row_step x column_step`` blocks of one batch entry and head: counts of
    their FULL blocks, of their PARTIAL ones and of all, int64 [rows, columns] on the CPU. The last
    cells may be smaller. Time and memory grow with runs and cells, not with blocks."""
    host = views.on(torch.device("cpu"))
    rows, columns = host.q_blocks, host.kv_blocks
    runs = unpack_rows(host.offsets[batch, head], host.runs)
    lines = -(-rows // row_step)
    # One column more than there are, because a run may end behind the last.
    width = columns // column_step + 1
    line = runs.row // row_step * width
    counts = []
    for kind in (FULL, PARTIAL):
        chosen = (runs.kind == kind).nonzero().squeeze(1)
        # A run covers the cells before its end minus those before its first block. Up to an edge
        # at x, x // step cells are whole and x % step blocks are in the next one.
        whole = torch.zeros(lines * width, dtype=torch.int64, device="cpu")
        rest = torch.zeros_like(whole)
        for edge, sign in ((runs.end, 1), (runs.first, -1)):
            place, inside = line[chosen], edge[chosen]
            cell = place + inside // column_step
            one = torch.full_like(place, sign)
            whole.index_add_(0, cell, one)
            rest.index_add_(0, cell, one * (inside % column_step))
        # Edges in later cells have this cell before them.
        later = whole.view(lines, width).flip(1).cumsum(1).flip(1) - whole.view(lines, width)
        cells = later * column_step + rest.view(lines, width)
        counts.append(cells[:, : -(-columns // column_step)])
    heights, widths = (
        (length - torch.arange(0, length, step, device="cpu")).clamp(max=step)
        for length, step in ((rows, row_step), (columns, column_step))
    )
    return counts[0], counts[1], heights[:, None] * widths


def png(views: MaskViews, batch: int, head: int) -> bytes:
    """Return a PNG file of the blocks of one batch entry and head, rows downwards.

    At most about 1000 x 1000 pixels, whatever the mask's size.
    """
    rows, columns = views.q_blocks, views.kv_blocks
    steps = [max(1, -(-count // _CELLS)) for count in (rows, columns)]
    full, partial, size = coarse_grid(views, batch, head, *steps)
    colours = torch.tensor(
        [list(bytes.fromhex(colour[1:])) for colour in COLOURS.values()],
        dtype=torch.float64,
        device="cpu",
    )
    shares = torch.stack([size - full - partial, partial, full], 2).to(torch.float64)
    pixels = (shares / size[..., None]) @ colours
    if not pixels.numel():
        pixels = colours[:1].view(1, 1, 3)
    return _encoded(_enlarged(pixels.round().to(torch.uint8)))


def _enlarged(pixels: Tensor) -> Tensor:
    """uint8 [rows, columns, 3] with every pixel a rectangle of them, lined if it is large."""
    scale = max(1, _PIXELS // max(pixels.shape[:2]))
    for axis in (0, 1):
        side = max(scale, -(-_SHORTEST // pixels.shape[axis]))
        pixels = pixels.repeat_interleave(side, axis)
        if side >= _LINED:
            lines = torch.arange(side - 1, pixels.shape[axis] - 1, side, device="cpu")
            pixels.index_fill_(axis, lines, 255)
    return pixels


def _encoded(pixels: Tensor) -> bytes:
    """A PNG file (RFC 2083) of uint8 [height, width, 3]: three chunks, no filter."""
    height, width, _ = pixels.shape
    # Filter 0 begins each line.
    lines = torch.zeros(height, 1 + 3 * width, dtype=torch.uint8, device="cpu")
    lines[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(bytes(lines.reshape(-1).tolist()), 9)),
            _chunk(b"IEND", b""),
        ]
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def html(views: MaskViews, facts: str, limit: int) -> str:
    """Return the drawing that `BlockMask._repr_html_` gives: pictures, `facts` and a legend."""
    batch, heads, _ = views.shape
    figures = []
    for b, h in itertools.islice(itertools.product(range(batch), range(heads)), limit):
        data = base64.b64encode(png(views, b, h)).decode()
        caption = f"batch {b}, head {h}" if batch * heads > 1 else ""
        figures.append(
            "<figure style='display:inline-block;margin:4px'>"
            f"<img style='max-width:320px' src='data:image/png;base64,{data}'"
            f" alt='blocks of batch {b}, head {h}'>"
            f"<figcaption>{caption}</figcaption></figure>"
        )
    if batch * heads > limit:
        figures.append(f"<p>... and {batch * heads - limit} more; mask[batch, head] chooses.</p>")
    legend = " ".join(
        f"<span style='background:{colour};border:1px solid #888'>&emsp;</span> {kind}"
        for kind, colour in COLOURS.items()
    )
    return f"<div><p><b>BlockMask</b> {facts}</p>{''.join(figures)}<p>{legend}</p></div>"
