"""Tables and counts of docs/speed, by the name that a page's marker gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scripts.speed_pages import results
from scripts.speed_pages.results import PEERS, GpuRow

__all__ = ["PAGES", "TABLES"]

PAGES = tuple(
    Path(__file__).resolve().parents[2] / "docs" / "speed" / f"{name}.md"
    for name in ("nvidia", "cpu", "apple")
)


def hopper_counts() -> str:
    """Say how many rows anyflex is the fastest in, and where it is furthest behind."""
    lines = []
    for page, backend in (
        ("h200_cuda.md", "cuda"),
        ("h100_cuda.md", "cuda"),
        ("h200_triton.md", "cuda.triton"),
    ):
        rows = results.gpu_rows(page, backend)
        machine = results.gpu_origin(page).machine.removeprefix("one ")
        ahead = sum(row.fastest[1] >= 1 for row in rows)
        mean = math.exp(sum(math.log(row.fastest[1]) for row in rows) / len(rows))
        last = min(rows, key=lambda row: row.fastest[1])
        lines.append(
            f"- `{backend}` on an {machine}: as fast as the fastest peer or faster in {ahead} of "
            f"{len(rows)} rows; geometric mean {mean:.2f}; least {last.fastest[1]:.2f}, "
            f"{last.direction} of {last.case}, where {PEERS[last.fastest[0]]} is faster.\n"
        )
    return "".join(lines)


def hopper_rows() -> str:
    """List every row of `cuda`: time, fastest peer and ratio, on both GPUs."""
    h100 = {(row.case, row.direction): row for row in results.gpu_rows("h100_cuda.md")}
    rows = (
        (row.case, row.direction, *_measured(row), *_measured(h100[row.case, row.direction]))
        for row in results.gpu_rows("h200_cuda.md")
    )
    return _table(
        "case, direction, H200: ms, fastest peer, x, H100: ms, fastest peer, x".split(", "), rows
    )


def triton_rows() -> str:
    """List every row of `cuda.triton`."""
    rows = (
        (row.case, row.direction, *_measured(row), f"{row.peers['torch.flex']:.2f}")
        for row in results.gpu_rows("h200_triton.md", "cuda.triton")
    )
    head = "case, direction, ms, fastest peer, x, x torch flex on Triton".split(", ")
    return _table(head, rows)


def _measured(row: GpuRow) -> tuple[str, str, str]:
    peer, ratio = row.fastest
    return f"{row.milliseconds:.3f}", PEERS[peer], f"{ratio:.2f}"


def serving_rows() -> str:
    """List every row of packed sequences and pages."""
    rows = (
        (
            row.case,
            row.shape,
            f"{row.microseconds:.1f}",
            f"{row.gb_per_s:.0f}",
            *(("", "") if row.fastest is None else (row.fastest[0], f"{row.fastest[1]:.2f}")),
            f"{row.ratios['cuda, dense']:.2f}" if "cuda, dense" in row.ratios else "",
            f"{row.ratios['cuda.triton']:.2f}" if "cuda.triton" in row.ratios else "",
        )
        for row in results.serving_rows("h200_serving.json")[1]
    )
    head = "sequences, heads/dim and page, us, GB/s, fastest peer, x, x dense, x `cuda.triton`"
    return _table(head.split(", "), rows)


def gpu_first_calls() -> str:
    """List a new mod's first forward and backward, in milliseconds."""
    _, ours = results.gpu_first_calls("h200_cuda_first_calls.json")
    _, portable = results.gpu_first_calls("h200_triton_first_calls.json")
    rows = (
        (state, *(f"{seconds * 1e3:.0f}" for seconds in (*ours[state], *portable[state])))
        for state in ours
    )
    head = "process and caches, `cuda`: forward ms, backward, `cuda.triton`: forward ms, backward"
    return _table(head.split(", "), rows)


def cpu_counts() -> str:
    """Say each processor's range of group means, and its rows that are slower than a peer."""
    lines = []
    for cpu in results.CPUS:
        groups = results.cpu_groups(cpu)
        low, high = (end(mean for mean, _ in groups.values()) for end in (min, max))
        least, name = min((least, name) for name, (_, least) in groups.items())
        behind = sum(least < 1 for _, least in groups.values())
        lines.append(
            f"- {cpu.name}: {len(groups)} groups, means {low:.2f} to {high:.2f}; the least row "
            f"{least:.2f}, {name}; groups with a row where a peer is faster: {behind}.\n"
        )
    return "".join(lines)


def cpu_groups() -> str:
    """List each group's mean and least row on each processor."""
    groups = {cpu: results.cpu_groups(cpu) for cpu in results.CPUS}
    names = max(groups.values(), key=len)
    rows = (
        (
            name,
            *(
                f"{each[name][0]:.2f}, {each[name][1]:.2f}" if name in each else ""
                for each in groups.values()
            ),
        )
        for name in names
    )
    return _table(["mean, least row", *(cpu.name for cpu in groups)], rows)


def cpu_first_calls() -> str:
    """List first calls of the CPU backend, and the first call that torch compiles."""
    _, found = results.cpu_first_calls()
    _, torch, reference = results.torch_first_calls()
    rows = [
        ("first call of a process, causal and ALiBi: torch compiles C++", _time(torch), "none"),
        ("the same, anyflex's reference backend", _time(reference), "none"),
        *(
            (f"{_named(name)}, `cpu`", _time(median), "none" if limit is None else _time(limit))
            for name, (median, limit) in found.items()
        ),
    ]
    return _table(["call", "median", "limit"], rows)


def _named(name: str) -> str:
    for short, long in (
        ("first call", "a new mod's first call"),
        ("with gradients", "a new mod's first call that records gradients"),
        ("and backward", "the same with its first backward"),
    ):
        if name.startswith(short):
            return name.replace(short, long, 1)
    return name


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def block_masks() -> str:
    """List what block masks take, with torch's where it was taken."""
    _, masks = results.block_masks()
    rows = []
    for mask in masks:
        batch, heads, queries, keys = mask["sizes"]
        torch = ("not measured",) * 2
        if mask["torch_ms"] is not None:
            torch = (f"{mask['torch_ms']:.0f}", f"{mask['torch_mib']:.0f}")
        size = f"B{batch} H{heads} {queries} x {keys}"
        rows.append((mask["mask"], size, f"{mask['ms']:.2f}", f"{mask['mib']:.2f}", *torch))
    head = "mask, size, anyflex: ms, MiB, torch: ms, MiB".split(", ")
    return _table(head, rows)


def lengths_128() -> str:
    return _gpu_lengths(128)


def lengths_64() -> str:
    return _gpu_lengths(64)


def _gpu_lengths(width: int) -> str:
    rows = []
    for row in results.gpu_rows("h200_cuda.md"):
        plain = row.plain
        if plain is None or plain.width != width:
            continue
        rates = (f"{plain.teraflops / row.peers[peer]:.0f}" for peer in PEERS)
        rows.append((row.case, row.direction, f"{plain.teraflops:.0f}", *rates))
    return _table(["case, TFLOP/s", "direction", "anyflex, `cuda`", *PEERS.values()], rows)


def cpu_lengths() -> str:
    """List the rates of `cpu_lengths.svg`."""
    _, found = results.cpu_lengths()
    rows = [
        (
            panel,
            str(length),
            *(
                f"{rates[name][length]:.1f}" if name in rates else "doesn't take it"
                for name in results.CONTENDERS.values()
            ),
        )
        for panel, rates in found.items()
        for length in sorted(next(iter(rates.values())))
    ]
    return _table(["GFLOP/s", "S", *results.CONTENDERS.values()], rows)


def metal_shares() -> str:
    """List the cost model's bounds."""
    rows = []
    for dtype, kernels in results.metal_shares().items():
        for kernel, shares in kernels.items():
            rows.append((dtype, kernel, *(f"{share:.0f} %" for share in shares.values())))
    widths = [str(width) for width in next(iter(kernels.values()))]
    return _table(["type", "kernel", *(f"head dim {width}" for width in widths)], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


TABLES: dict[str, Callable[[], str]] = {
    "block_masks": block_masks,
    "cpu_counts": cpu_counts,
    "cpu_first_calls": cpu_first_calls,
    "cpu_groups": cpu_groups,
    "cpu_lengths": cpu_lengths,
    "gpu_first_calls": gpu_first_calls,
    "hopper_counts": hopper_counts,
    "hopper_rows": hopper_rows,
    "lengths_128": lengths_128,
    "lengths_64": lengths_64,
    "metal_shares": metal_shares,
    "serving_rows": serving_rows,
    "triton_rows": triton_rows,
}
"""Function that makes each table, by the name of its marker."""
