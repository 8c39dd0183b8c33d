"""Decoding over pages on one CPU thread beside dense decoding and vLLM's kernels.

    python bench/serving_cpu_targets.py [--vllm LIBRARY] [--rounds N] [--json FILE]

LIBRARY is one of the libraries in vLLM's wheel for CPUs (``vllm/_C_AVX2.abi3.so``), which is used
without the rest of vLLM. Contenders take turns; times are CPU time, so that other programs on the
machine count less, and ratios are medians of the rounds'. Exits with 1 if a row misses its target:
pages at 0.95 of dense decoding, twice as fast as vLLM, int8 rows 1.6 times as fast as unquantised
ones of the same type.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from serving_rows import Problem, Row, problem, sample_error
from torch import Tensor

import anyflex
from anyflex.bench.machine import provenance
from anyflex.paging.storage import STORAGES, quantised

__all__ = ["TARGETS", "main"]

TARGETS = {"dense": 0.95, "vLLM": 2.0, "plain": 1.6}
MOST_ERROR = {"": 0.01, "int8": 0.05}
CACHE_BYTES = 64 << 20
"""Bytes that are read between calls, so that no contender finds its keys in a cache."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTHS = ((1, 8192), (8, 2048), (32, 512), (128, 256))
ROWS = [
    Row(f"{sequences} x {keys}", "", ((1, keys),) * sequences, page=page, storage=storage)
    for sequences, keys in LENGTHS
    for page in (16, 32, 64, 256)
    for storage in ("", "int8")
    if storage == "" or page == 64
]


def packed(given: Problem) -> Callable[[], Tensor]:
    """A layer of a pass that has begun: what a pass needs once isn't in it."""
    assert given.pools is not None
    key, value = given.pools
    scales: dict[str, Tensor] = {}
    if given.row.storage:
        dtype = STORAGES[given.row.storage]
        assert dtype is not None
        (key, k_scale), (value, v_scale) = quantised(key, dtype), quantised(value, dtype)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    step = anyflex.Packed(
        given.q_offsets, given.kv_lengths, page_table=given.table, max_q=1, max_kv=given.max_kv
    ).begin()
    return lambda: anyflex.flex_attention_packed(
        given.query, key, value, step, enable_gqa=True, backend="cpu", **scales
    )


def dense(given: Problem) -> Callable[[], Tensor]:
    count, (heads, kv_heads), dim = len(given.row.lengths), given.row.heads, given.row.dim
    query = given.query.view(count, heads, 1, dim)
    key, value = (
        each.view(count, -1, kv_heads, dim).transpose(1, 2).contiguous()
        for each in (given.key, given.value)
    )
    return lambda: anyflex.flex_attention(
        query, key, value, enable_gqa=True, backend="cpu"
    ).view(given.query.shape)  # fmt: skip


def vllm(given: Problem) -> Callable[[], Tensor]:
    """Its cache has pages of 32 rows or a multiple, in an order of its own."""
    operations, row, dtype = torch.ops._C, given.row, given.query.dtype
    (heads, kv_heads), page = row.heads, row.page
    assert given.table is not None
    pages = sum(-(-keys // page) for _, keys in row.lengths)
    pools = [torch.zeros(pages, kv_heads, page, row.dim, dtype=dtype) for _ in range(2)]
    rows = [torch.arange(keys) for _, keys in row.lengths]
    places = torch.cat(
        [
            own[at // page] * page + at % page
            for own, at in zip(given.table.long(), rows, strict=True)
        ]
    )
    amx = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    kernels = "vec16" if page % 32 else "amx" if amx else "vec"
    operations.cpu_attn_reshape_and_cache(
        given.key, given.value, *pools, places, kernels, 1.0, 1.0, "auto"
    )
    plan = operations.get_scheduler_metadata(
        len(rows), heads, kv_heads, row.dim, given.kv_lengths, dtype, given.q_offsets, True, -1,
        kernels, True, None, "auto",
    )  # fmt: skip
    out = torch.empty_like(given.query)

    def layer() -> Tensor:
        operations.cpu_attention_with_kv_cache(
            given.query, *pools, out, given.q_offsets, given.kv_lengths, 1 / math.sqrt(row.dim),
            True, None, -1, given.table, 0.0, plan, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    return layer


def measure(row: Row, dtype: torch.dtype, rounds: int, with_vllm: bool) -> dict[str, Any]:
    """Return the report of a row."""
    given = problem(row, "cpu", dtype)
    contenders = {"pages": packed(given)}
    if row.storage:
        plain = problem(Row(row.name, "", row.lengths, page=row.page), "cpu", dtype)
        contenders["plain"] = packed(plain)
    else:
        contenders["dense"] = dense(given)
        if with_vllm:
            contenders["vLLM"] = vllm(given)
    errors = {
        name: sample_error(given, run()) for name, run in contenders.items() if name != "plain"
    }
    flush = torch.ones(CACHE_BYTES // 4)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            flush.sum()
            began = time.process_time_ns()
            run()
            times[name].append((time.process_time_ns() - began) / 1e3)
    name = f"{row.name}, page {row.page}, {str(dtype)[6:]} {row.storage}".strip()
    size = row.read_bytes * (1 if row.storage else dtype.itemsize) // (1 if row.storage else 2)
    return {"row": name, "storage": row.storage, "bytes": size, "us": times, "errors": errors}


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """How many times as long each contender takes as ours over pages."""
    own = report["us"]["pages"]
    return {
        name: statistics.median(other / mine for other, mine in zip(times, own, strict=True))
        for name, times in report["us"].items()
        if name != "pages"
    }


def shortfalls(reports: list[dict[str, Any]]) -> list[str]:
    """Return a line for each target that is missed."""
    lines = []
    for report in reports:
        for name, found in ratios(report).items():
            if found < TARGETS[name]:
                lines.append(f"{report['row']}: {found:.2f} of {name}, wanted {TARGETS[name]}")
        for name, error in report["errors"].items():
            if error > MOST_ERROR[report["storage"]]:
                lines.append(f"{report['row']}: {name} has an error of {error:.2g}")
    return lines


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.vllm is not None:
        torch.ops.load_library(str(args.vllm))
    reports = []
    print("| row | pages, us | GB/s | dense | vLLM | plain |\n|---|---|---|---|---|---|")
    for dtype in args.dtypes.split(","):
        for row in ROWS:
            report = measure(row, DTYPES[dtype], args.rounds, args.vllm is not None)
            reports.append(report)
            us, found = statistics.median(report["us"]["pages"]), ratios(report)
            cells = [report["row"], f"{us:.0f}", f"{report['bytes'] / us / 1e3:.1f}"]
            cells += [f"{found[name]:.2f}" if name in found else "" for name in TARGETS]
            print(f"| {' | '.join(cells)} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(provenance(torch.device("cpu")) | {"rows": reports}))
    missed = shortfalls(reports)
    print("\nwhat misses its target:" if missed else "\nall reached")
    print("\n".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
