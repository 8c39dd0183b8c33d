"""What `import anyflex` costs over `import torch`; that it scans nothing and loads no compiler.

    python bench/import_time.py [--limit 25] [--processes 9]

Each figure comes from a fresh process that imports torch first, then times `import anyflex`;
one warm-up process fills the bytecode cache. The median of the CPU time is judged, because on a
busy machine the wall time, printed beside it, measures the neighbours. The import waits for
nothing, so on an idle machine the two agree.

Exits 1 above the limit, or where the import looks at installed distributions or loads a forbidden
module.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

__all__ = ["FORBIDDEN", "ImportFacts", "import_in_a_fresh_process"]

FORBIDDEN = (
    "triton",
    "cutlass",
    "llvmlite",
    "numba",
    "torch._dynamo",
    "torch._inductor",
    "anyflex_cpu",
    "anyflex_cuda",
    "anyflex_triton",
    "anyflex_xpu",
    "anyflex_mps",
)
"""Modules, with all below them, that `import anyflex` may not load where `import torch` didn't."""

PROGRAM = """
import json, sys, time
import importlib.metadata as metadata
import torch
scans = []
search = metadata.MetadataPathFinder.find_distributions
def spy(*arguments, **named):
    scans.append(1)
    return search(*arguments, **named)
metadata.MetadataPathFinder.find_distributions = spy
before = set(sys.modules)
began = time.process_time(), time.perf_counter()
import anyflex
ended = time.process_time(), time.perf_counter()
milliseconds = [(end - begin) * 1e3 for begin, end in zip(began, ended)]
print(json.dumps([*milliseconds, len(scans), sorted(set(sys.modules) - before)]))
"""


@dataclass(frozen=True)
class ImportFacts:
    """What one fresh process saw of `import anyflex` after `import torch`.

    Args:
        cpu_milliseconds, wall_milliseconds: that the import took.
        scans: how often it looked for installed distributions.
        modules: names of the modules that it added.
    """

    cpu_milliseconds: float
    wall_milliseconds: float
    scans: int
    modules: tuple[str, ...]

    def forbidden(self) -> list[str]:
        """Return the modules that should not have been loaded."""
        return [
            module
            for module in self.modules
            if any(module == name or module.startswith(name + ".") for name in FORBIDDEN)
        ]


def import_in_a_fresh_process() -> ImportFacts:
    """Run PROGRAM with this interpreter.

    Raises:
        subprocess.CalledProcessError: the import failed.
    """
    # Users' interpreters keep bytecode; one that doesn't would time the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, env=environment
    )
    cpu, wall, scans, modules = json.loads(done.stdout)
    return ImportFacts(cpu, wall, scans, tuple(modules))


def main() -> int:
    parser = argparse.ArgumentParser(description="time `import anyflex` over `import torch`")
    parser.add_argument("--limit", type=float, default=25.0, help="milliseconds, median")
    parser.add_argument("--processes", type=int, default=9)
    arguments = parser.parse_args()

    facts = import_in_a_fresh_process()
    if facts.scans or facts.forbidden():
        print(f"error: {facts.scans} scans; forbidden: {facts.forbidden()}", file=sys.stderr)
        return 1
    runs = [import_in_a_fresh_process() for _ in range(arguments.processes)]
    cpu = statistics.median(run.cpu_milliseconds for run in runs)
    wall = statistics.median(run.wall_milliseconds for run in runs)
    print(
        f"import anyflex over import torch: {cpu:.1f} ms of CPU, {wall:.1f} ms of wall time "
        f"(median of {len(runs)} processes), {len(facts.modules)} modules, 0 scans"
    )
    if cpu > arguments.limit:
        print(f"error: above the limit of {arguments.limit:g} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
