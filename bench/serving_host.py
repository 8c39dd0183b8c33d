"""Host time of a decode step of 256 sequences over a paged cache: books, places, packed call.

Usage: python bench/serving_host.py [--calls N] [--rounds N] [--json FILE]

One thread, float32, kernels too small to count: one KV head of 8 numbers, a null backend. N are
the steps of a round, of eight layers each. Figures are medians over a round, of which the best
counts. Exits 1 when a limit is not met on a reference machine: 50 us for `step`, which begins the
pass, and 20 us for a layer's packed call before its kernel starts, or for its append; 40 us for
the places of the new rows and 400 us for the blocks of the mask, both once a step.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time

import torch
from host_time import run

import anyflex

SEQUENCES, PAGE, LAYERS = 256, 16, 8
LIMITS_US = {
    "step": 50.0,
    "places of the new rows": 40.0,
    "append of a layer": 20.0,
    "blocks of the mask, once a step": 400.0,
    "packed call of a layer": 20.0,
}


def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return q_idx >= kv_idx


def measure(steps: int) -> dict[str, float]:
    """Medians in us. Sequences begin at different lengths, so that each step needs some pages."""
    width = (steps + 2 * PAGE) // PAGE + 1
    cache = anyflex.PagedKVCache(
        LAYERS, SEQUENCES * width, PAGE, 1, 8, slots=SEQUENCES, width=width, dtype=torch.float32
    )
    slots = [cache.open() for _ in range(SEQUENCES)]
    cache.step([(slot, 1 + slot % PAGE) for slot in slots])
    wanted, rows = [(slot, 1) for slot in slots], torch.randn(SEQUENCES, 1, 8)
    reserving, appending, attending = [], [], []
    for _ in range(steps):
        begin = time.perf_counter_ns()
        step = cache.step(wanted)
        clock = [time.perf_counter_ns()]
        for layer in range(LAYERS):
            cache.append(step, layer, rows, rows)
            clock.append(time.perf_counter_ns())
            cache.attend(step, layer, rows, mask_mod=causal)
            clock.append(time.perf_counter_ns())
        took = [(end - start) / 1000 for start, end in itertools.pairwise(clock)]
        reserving.append((clock[0] - begin) / 1000)
        appending.append(took[::2])
        attending.append(took[1::2])
    append, attend = (
        statistics.median(itertools.chain.from_iterable(later for _, *later in each))
        for each in (appending, attending)
    )
    return {
        "step": statistics.median(reserving),
        "places of the new rows": statistics.median(first for first, *_ in appending) - append,
        "append of a layer": append,
        "blocks of the mask, once a step": statistics.median(f for f, *_ in attending) - attend,
        "packed call of a layer": attend,
    }


if __name__ == "__main__":
    sys.exit(run(__doc__, measure, LIMITS_US, calls=500, rounds=3))
