"""Backward with learned tables of score mods: `cuda`, `cuda.triton`, torch's flex attention.

    python bench/learning_tables.py [--rounds 7] [--length 4096] [--width 128] [--json FILE]

B4 H16, bfloat16, causal, gradients of query, key, value and the table. First the tables' gradients
of a call of 512 rows are compared with `reference`'s; then rounds in which everybody takes a turn,
caches flushed, by device events. Prints medians, and how many times as long others take. Exits
with 1 if gradients are wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import anyflex
from anyflex.bench.clock import Timed, clock_of
from anyflex.bench.machine import command_of, provenance

__all__ = ["TABLES", "main"]

BATCH, HEADS = 4, 16
WRONG = 0.02
"""Limit of the root mean square of the errors of a table's gradient, relative to that of the
gradient: for bfloat16 it is some 0.003."""
CONTENDERS = ("cuda", "cuda.triton", "torch.flex")

ScoreMod = Callable[..., Any]
TABLES: Mapping[str, Callable[[int], tuple[tuple[int, ...], Callable[[Tensor], ScoreMod]]]] = {
    "slopes [H]": lambda length: (
        (HEADS,),
        lambda t: lambda s, b, h, q, k: s + t[h] * (k - q),
    ),
    "factors [H]": lambda length: (
        (HEADS,),
        lambda t: lambda s, b, h, q, k: s * t[h],
    ),
    "rows [H, L]": lambda length: (
        (HEADS, length),
        lambda t: lambda s, b, h, q, k: s * t[h, q],
    ),
    "keys [H, S]": lambda length: (
        (HEADS, length),
        lambda t: lambda s, b, h, q, k: s + t[h, k],
    ),
    "distances [H, L]": lambda length: (
        (HEADS, length),
        lambda t: lambda s, b, h, q, k: s + t[h, (q - k).abs()],
    ),
}
"""Purpose of the table -> its shape and the score mod that reads it."""


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def drawn(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


class Case:
    """Tensors of a call, and its function for each contender."""

    def __init__(self, name: str, length: int, width: int, device: torch.device) -> None:
        torch.manual_seed(0)
        shape, score_mod_of = TABLES[name](length)
        self.query, self.key, self.value = (
            drawn((BATCH, HEADS, length, width), device, torch.bfloat16) for _ in range(3)
        )
        self.dout = torch.randn_like(self.query)
        self.table = (torch.rand(shape, device=device) / length).requires_grad_()
        self.score_mod = score_mod_of(self.table)
        self.mask = anyflex.create_block_mask(causal, None, None, length, length, device=device)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.table

    def forward(self, contender: str) -> Tensor:
        q, k, v = self.query, self.key, self.value
        if contender == "torch.flex":
            length = q.shape[2]
            mask = torch_flex.create_block_mask(
                causal, None, None, length, length, device=q.device.type
            )
            flex = torch.compile(torch_flex.flex_attention, dynamic=False)
            out = flex(q, k, v, score_mod=self.score_mod, block_mask=mask)
        else:
            out = anyflex.flex_attention(
                q, k, v, score_mod=self.score_mod, block_mask=self.mask, backend=contender
            )
        assert isinstance(out, Tensor)
        return out

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves(), self.dout, retain_graph=True)


def error_of(name: str, contender: str, width: int, device: torch.device) -> float:
    """Root mean square of the errors of the table's gradient, by the root of its mean square."""
    case = Case(name, 512, width, device)
    found = case.gradients(case.forward(contender))[3].double()
    right = case.gradients(case.forward("reference"))[3].double()
    return ((found - right).square().mean() / right.square().mean()).sqrt().item()


def again(case: Case, out: Tensor, ready: object) -> tuple[Tensor, ...]:
    return case.gradients(out)


def measured(name: str, length: int, width: int, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of each contender's backward, one sample per round."""
    device = torch.device("cuda")
    case = Case(name, length, width, device)
    clock = clock_of(device)
    timed = {}
    for contender in CONTENDERS:
        out = case.forward(contender)
        timed[contender] = Timed(partial(again, case, out))
        clock.seconds(timed[contender], 3)
    found: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for turn in range(rounds):
        for place in range(len(CONTENDERS)):
            contender = CONTENDERS[(place + turn) % len(CONTENDERS)]
            found[contender].append(clock.seconds(timed[contender], 5) * 1e3)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no GPU that torch knows")
    device = torch.device("cuda")
    wrong = False
    report: dict[str, Any] = {
        "command": command_of("bench/learning_tables.py", arguments),
        **provenance(device),
        "length": chosen.length, "width": chosen.width, "errors": {}, "ms": {},
    }  # fmt: skip
    for name in TABLES:
        errors = {each: error_of(name, each, chosen.width, device) for each in CONTENDERS}
        wrong |= any(errors[each] > WRONG for each in CONTENDERS[:2])
        samples = measured(name, chosen.length, chosen.width, chosen.rounds)
        medians = {each: statistics.median(samples[each]) for each in CONTENDERS}
        report["errors"][name], report["ms"][name] = errors, samples
        said = ", ".join(
            f"{each} {medians[each]:.3f} ms ({medians[each] / medians['cuda']:.2f}; "
            f"error {errors[each]:.4f})"
            for each in CONTENDERS
        )
        print(f"{name}: {said}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
