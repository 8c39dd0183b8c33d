"""Time of the conformance kit for the reference: the quick subset and the whole.

    python bench/conformance_time.py [--json] [--quick]

Each is one `anyflex conformance` in a fresh process on two cores, its start included. Exits with
1 if the quick subset takes more than 60 s, the whole kit more than 300 s, or a case fails: measure
on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

__all__ = ["main"]

LIMITS_S = {"quick": 60.0, "whole": 300.0}
CORES = 2
SLOWEST = 5


def keep_to_two_cores() -> int:
    """Bind this process and its children to two cores where the system can; return how many."""
    if not hasattr(os, "sched_setaffinity"):
        return os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    return len(cores)


def measure(which: str) -> dict[str, Any]:
    """Run "quick" or "whole" once."""
    core = pathlib.Path(__file__).parents[1] / "core"
    paths = [str(core), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "anyflex", "conformance", "--backend", "reference"]
    command += ["--require", "all", "--json", "-", *(["--quick"] if which == "quick" else [])]
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    report = json.loads(done.stdout)
    slowest = sorted(report["cases"], key=lambda row: -row["seconds"])[:SLOWEST]
    return {
        "which": which,
        "cases": len(report["cases"]),
        "seconds": round(seconds, 1),
        "limit_s": LIMITS_S[which],
        "passed": report["passed"],
        "met": report["passed"] and seconds <= LIMITS_S[which],
        "slowest": {row["case"]: row["seconds"] for row in slowest},
    }


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print facts as JSON")
    parser.add_argument("--quick", action="store_true", help="only the quick subset")
    arguments = parser.parse_args()
    cores = keep_to_two_cores()
    # Other programs' load on the machine is in every figure.
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    rows = [measure(which) for which in (("quick",) if arguments.quick else ("quick", "whole"))]
    if arguments.json:
        print(json.dumps({"cores": cores, "load_before": load, "rows": rows}, indent=2))
    else:
        print(f"{cores} cores, load average before: {load}")
        for row in rows:
            slowest = ", ".join(f"{case} {s:.1f} s" for case, s in row["slowest"].items())
            print(
                f"{row['which']}: {row['cases']} cases in {row['seconds']:.1f} s "
                f"(limit {row['limit_s']:.0f}), {'all well' if row['passed'] else 'FAILED'}; "
                f"slowest: {slowest}"
            )
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
