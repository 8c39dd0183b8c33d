"""Cost of finding plugins: `anyflex.registry.discovery.scan` in a fresh process, over folders of
30, 300 and 1000 made-up distributions.

    python bench/registry_scan.py [--json]

Half of the distributions have other entry points (console scripts), one in fifty is a plugin,
and each has metadata of a usual length. Every figure is the median over fresh processes of the
first scan, the files being in the page cache. Exits with 1 if a distribution costs more than
0.15 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

__all__ = ["main"]

LIMIT_MS = 0.15
RUNS = 7

MEASURE = """
import json, time
import torch
from anyflex.registry.discovery import scan
start = time.perf_counter()
found = scan()
print(json.dumps([(time.perf_counter() - start) * 1e3, len(found)]))
"""


def write_distributions(folder: pathlib.Path, count: int) -> None:
    """Put `count` dist-info folders into `folder`."""
    for number in range(count):
        info = folder / f"package_{number}-1.{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: package-{number}\nVersion: 1.{number}\n"
            + "Classifier: Programming Language :: Python :: 3\n" * 20
            + "\n"
            + "A description.\n" * 200
        )
        if number % 50 == 0:
            (info / "entry_points.txt").write_text(
                f"[anyflex.backends.v1]\nwarp.v{number} = package_{number}:Backend\n"
            )
        elif number % 2:
            (info / "entry_points.txt").write_text(
                f"[console_scripts]\npackage-{number} = package_{number}.cli:main\n"
            )


def measure(folder: pathlib.Path) -> tuple[float, int]:
    """Return milliseconds of the first scan in a fresh process, and how many plugins it found."""
    core = pathlib.Path(__file__).parents[1] / "core"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(core)))}
    command = [sys.executable, "-c", MEASURE]
    output = subprocess.run(
        command, check=True, env=environment, capture_output=True, text=True
    ).stdout
    milliseconds, found = json.loads(output)
    return milliseconds, found


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print facts as JSON")
    parser.add_argument("--runs", type=int, default=RUNS, help="fresh processes for each figure")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as empty:
        own = statistics.median(measure(pathlib.Path(empty))[0] for _ in range(arguments.runs))
    for count in (30, 300, 1000):
        with tempfile.TemporaryDirectory() as text:
            folder = pathlib.Path(text)
            write_distributions(folder, count)
            measure(folder)
            runs = [measure(folder) for _ in range(arguments.runs)]
        total = statistics.median(run[0] for run in runs)
        rows.append(
            {
                "distributions": count,
                "plugins": runs[0][1],
                "scan_ms": round(total, 3),
                "ms_per_distribution": round(max(total - own, 0.0) / count, 4),
            }
        )
    good = all(float(row["ms_per_distribution"]) <= LIMIT_MS for row in rows)
    facts = {"limit_ms": LIMIT_MS, "this_environment_ms": round(own, 3), "rows": rows, "met": good}
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"this environment alone: {own:.2f} ms")
        for row in rows:
            print(
                f"{row['distributions']:5} distributions: {row['scan_ms']:8.2f} ms, "
                f"{row['ms_per_distribution']:.4f} ms each (limit {LIMIT_MS})"
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
