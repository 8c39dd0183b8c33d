"""A run as data: the schema is part of the documentation (docs/bench.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from anyflex.bench.case import BenchCase
from anyflex.bench.machine import provenance
from anyflex.bench.measure import Measurement

__all__ = ["SCHEMA", "make_report", "table_lines"]

SCHEMA = "anyflex-bench-1"

Report = dict[str, Any]


def make_report(
    cases: Sequence[BenchCase],
    measurements: Sequence[Measurement],
    device: torch.device,
    *,
    clock: str,
    command: str,
    preset: str | None,
    rounds: int,
    seconds: float,
) -> Report:
    """Return a run as plain data."""
    return {
        "schema": SCHEMA,
        "command": command,
        "preset": preset,
        **provenance(device),
        "clock": clock,
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "cases": [dataclasses.asdict(case) for case in cases],
        "measurements": [measured.to_dict() for measured in measurements],
    }


_HEAD = ("", "median ms", "range ms", "GFLOP/s", "KV GB/s", "x best peer", "first call s")


def table_lines(report: Report) -> list[str]:
    """Return the table that the command prints, a block for each case and direction."""
    machine = report["machine"]
    where = machine["device_name"] or f"{machine['cpu']}, {machine['threads']} threads"
    versions = report["versions"]
    lines = [
        f"{where}; torch {versions['torch']}, anyflex {versions['anyflex']}, commit "
        f"{report['commit'] or '-'}; {report['rounds']} rounds, {report['clock']}"
    ]
    rows = report["measurements"]
    for key in dict.fromkeys((row["case"], row["direction"]) for row in rows):
        case, direction = key
        block = [row for row in rows if (row["case"], row["direction"]) == key]
        lines += ["", f"{case}, {direction} ({block[0]['live_share']:.3f} of the pairs)"]
        cells = [_HEAD, *(_cells(row) for row in block)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
        for row, measured in zip(cells, (None, *block), strict=True):
            text = "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            if measured is not None and measured["status"] != "measured":
                text = f"{row[0].ljust(widths[0])}  {measured['status']}: {measured['detail']}"
            lines.append(f"  {text}".rstrip())
    return lines


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    name = row["contender"] + (" (peer)" if row["kind"] == "peer" else "")
    if row["status"] != "measured":
        return (name, *[""] * 6)
    ratio = row["ratio"]
    return (
        name,
        f"{row['median_ms']:.4g}",
        f"{row['min_ms']:.4g}-{row['max_ms']:.4g}",
        f"{row['gflops']:.4g}",
        f"{row['kv_gb_per_s']:.4g}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{row['first_call_s']:.2f}",
    )
