"""What `triton_compiles.py` found, by Triton: results/triton_compiles.json, and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from anyflex.bench.machine import command_of, source_commit

__all__ = ["ENTRY", "record", "recorded"]

ENTRY = ("target", "dtype", "dim", "kernel", "pattern", "tiles", "warps", "stages")
"""What tells kernels apart."""
COMPILED = ENTRY[:5]
"""What tells them apart before they have a configuration."""
RESULTS = Path(__file__).parent / "results" / "triton_compiles.json"


def recorded(version: str) -> dict[tuple[object, ...], Mapping[str, Any]] | None:
    """What was recorded with this Triton, by `ENTRY`."""
    kept = json.loads(RESULTS.read_text())
    if version not in kept:
        return None
    return {tuple(one[name] for name in ENTRY): one for one in kept[version]["kernels"]}


def record(
    version: str, kernels: Sequence[Mapping[str, Any]], seconds: float, *, whole: bool
) -> None:
    """Write the results of this Triton and the table of all.

    Args:
        whole: they are all that there are; else others stay, but those of the same kernel, type,
            head dim and pattern.
    """
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = {} if whole else kept.get(version, {})
    found = {tuple(one[name] for name in COMPILED) for one in kernels}
    others = [
        one
        for one in before.get("kernels", ())
        if tuple(one[name] for name in COMPILED) not in found
    ]
    run = {
        "command": command_of("bench/triton_compiles.py"),
        "commit": source_commit(),
        "torch": torch.__version__,
        "seconds": round(seconds),
    }
    kept[version] = {
        "runs": [*before.get("runs", ()), run],
        "kernels": _ordered([*others, *kernels]),
    }
    kept = dict(sorted(kept.items()))
    # A kernel a line.
    text = json.dumps(kept, separators=(",", ":"))
    text = text.replace('{"target"', '\n{"target"').replace("}},", "}},\n")
    RESULTS.write_text(text + "\n")
    RESULTS.with_suffix(".md").write_text(written(kept))


def _ordered(kernels: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By target and type, in the order of their first, then by head dim."""
    places = {name: list(dict.fromkeys(one[name] for one in kernels)) for name in COMPILED[:2]}

    def place(one: Mapping[str, Any]) -> tuple[int, ...]:
        return (*(places[name].index(one[name]) for name in COMPILED[:2]), one["dim"])

    return sorted(kernels, key=place)


def written(kept: Mapping[str, Any]) -> str:
    """The table, in Markdown: a row a kernel, two columns a Triton."""
    lines = [
        "# What Triton's compilers make of the kernels' table",
        "",
        "Without a GPU, by `python bench/triton_compiles.py --record`, with each Triton:",
        "registers of a thread, then bytes of them that are kept in memory (spills). In brackets,",
        "where any are: how many instructions move them in each innermost loop with products. Of",
        "forward's loops the first is that of full blocks, the second that of others; the last",
        "runs only where a value isn't finite.",
        "",
    ]
    versions = list(kept)
    by_entry: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for version in versions:
        for one in kept[version]["kernels"]:
            by_entry.setdefault(tuple(str(one[name]) for name in ENTRY), {})[version] = one
    columns = " | ".join(f"triton {version} | shared, KiB" for version in versions)
    lines.append(
        f"| target | type | head dim | kernel | pattern | tile | warps | stages | {columns} |"
    )
    lines.append("|" + "---|" * (8 + 2 * len(versions)))
    for entry, ones in by_entry.items():
        cells = list(entry)
        for version in versions:
            one = ones.get(version)
            if one is None:
                cells += ["", ""]
                continue
            cell = f"{one['registers']}, {one['spilled']}"
            if one["spilled"] and one["loops"]:
                cell += f" ({', '.join(str(loop['spills']) for loop in one['loops'])})"
            cells += [cell, f"{one['shared'] / 1024:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
