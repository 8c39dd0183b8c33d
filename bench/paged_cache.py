"""Host time of a paged cache's step, and of appending to one layer.

    python bench/paged_cache.py [--sequences 256] [--device cpu]

A step of decoding gives one new token to each sequence. "same" asks for what the step before did,
"another order" for the sequences in another order each time, so that the request is read anew.
Prints the median, and the fastest tenth, of CPU time of one thread in microseconds; on a device
that is the time to launch, not to run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

import anyflex

__all__ = ["microseconds"]

LONGEST = 4096


def microseconds(call: Callable[[], object], calls: int = 500) -> str:
    """Return median and first decile of the CPU time of a call."""
    times = []
    for _ in range(calls):
        begin = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - begin) / 1000)
    return f"{statistics.median(times):8.1f} {sorted(times)[calls // 10]:8.1f}"


def measure(sequences: int, page: int, device: str) -> None:
    rng = random.Random(0)
    cache = anyflex.PagedKVCache(
        1,
        sequences * LONGEST // page,
        page,
        8,
        128,
        dtype=torch.bfloat16,
        slots=sequences,
        width=LONGEST // page,
        device=device,
    )
    slots = [cache.open() for _ in range(sequences)]
    cache.step([(slot, rng.randint(1, 900)) for slot in slots])
    wanted = [(slot, 1) for slot in slots]

    def in_another_order() -> None:
        rng.shuffle(wanted)

    shuffled = microseconds(in_another_order)
    print(f"page {page:3}  step, same           {microseconds(lambda: cache.step(wanted))}")

    def step_anew() -> None:
        in_another_order()
        cache.step(wanted)

    print(f"page {page:3}  step, another order  {microseconds(step_anew)}  shuffled in {shuffled}")
    step = cache.step(wanted)
    assert step is not None
    rows = torch.randn(sequences, 8, 128, dtype=torch.bfloat16, device=device)
    print(f"page {page:3}  append to a layer    ", end="")
    print(microseconds(lambda: cache.append(step, 0, rows, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("                              median fastest tenth, microseconds")
    for page in (16, 64, 256):
        measure(arguments.sequences, page, arguments.device)


if __name__ == "__main__":
    main()
