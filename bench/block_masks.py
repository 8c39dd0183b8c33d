"""Cost of building block masks, beside torch's `create_block_mask`.

    python bench/block_masks.py [--torch] [--json FILE]

One thread; CPU time, median of nine builds after one that is not counted, tracing and every table
included. Memory is the peak of torch's allocations during a build, without captured tensors.
Permuted document ids are also measured against sorted ones, in turns. Exits with 1 if a mask is
above its limits, or permuted ids are slower than sorted ones by more than the noise. With --torch,
torch's figures are taken too where its mask fits into memory: CPU time of one build in a fresh
process and the growth of its peak resident size (minutes, gigabytes).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CASES", "COMPARED", "main", "mask_of"]

ROUNDS = 9
SHORT, LONG = 1 << 14, 1 << 20


def document_ids(length: int, count: int) -> Tensor:
    """Return ids int64 [length] of `count` documents of random lengths."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(length - 1, generator=generator)[: count - 1] + 1
    begins = torch.zeros(length, dtype=torch.int64)
    begins[cuts] = 1
    return begins.cumsum(0)


def mask_of(name: str, length: int) -> Callable[..., Any]:
    """Return the mask mod of a case."""
    if name == "causal":
        return lambda b, h, q, k: q >= k
    if name == "window 1024":
        return lambda b, h, q, k: (q >= k) & (q - k < 1024)
    if name == "prefix 10k":
        return lambda b, h, q, k: (k < 10000) | (q >= k)
    if name == "dilated by 8, causal":
        return lambda b, h, q, k: (q >= k) & ((q - k) % 8 == 0)
    if name == "neighbourhood 13 x 13":
        side = 1 << ((length.bit_length() - 1) // 2)
        rows = length // side - 7

        def near(b: Any, h: Any, q: Any, k: Any) -> Any:
            row = ((q // side).clamp(6, rows) - k // side).abs() <= 6
            return row & (((q % side).clamp(6, side - 7) - k % side).abs() <= 6)

        return near
    if name == "window a head, 32 heads":
        windows = torch.arange(32) * 123 + 128
        return lambda b, h, q, k: (q >= k) & (q - k < windows[h])
    if name == "decode, 256 requests":
        lengths = torch.arange(256) * 512 + 1
        return lambda b, h, q, k: k < lengths[b]
    ids = document_ids(length, 2000)
    if name == "2000 documents permuted, causal":
        ids = torch.randperm(2000, generator=torch.Generator().manual_seed(1))[ids]
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


DOCUMENTS, PERMUTED = "2000 documents, causal", "2000 documents permuted, causal"
DECODE = "decode, 256 requests"

CASES: tuple[tuple[str, tuple[int, int, int, int], float | None, float | None], ...] = (
    (DOCUMENTS, (1, 1, SHORT, SHORT), 4.0, 2.0),
    (PERMUTED, (1, 1, SHORT, SHORT), 4.0, 2.0),
    ("causal", (1, 1, SHORT, SHORT), 4.0, 2.0),
    (DECODE, (256, 1, 1, 1 << 17), 5.0, None),
    ("causal", (1, 1, LONG, LONG), 50.0, 32.0),
    ("window 1024", (1, 1, LONG, LONG), 50.0, 32.0),
    ("prefix 10k", (1, 1, LONG, LONG), 50.0, 32.0),
    (DOCUMENTS, (1, 1, LONG, LONG), 50.0, 32.0),
    (PERMUTED, (1, 1, LONG, LONG), 50.0, 32.0),
    ("dilated by 8, causal", (1, 1, LONG, LONG), None, None),
    ("neighbourhood 13 x 13", (1, 1, 1 << 17, 1 << 17), None, None),
    ("window a head, 32 heads", (1, 32, 1 << 17, 1 << 17), None, None),
)
"""Mask, (B, H, Q, KV), limit in ms, limit in MiB."""

COMPARED: tuple[tuple[str, str, tuple[int, int, int, int], float], ...] = tuple(
    (PERMUTED, DOCUMENTS, (1, 1, length, length), 1.05) for length in (SHORT, LONG)
)
"""Mask, the mask that it must be as fast as, (B, H, Q, KV), and limit of the ratio of their times:
1 plus the difference of medians of equal masks."""

TURNS = 101
"""Number of builds of each of two masks that are compared."""

TORCH_ELEMENTS = 1 << 28
"""Maximum number of elements of torch's mask: above, it takes more than 2.5 GiB and is not
built."""

TORCH_PROGRAM = """
import json, resource, sys
import torch
sys.path.insert(0, {folder!r})
from block_masks import mask_of
from torch.nn.attention.flex_attention import create_block_mask
torch.set_num_threads(1)
name, sizes = {name!r}, {sizes!r}
mod = mask_of(name, sizes[3])
def used():
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime, use.ru_maxrss / 1024
before = used()
create_block_mask(mod, *sizes, device="cpu")
after = used()
print(json.dumps([(after[0] - before[0]) * 1e3, after[1] - before[1]]))
"""


def peak_memory(work: Callable[[], object]) -> float:
    """Return the peak of torch's allocations on the CPU during `work`, in MiB above the start."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    results = profile.kineto_results
    changes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return peak / 2**20


def measure(name: str, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """Return the median and range of ms, MiB and the number of runs of a case."""
    from anyflex import create_block_mask

    mod = mask_of(name, sizes[3])
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.process_time()
        mask = create_block_mask(mod, *sizes)
        times.append((time.process_time() - begin) * 1e3)
    return {
        "ms": statistics.median(times[1:]),
        "ms_range": [min(times[1:]), max(times[1:])],
        "mib": peak_memory(lambda: create_block_mask(mod, *sizes)),
        "runs": int(mask.offsets[-1, -1, -1]),
    }


def compare(names: tuple[str, str], sizes: tuple[int, int, int, int]) -> tuple[float, float]:
    """Return the median ms of two masks that are built in turns, each first as often."""
    from anyflex import create_block_mask

    mods = [mask_of(name, sizes[3]) for name in names]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS + 1):
        for place in (turn % 2, 1 - turn % 2):
            begin = time.process_time()
            create_block_mask(mods[place], *sizes)
            times[place].append((time.process_time() - begin) * 1e3)
    first, second = (statistics.median(taken[1:]) for taken in times)
    return first, second


def measure_torch(name: str, sizes: tuple[int, int, int, int]) -> tuple[float, float] | None:
    """Return torch's ms and MiB, or None where its mask is too large."""
    batch, heads, *lengths = sizes
    rows, columns = (-(-length // 128) * 128 for length in lengths)  # torch pads to whole blocks
    if batch * heads * rows * columns > TORCH_ELEMENTS:
        return None
    folder = os.path.dirname(os.path.abspath(__file__))
    program = TORCH_PROGRAM.format(folder=folder, name=name, sizes=sizes)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    milliseconds, mebibytes = json.loads(done.stdout.splitlines()[-1])
    return milliseconds, mebibytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch", action="store_true", help="measure torch too")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, failed = [], False
    for name, sizes, limit_ms, limit_mib in CASES:
        found = measure(name, sizes)
        row = {"mask": name, "sizes": sizes, **found, "limit_ms": limit_ms, "limit_mib": limit_mib}
        if options.torch:
            theirs = measure_torch(name, sizes)
            row["torch_ms"], row["torch_mib"] = theirs or (None, None)
        slow = limit_ms is not None and found["ms"] > limit_ms
        large = limit_mib is not None and found["mib"] > limit_mib
        failed = failed or slow or large
        rows.append(row)
        remark = ""
        if row.get("torch_ms"):
            remark = f"  torch {row['torch_ms']:.0f} ms, {row['torch_mib']:.0f} MiB"
        if slow or large:
            remark += "  ABOVE ITS LIMIT"
        print(
            f"{name:32} {'x'.join(map(str, sizes)):22} {found['ms']:8.2f} ms {found['mib']:7.2f} "
            f"MiB {found['runs']:7} runs{remark}",
            flush=True,
        )
    ratios = []
    for name, other, sizes, limit in COMPARED:
        ms, other_ms = compare((name, other), sizes)
        ratio = ms / other_ms
        failed = failed or ratio > limit
        ratios.append(
            {
                "mask": name,
                "to": other,
                "sizes": sizes,
                "ms": ms,
                "to_ms": other_ms,
                "ratio": ratio,
                "limit": limit,
            }
        )
        remark = "  ABOVE ITS LIMIT" if ratio > limit else ""
        print(
            f"{name:32} {'x'.join(map(str, sizes)):22} {ms:8.2f} ms {ratio:7.3f} of the time of "
            f"{other}{remark}",
            flush=True,
        )
    if options.json:
        from anyflex.bench.machine import command_of, provenance

        report = {
            "command": command_of("bench/block_masks.py"),
            **provenance(torch.device("cpu")),
            "rows": rows,
            "ratios": ratios,
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
