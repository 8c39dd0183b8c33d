"""The CPU backend's error against float64, beside that of torch's scaled_dot_product_attention.

    python bench/cpu_precision.py [--level NAME] [--json FILE]

Same inputs and gradient that arrives, float32, bfloat16 and float16, forward and backward: full,
causal, ALiBi as a score mod beside torch with the same bias as a tensor, grouped heads; forward
alone of decoding. Head dims 40, 64 and 128, lengths that are and aren't whole blocks. Every level
of instructions that the processor can run, each in a process of its own. Errors are those of all
elements of SEEDS draws, against a dense float64 formula of the same rounded inputs: root mean
square, and the largest. Exits with 1 if a row is above LIMIT (ours to torch's, root mean square).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import anyflex
from anyflex_cpu.library import ISA_VARIABLE, load

__all__ = ["CASES", "LIMIT", "Case", "Row", "main", "measured"]

LIMIT = 1.1
SEEDS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = 4
RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Sizes, and the pattern: ``"full"``, ``"causal"`` or ``"alibi"``."""

    pattern: str
    length: int
    dim: int
    q_length: int = 0
    kv_heads: int = HEADS

    @property
    def rows(self) -> int:
        return self.q_length or self.length

    @property
    def results(self) -> tuple[str, ...]:
        return RESULTS[:1] if self.q_length else RESULTS

    @property
    def name(self) -> str:
        """The pattern, with the other properties of the case."""
        if self.q_length:
            return "decode"
        return self.pattern if self.kv_heads == HEADS else "grouped"


CASES = (
    *(
        Case(pattern, length, dim)
        for length, dim in ((512, 64), (1024, 128), (333, 64), (200, 40))
        for pattern in ("full", "causal")
    ),
    Case("alibi", 512, 64),
    Case("alibi", 333, 64),
    Case("full", 512, 64, kv_heads=1),
    Case("full", 2048, 64, q_length=1),
    Case("full", 999, 128, q_length=3, kv_heads=1),
)


@dataclass(frozen=True)
class Row:
    """One result's errors: ours and torch's, root mean square and largest."""

    level: str
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
    def group(self) -> tuple[str, str, str]:
        """Key of the rows that share a mean."""
        return self.level, self.dtype, self.result

    @property
    def ratio(self) -> float:
        return self.ours / self.torchs

    @property
    def is_above(self) -> bool:
        return self.ratio > LIMIT

    def __str__(self) -> str:
        sizes = f"{self.length:4} x {self.dim:3}"
        case = f"{self.level:11} {self.dtype:8} {self.pattern:7} {sizes}  {self.result:3}"
        return (
            f"{case}  rms {self.ours:.2e} / {self.torchs:.2e} = {self.ratio:4.2f}   "
            f"largest {self.ours_largest:.2e} / {self.torchs_largest:.2e}"
            f"{'  ABOVE' if self.is_above else ''}"
        )


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def slopes() -> Tensor:
    return 2.0 ** -torch.arange(1.0, HEADS + 1)


def bias(case: Case, dtype: torch.dtype) -> Tensor:
    """Bias of ALiBi, [heads, L, S]."""
    distance = torch.arange(case.length) - torch.arange(case.length).unsqueeze(-1)
    return (slopes().view(-1, 1, 1) * distance).to(dtype)


def results(inputs: list[Tensor], dout: Tensor, way: str, case: Case) -> list[Tensor]:
    """Results of the case among out, dq, dk and dv, in float64.

    Args:
        way: ``"cpu"``, ``"torch"`` or ``"formula"``.
    """
    if way == "formula":
        inputs, dout = [each.double() for each in inputs], dout.double()
    leaves = [each.detach().requires_grad_() for each in inputs]
    query, key, value = leaves
    grouped = case.kv_heads != HEADS
    if way == "cpu":
        mask, score_mod, table = None, None, slopes()
        if case.pattern == "causal":
            mask = anyflex.create_block_mask(causal, None, None, case.length, case.length)
        elif case.pattern == "alibi":

            def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return score + table[h] * (k - q)

        out = anyflex.flex_attention(
            query, key, value, score_mod, mask, enable_gqa=grouped, backend="cpu"
        )
    elif way == "torch":
        added = bias(case, query.dtype) if case.pattern == "alibi" else None
        out = F.scaled_dot_product_attention(
            query, key, value, added, is_causal=case.pattern == "causal", enable_gqa=grouped
        )
    else:
        key, value = (each.repeat_interleave(HEADS // case.kv_heads, 1) for each in (key, value))
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if case.pattern == "causal":
            dead = torch.ones(case.length, case.length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(dead, -torch.inf)
        elif case.pattern == "alibi":
            scores = scores + bias(case, torch.float64)
        out = scores.softmax(-1) @ value
    grads = torch.autograd.grad(out, leaves, dout) if len(case.results) > 1 else ()
    return [each.detach().double() for each in (out, *grads)]


def measured(level: str, dtype: torch.dtype, case: Case) -> list[Row]:
    """A row for each result."""
    errors: dict[str, list[list[Tensor]]] = {"cpu": [], "torch": []}
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        query, key, value, dout = (
            torch.randn(1, heads, rows, case.dim, generator=generator).to(dtype)
            for heads, rows in (
                (HEADS, case.rows),
                (case.kv_heads, case.length),
                (case.kv_heads, case.length),
                (HEADS, case.rows),
            )
        )
        exact = results([query, key, value], dout, "formula", case)
        for way, found in errors.items():
            computed = results([query, key, value], dout, way, case)
            found.append([a - b for a, b in zip(computed, exact, strict=True)])
    rows = []
    for place, result in enumerate(case.results):
        both = {way: torch.stack([draw[place] for draw in found]) for way, found in errors.items()}
        ours, torchs = (float(both[way].square().mean().sqrt()) for way in ("cpu", "torch"))
        largest = [float(both[way].abs().max()) for way in ("cpu", "torch")]
        name = str(dtype).removeprefix("torch.")
        sizes = (case.length, case.dim)
        rows.append(Row(level, name, case.name, *sizes, result, ours, torchs, *largest))
    return rows


def measured_apart(level: str) -> list[Row]:
    """The rows of a level, measured by a process that runs it from the start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--level", level, "--json", str(path)]
        environment = {**os.environ, ISA_VARIABLE: level}
        # The process fails where rows are above the limit, which the whole run reports.
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description="errors of the CPU backend beside torch's")
    parser.add_argument("--level", help="this level alone, which the process runs already")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if arguments.level:
        cases = [(dtype, case) for dtype in DTYPES for case in CASES]
        rows = [row for each in cases for row in measured(arguments.level, *each)]
    else:
        rows = [row for level in load().available() for row in measured_apart(level)]
    for row in rows:
        print(row)
    if arguments.json:
        text = json.dumps([vars(row) for row in rows], indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    means = {
        group: statistics.geometric_mean(row.ratio for row in rows if row.group == group)
        for group in dict.fromkeys(row.group for row in rows)
    }
    for (level, dtype, result), mean in means.items():
        print(f"{level:11} {dtype:8} {result:3}  {mean:4.2f}")
    highest = max(rows, key=lambda row: row.ratio)
    print(f"highest: {highest}")
    if any(row.is_above for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
