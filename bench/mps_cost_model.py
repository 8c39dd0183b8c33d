"""Paper cost model of the Metal kernels: tiles, memory, registers, and instructions of a pair.

    python bench/mps_cost_model.py [--record]

Nothing is measured. Tiles, bytes and registers are computed by the backend itself; instructions
are counted in the kernels' source, by the constants below. --record writes the tables into
bench/results/mps_cost_model.md, between its two marks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from anyflex_mps.tiles import KernelName, Tile, tile_for

__all__ = ["MARKS", "PAGE", "tables"]

PAGE = Path(__file__).parent / "results" / "mps_cost_model.md"
MARKS = ("<!-- tables -->\n", "<!-- end of tables -->\n")
HEAD_DIMS = (64, 96, 128, 192, 256)
DTYPES = (torch.float16, torch.float32)
DECODED_ROWS = 8

# Instructions of one lane; a fused multiply-add is one.
STAGED_ELEMENT = 6
"""Instructions that copy one element to threadgroup memory: index, bound, load, select, store."""
FRAGMENT_LOAD = 2
"""Instructions of a lane that loads its two elements of an 8x8 fragment."""
FORWARD_PAIR = 16
"""Instructions of a score: scale, bound, largest, difference, exp2 (4), sum, conversion."""
BACKWARD_PAIR = 22
"""Instructions of a score and its gradient, with row values."""
FORWARD_STEP = 12
"""Instructions of a lane once a step: row reductions, rescale factor."""
PRODUCTS: dict[KernelName, int] = {"forward": 2, "decode": 2, "keys": 4, "queries": 3}
"""Matrix products of a kernel, each of head dim multiply-adds a pair."""
_LANES, _FRAGMENT = 32, 8


class Cost:
    """Instructions and bytes of a kernel for one pair of a query row and a key.

    Args:
        kernel: name of the kernel.
        tile: its tile.
        head_dim: of query, key and value.
        itemsize: bytes of an element.
    """

    def __init__(self, kernel: KernelName, tile: Tile, head_dim: int, itemsize: int) -> None:
        # Parts of the columns repeat the two products that make scores and their gradients.
        products = PRODUCTS[kernel] + (2 * (tile.parts - 1) if kernel == "keys" else 0)
        self.products = products * head_dim
        matrix_products = self.products / _FRAGMENT**3
        # Every matrix product loads its right operand. Scores load the left one too: forward once
        # a step, backward, whose scores and dP are two products, each time.
        forward = kernel in ("forward", "decode")
        left = _FRAGMENT / tile.step / 2 if forward else 2 * tile.parts / products
        loads = matrix_products * FRAGMENT_LOAD * _LANES * (1 + left)
        staged = tile.parts * 2 * head_dim / tile.rows
        self.other = loads + STAGED_ELEMENT * staged
        if forward:
            of_step = FORWARD_STEP * 4 + head_dim
            self.other += FORWARD_PAIR + of_step / tile.step
        else:
            self.other += BACKWARD_PAIR * tile.parts
        own = 0 if tile.stages_rows else left * matrix_products * _FRAGMENT**2
        self.device_bytes = (staged + own) * itemsize
        self.share = self.products / (self.products + self.other)
        # Parts do more work than the result needs; their share counts what it needs.
        self.useful = self.share * PRODUCTS[kernel] * head_dim / self.products
        self.intensity = 2 * PRODUCTS[kernel] * head_dim / self.device_bytes


def tables() -> str:
    """Return a table for each dtype as markdown."""
    lines: list[str] = []
    for dtype in DTYPES:
        itemsize = dtype.itemsize
        name = "16-bit types" if itemsize == 2 else "float32"
        lines += [f"### {name}", ""]
        lines.append(
            "| kernel | head dim | rows x step | threadgroup bytes | registers | multiply-adds a "
            "pair | other instructions a pair | useful share | FLOP a device byte |"
        )
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for kernel in PRODUCTS:
            for head_dim in HEAD_DIMS:
                spec = SimpleNamespace(dtype=dtype, head_dim=head_dim, value_head_dim=head_dim)
                rows = DECODED_ROWS if kernel == "decode" else None
                tile = tile_for(kernel, cast(Any, spec), rows)
                cost = Cost(kernel, tile, head_dim, itemsize)
                shape = f"{tile.rows} x {tile.step}" + (
                    f", {tile.parts} parts" if tile.parts > 1 else ""
                )
                lines.append(
                    f"| {kernel} | {head_dim} | {shape} | {tile.threadgroup_bytes:,} | "
                    f"{tile.registers} | {cost.products} | {cost.other:.0f} | "
                    f"{cost.useful:.0%} | {cost.intensity:.0f} |"
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or record them."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--record", action="store_true", help="write them into the page")
    if not parser.parse_args().record:
        print(tables())
        return
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}\n{tables()}{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
