"""The CPU backend's error against float64, beside that of torch's scaled_dot_product_attention.

    python bench/cpu_precision.py [--json FILE]

Same inputs and gradient that arrives, float32, bfloat16 and float16, forward and backward, full
and causal, head dims 64 and 128, lengths that are and aren't whole blocks. Errors are those of all
elements of SEEDS draws, against a dense float64 formula of the same rounded inputs: root mean
square, and the largest. Exits with 1 if a row of `out` is above LIMIT (ours to torch's, root mean
square), if the geometric mean of a type's rows of one result is, or if a gradient's row is above
LIMIT / ROW_SHARE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import anyflex

__all__ = ["LIMIT", "Row", "main", "measured"]

LIMIT = 1.1
ROW_SHARE = 0.85
"""As in cpu_targets.py: what a gradient's single row may be beside its group."""
SEEDS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((512, 64), (1024, 128), (333, 64), (200, 40))
"""Length and head dim."""
HEADS = 4
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Row:
    """One result's errors: ours and torch's, root mean square and largest."""

    dtype: str
    pattern: str
    length: int
    dim: int
    result: str
    ours: float
    torchs: float
    ours_largest: float
    torchs_largest: float

    @property
    def ratio(self) -> float:
        return self.ours / self.torchs

    @property
    def is_above(self) -> bool:
        return self.ratio > (LIMIT if self.result == "out" else LIMIT / ROW_SHARE)

    def __str__(self) -> str:
        case = f"{self.dtype:8} {self.pattern:6} {self.length:4} x {self.dim:3}  {self.result:3}"
        return (
            f"{case}  rms {self.ours:.2e} / {self.torchs:.2e} = {self.ratio:4.2f}   "
            f"largest {self.ours_largest:.2e} / {self.torchs_largest:.2e}"
            f"{'  ABOVE' if self.is_above else ''}"
        )


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def results(inputs: list[Tensor], dout: Tensor, way: str, is_causal: bool) -> list[Tensor]:
    """out, dq, dk and dv in float64, by `way`: ``"cpu"``, ``"torch"`` or ``"formula"``."""
    if way == "formula":
        inputs, dout = [each.double() for each in inputs], dout.double()
    leaves = [each.detach().requires_grad_() for each in inputs]
    query, key, value = leaves
    length = query.shape[2]
    if way == "cpu":
        mask = None
        if is_causal:
            mask = anyflex.create_block_mask(causal, None, None, length, length)
        out = anyflex.flex_attention(query, key, value, block_mask=mask, backend="cpu")
    elif way == "torch":
        out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    else:
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if is_causal:
            dead = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(dead, -torch.inf)
        out = scores.softmax(-1) @ value
    return [each.detach().double() for each in (out, *torch.autograd.grad(out, leaves, dout))]


def measured(dtype: torch.dtype, length: int, dim: int, is_causal: bool) -> list[Row]:
    """A row for each result."""
    errors: dict[str, list[list[Tensor]]] = {"cpu": [], "torch": []}
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        *inputs, dout = (
            torch.randn(1, HEADS, length, dim, generator=generator).to(dtype) for _ in range(4)
        )
        exact = results(inputs, dout, "formula", is_causal)
        for way, found in errors.items():
            computed = results(inputs, dout, way, is_causal)
            found.append([a - b for a, b in zip(computed, exact, strict=True)])
    rows = []
    for place, result in enumerate(RESULTS):
        both = {way: torch.stack([draw[place] for draw in found]) for way, found in errors.items()}
        ours, torchs = (float(both[way].square().mean().sqrt()) for way in ("cpu", "torch"))
        largest = [float(both[way].abs().max()) for way in ("cpu", "torch")]
        pattern = "causal" if is_causal else "full"
        name = str(dtype).removeprefix("torch.")
        rows.append(Row(name, pattern, length, dim, result, ours, torchs, *largest))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="errors of the CPU backend beside torch's")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    rows = [
        row
        for dtype in DTYPES
        for length, dim in SHAPES
        for is_causal in (False, True)
        for row in measured(dtype, length, dim, is_causal)
    ]
    for row in rows:
        print(row)
    if arguments.json:
        text = json.dumps([vars(row) for row in rows], indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    means = {
        (dtype, result): statistics.geometric_mean(
            row.ratio for row in rows if (row.dtype, row.result) == (dtype, result)
        )
        for dtype in dict.fromkeys(row.dtype for row in rows)
        for result in RESULTS
    }
    for (dtype, result), mean in means.items():
        print(f"{dtype:8} {result:3}  {mean:4.2f}{'' if mean <= LIMIT else '  ABOVE'}")
    highest = max(rows, key=lambda row: row.ratio)
    print(f"highest: {highest}")
    if max(means.values()) > LIMIT or any(row.is_above for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
