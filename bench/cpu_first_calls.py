"""Cost of the CPU backend before its kernels work: first calls of new mods, and small calls.

    python bench/cpu_first_calls.py [--cpu-time] [--json FILE]

On one thread. First calls: mods that no process has seen, with an empty disk cache, in a process
that has compiled one before (the very first also imports llvmlite); medians of MODS of them,
forward, without gradients and with: the latter compiles backward's derivatives too, and is shown
with its first backward. Small calls: B1 H1, 96
queries, 128 keys, head dim 64, float32, without mods, from the call to its end, and inside of the
native library; medians of batches. Exits with 1 if a limit isn't met.

Where other programs occupy the machine, `--cpu-time` counts what this thread spends. `--json`
writes the figures with commit, machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["LIMITS", "main"]

LIMITS: dict[str, float | None] = {
    "first call, compiled": 30e-3,
    "first call, interpreted": 2e-3,
    "with gradients, compiled": 30e-3,
    "with gradients, interpreted": 2e-3,
    "and backward, compiled": None,
    "and backward, interpreted": None,
    "small call, end to end": 60e-6,
    "small call, in the library": 45e-6,
}
"""Name -> limit in seconds; None: shown without a limit."""
MODS = 40
BATCHES, CALLS = 60, 50

Clock = Callable[[], int]
Step = Callable[..., Any]

STEPS: tuple[Step, ...] = (
    lambda s, h, q, k, t: 20 * torch.tanh(s / 20),
    lambda s, h, q, k, t: s + t[h] * (k - q),
    lambda s, h, q, k, t: s * torch.sigmoid(s),
    lambda s, h, q, k, t: torch.where(q >= k, s, s - 4),
    lambda s, h, q, k, t: s + torch.log1p((q - k).abs().float()),
    lambda s, h, q, k, t: s - t[k % 8] * 0.5,
    lambda s, h, q, k, t: torch.where((q // 16) == (k // 16), s, -torch.inf),
    lambda s, h, q, k, t: torch.exp2(-s.abs()) + s,
    lambda s, h, q, k, t: torch.clamp(s, -30.0, 30.0),
)


def new_mods() -> Iterator[Callable[..., Tensor]]:
    """Yield score mods of two to four steps, no two alike."""
    draw = random.Random(0)
    table = torch.linspace(0.1, 0.8, 8)
    seen = set()
    while True:
        chosen = tuple(draw.sample(range(len(STEPS)), draw.choice([2, 3, 4])))
        if chosen in seen:
            continue
        seen.add(chosen)

        def mod(
            s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, chosen: Any = chosen
        ) -> Tensor:
            for step in chosen:
                s = STEPS[step](s, h, q, k, table)
            return s

        yield mod


def first_calls(
    way: str, mods: Iterator[Callable[..., Tensor]], clock: Clock
) -> dict[str, list[float]]:
    """Seconds of each new mod's first call: without gradients, with, and with its backward."""
    import anyflex

    options = {"cpu": {"mods": way}}

    def call(mod: Callable[..., Tensor], query: Tensor) -> Tensor:
        return anyflex.flex_attention(
            query, query, query, mod, backend="cpu", kernel_options=options
        )

    @torch.no_grad()
    def forward() -> Iterator[float]:
        query = torch.randn(1, 2, 128, 64)
        # Imports llvmlite, and the modules that tracing and assembling need.
        call(lambda s, b, h, q, k: s * 3 + h, query)
        for mod in islice(mods, MODS):
            began = clock()
            call(mod, query)
            yield (clock() - began) * 1e-9

    def both() -> Iterator[tuple[float, float]]:
        query = torch.randn(1, 2, 128, 64, requires_grad=True)
        call(lambda s, b, h, q, k: s * 5 + h, query).sum().backward()
        for mod in islice(mods, MODS):
            began = clock()
            out = call(mod, query)
            called = clock()
            out.sum().backward()
            yield (called - began) * 1e-9, (clock() - began) * 1e-9

    plain, training = list(forward()), list(both())
    kind = {"jit": "compiled", "interpreter": "interpreted"}[way]
    return {
        f"first call, {kind}": plain,
        f"with gradients, {kind}": [first for first, _ in training],
        f"and backward, {kind}": [whole for _, whole in training],
    }


def small_calls(clock: Clock) -> tuple[list[float], list[float]]:
    """Seconds of a small call as the median of each batch: end to end, and in the library."""
    import anyflex
    from anyflex_cpu import library

    query, key = torch.randn(1, 1, 96, 64), torch.randn(1, 1, 128, 64)

    def batch() -> float:
        began = clock()
        for _ in range(CALLS):
            anyflex.flex_attention(query, key, key, backend="cpu")
        return (clock() - began) * 1e-9 / CALLS

    for _ in range(5):
        batch()
    whole = [batch() for _ in range(BATCHES)]

    loaded = library.load()
    plain = loaded.forward
    spent = 0

    def timed(arguments: int, error: int) -> int:
        nonlocal spent
        began = clock()
        status = plain(arguments, error)
        spent += clock() - began
        return status

    inside = []
    loaded.forward = timed
    try:
        for _ in range(BATCHES):
            spent = 0
            batch()
            inside.append(spent * 1e-9 / CALLS)
    finally:
        loaded.forward = plain
    return whole, inside


def main() -> None:
    parser = argparse.ArgumentParser(description="first calls and small calls of the CPU backend")
    parser.add_argument("--cpu-time", action="store_true", help="count what this thread spends")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    clock = time.thread_time_ns if arguments.cpu_time else time.perf_counter_ns
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ANYFLEX_CACHE_DIR"] = folder
        with torch.no_grad():
            whole, inside = small_calls(clock)
        mods = new_mods()
        found = {
            **first_calls("jit", mods, clock),
            **first_calls("interpreter", mods, clock),
            "small call, end to end": whole,
            "small call, in the library": inside,
        }
    print(f"clock: {'CPU time of this thread' if arguments.cpu_time else 'wall'}")
    missed = []
    figures = {}
    for name, limit in LIMITS.items():
        median = statistics.median(found[name])
        worst = max(found[name])
        unit, scale = ("ms", 1e3) if median >= 1e-3 else ("us", 1e6)
        held = limit is None or median <= limit
        missed += [] if held else [name]
        wanted = "no limit" if limit is None else f"limit {limit * scale:.0f}"
        print(
            f"{name:28} median {median * scale:6.2f} {unit}, worst {worst * scale:6.2f}, "
            f"{wanted}{'' if held else '  MISSED'}"
        )
        figures[name] = {"median": median, "worst": worst, "limit": limit}
    if arguments.json:
        from anyflex.bench.machine import command_of, provenance

        report = {
            "command": command_of("bench/cpu_first_calls.py"),
            **provenance(torch.device("cpu")),
            "clock": clock.__name__,
            "seconds": figures,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
