"""Versions of the packages beside each other, each in processes of its own that take turns.

    python bench/versions_in_turns.py [--rounds 5] [--json FILE] before=DIR after=DIR ...
        -- --preset h200-plain --backend cuda.triton

NAME=DIR: the entry that is put first on PYTHONPATH, a folder with the packages of a version as
`pip install --target` makes it, or several with the path separator between. What follows `--` goes
to `anyflex bench`, whose check before each row counts here too, and whose peers and other backends
are timed with each version. Every second round the versions run the other way round, so that a GPU
that warms up favours none. Prints a table in Markdown: the first version's median of medians, and
of each other version the ratio to it, of the medians and the range of the rounds' ratios: a change
is told from noise by that range. Exits with 1 if a run fails or the versions don't measure the
same rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

__all__ = ["main"]

Row = tuple[str, str, str]
"""Case, direction, contender."""


class RunFailed(Exception):
    """A version's run failed; the message is its output."""


def medians_of(folders: str, arguments: Sequence[str]) -> dict[Row, float]:
    """Milliseconds of one run of `anyflex bench` with the version in `folders`."""
    paths = [str(Path(path).resolve()) for path in folders.split(os.pathsep)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "anyflex", "bench", *arguments, "--json", str(report)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # Runs in an empty folder, so that nothing in the current one is imported.
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RunFailed(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        measured = json.loads(report.read_text())["measurements"]
    return {
        (row["case"], row["direction"], row["contender"]): row["median_ms"]
        for row in measured
        if row["status"] == "measured"
    }


def table_of(times: Mapping[str, Sequence[Mapping[Row, float]]]) -> Iterator[str]:
    """Lines of the table.

    Args:
        times: of each version by name, a round each. The others are compared with the first.
    """
    first, *others = times
    yield f"| case | direction | contender | {first}, ms | " + " | ".join(others) + " |"
    yield "|---" * (4 + len(others)) + "|"
    for row in times[first][0]:
        before = [run[row] for run in times[first]]
        cells = []
        for name in others:
            now = [run[row] for run in times[name]]
            ratios = [b / a for a, b in zip(before, now, strict=True)]
            ratio = median(now) / median(before)
            cells.append(f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        yield "| " + " | ".join([*row, f"{median(before):.3f}", *cells]) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all rounds' medians")
    options = parser.parse_args(given[:split])
    versions = dict(version.partition("=")[::2] for version in options.versions)
    twice = len(versions) < len(options.versions)
    if len(versions) < 2 or twice or not all(map(all, versions.items())) or options.rounds < 1:
        parser.error("two or more versions, NAME=DIR with names of their own, and 1 round or more")
    for folders in versions.values():
        for folder in folders.split(os.pathsep):
            if not Path(folder).is_dir():
                parser.error(f"{folder} is no folder")
    times: dict[str, list[dict[Row, float]]] = {name: [] for name in versions}
    for number in range(options.rounds):
        for name in list(versions)[:: -1 if number % 2 else 1]:
            try:
                times[name].append(medians_of(versions[name], given[split + 1 :]))
            except RunFailed as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                return 1
    rows = {frozenset(run) for runs in times.values() for run in runs}
    if len(rows) > 1:
        print("the versions, or rounds, don't measure the same rows", file=sys.stderr)
        return 1
    print("\n".join(table_of(times)))
    if options.json is not None:
        written = {
            name: [{" | ".join(row): ms for row, ms in run.items()} for run in runs]
            for name, runs in times.items()
        }
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
