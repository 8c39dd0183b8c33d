"""Record of what `triton_compiles.py` found: the table results/triton_compiles.md.

The table is all that is kept in the repository and all that `--compare` reads. What a run found
besides, such as each loop's instructions, is written to build/results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anyflex.bench.machine import command_of, source_commit

__all__ = ["ENTRY", "Table", "entry_of", "record", "recorded"]

ENTRY = ("target", "dtype", "dim", "kernel", "pattern", "tiles", "warps", "stages")
"""Fields of a kernel that identify it."""
COMPILED = ENTRY[:5]
"""Fields that identify a kernel before it has a configuration."""
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "triton_compiles.md"
SAMPLES = ROOT / "build" / "results"
"""Folder of whole results; git ignores it."""

Entry = tuple[str, ...]

HEAD = """# What Triton's compilers make of the kernels' table

Without a GPU, by `python bench/triton_compiles.py --record`, with each Triton:
registers of a thread, then bytes of them that are kept in memory (spills). In brackets,
where any are: how many instructions move them in each innermost loop with products. Of
forward's loops the first is that of full blocks, the second that of others; the last
runs only where a value isn't finite. `--compare` holds later compiles to these spills.
"""
TITLES = "| target | type | head dim | kernel | pattern | tile | warps | stages |"
RUNS = "## Runs"


@dataclass
class Table:
    """Contents of the page.

    Args:
        versions: of Triton, in the order of the columns.
        rows: by entry, then by version: the two cells, registers and spills, and shared KiB.
        runs: one line for each run that is recorded, by version.
    """

    versions: list[str] = field(default_factory=list)
    rows: dict[Entry, dict[str, tuple[str, str]]] = field(default_factory=dict)
    runs: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Table:
        """Parse a page that `written` has made."""
        table = cls()
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith(TITLES):
                table.versions = [cell.removeprefix("triton ") for cell in cells[8::2]]
            elif line.startswith("| "):
                found = zip(table.versions, cells[8::2], cells[9::2], strict=True)
                row = {version: (cell, shared) for version, cell, shared in found if cell}
                table.rows[tuple(cells[:8])] = row
            elif line.startswith("- triton "):
                version = line.removeprefix("- triton ").partition(":")[0]
                table.runs.setdefault(version, []).append(line)
        return table

    def written(self) -> str:
        """The page, in Markdown: a row a kernel, two columns a Triton."""
        columns = "".join(f" triton {version} | shared, KiB |" for version in self.versions)
        lines = [HEAD, TITLES + columns, "|" + "---|" * (8 + 2 * len(self.versions))]
        for entry, row in self.rows.items():
            cells = [*entry]
            for version in self.versions:
                cells += row.get(version, ("", ""))
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", RUNS, ""]
        lines += [line for version in self.versions for line in self.runs.get(version, ())]
        return "\n".join(lines) + "\n"

    def order(self) -> None:
        """Sort rows by target and type, in the order of their first row, then by head dim."""
        places: list[list[str]] = [
            list(dict.fromkeys(entry[part] for entry in self.rows)) for part in range(2)
        ]

        def place(entry: Entry) -> tuple[int, ...]:
            return (*(places[part].index(entry[part]) for part in range(2)), int(entry[2]))

        self.rows = {entry: self.rows[entry] for entry in sorted(self.rows, key=place)}
        self.versions.sort(key=lambda version: [int(part) for part in version.split(".")])


def entry_of(kernel: Mapping[str, Any]) -> Entry:
    """The fields of `ENTRY`, as the table writes them."""
    return tuple(str(kernel[name]) for name in ENTRY)


def recorded(version: str) -> dict[Entry, int] | None:
    """Bytes that each kernel spilled with this Triton; None if nothing is recorded of it."""
    table = Table.read(RESULTS.read_text(encoding="utf-8"))
    if version not in table.versions:
        return None
    cells = {entry: row[version][0] for entry, row in table.rows.items() if version in row}
    return {entry: int(cell.split(", ")[1].split(" ")[0]) for entry, cell in cells.items()}


def record(
    version: str, kernels: Sequence[Mapping[str, Any]], seconds: float, *, whole: bool
) -> None:
    """Write the results of this Triton into the table, and all of them to `SAMPLES`.

    Args:
        whole: they are all that there are; else others stay, but those of the same kernel, type,
            head dim and pattern.
    """
    table = Table()
    if RESULTS.exists():
        table = Table.read(RESULTS.read_text(encoding="utf-8"))
    if version not in table.versions:
        table.versions.append(version)
    replaced = {entry_of(kernel)[: len(COMPILED)] for kernel in kernels}
    for entry, row in table.rows.items():
        if whole or entry[: len(COMPILED)] in replaced:
            row.pop(version, None)
    for kernel in kernels:
        cells = (_cell(kernel), f"{kernel['shared'] / 1024:.0f}")
        table.rows.setdefault(entry_of(kernel), {})[version] = cells
    table.rows = {entry: row for entry, row in table.rows.items() if row}
    run = (
        f"- triton {version}: `{command_of('bench/triton_compiles.py')}`, commit "
        f"{source_commit()}, torch {torch.__version__}, {seconds:.0f} s"
    )
    table.runs[version] = [*([] if whole else table.runs.get(version, ())), run]
    table.order()
    RESULTS.write_text(table.written(), encoding="utf-8")
    SAMPLES.mkdir(parents=True, exist_ok=True)
    samples = json.dumps({"run": run, "kernels": list(kernels)}, indent=1)
    (SAMPLES / f"triton_compiles_{version}.json").write_text(samples + "\n", encoding="utf-8")


def _cell(kernel: Mapping[str, Any]) -> str:
    cell = f"{kernel['registers']}, {kernel['spilled']}"
    if kernel["spilled"] and kernel["loops"]:
        cell += f" ({', '.join(str(loop['spills']) for loop in kernel['loops'])})"
    return cell
