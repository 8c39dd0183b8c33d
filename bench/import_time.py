"""Cost of `import anyflex` over `import torch`; it scans nothing and loads no compiler.

    python bench/import_time.py [--limit 25] [--percent 3.4] [--modules 64] [--processes 9]

Each figure comes from a fresh process that imports torch first, then times `import anyflex`;
one warm-up process fills the bytecode cache. The median of the CPU time is judged, because on a
busy machine the wall time, printed beside it, measures the neighbours. The import waits for
nothing, so on an idle machine the two agree. A processor that is slow, or shares its cores, takes
longer for both imports: the limit is in milliseconds or in percent of `import torch`, whichever
allows more.

Exits 1 above both limits or the number of modules of anyflex's own, or where the import looks at
installed distributions or loads a forbidden module.
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
"""Modules that `import anyflex` may not load, with all below them, where `import torch` didn't."""

PROGRAM = """
import json, sys, time
import importlib.metadata as metadata
began_torch = time.process_time()
import torch
torch_milliseconds = (time.process_time() - began_torch) * 1e3
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
added = sorted(set(sys.modules) - before)
print(json.dumps([*milliseconds, torch_milliseconds, len(scans), added]))
"""


@dataclass(frozen=True)
class ImportFacts:
    """Measurements of `import anyflex` after `import torch` in one fresh process.

    Args:
        cpu_milliseconds, wall_milliseconds: of the import.
        torch_milliseconds: of CPU that `import torch` took before it.
        scans: how often it looked for installed distributions.
        modules: names of the modules that it added.
    """

    cpu_milliseconds: float
    wall_milliseconds: float
    torch_milliseconds: float
    scans: int
    modules: tuple[str, ...]

    def own(self) -> list[str]:
        """Return anyflex's own modules."""
        return [module for module in self.modules if module.partition(".")[0] == "anyflex"]

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
    # Users' interpreters keep bytecode; without it the compiler would be timed.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, env=environment
    )
    cpu, wall, torch_cpu, scans, modules = json.loads(done.stdout)
    return ImportFacts(cpu, wall, torch_cpu, scans, tuple(modules))


def main() -> int:
    parser = argparse.ArgumentParser(description="time `import anyflex` over `import torch`")
    parser.add_argument("--limit", type=float, default=25.0, help="milliseconds, median")
    parser.add_argument("--percent", type=float, default=3.0, help="of `import torch`, median")
    parser.add_argument("--modules", type=int, default=60, help="most modules of anyflex's own")
    parser.add_argument("--processes", type=int, default=9)
    arguments = parser.parse_args()

    facts = import_in_a_fresh_process()
    if facts.scans or facts.forbidden():
        print(f"error: {facts.scans} scans; forbidden: {facts.forbidden()}", file=sys.stderr)
        return 1
    runs = [import_in_a_fresh_process() for _ in range(arguments.processes)]
    cpu = statistics.median(run.cpu_milliseconds for run in runs)
    wall = statistics.median(run.wall_milliseconds for run in runs)
    percent = statistics.median(
        100 * run.cpu_milliseconds / run.torch_milliseconds for run in runs
    )
    print(
        f"import anyflex over import torch: {cpu:.1f} ms of CPU, {percent:.1f} % of torch's, "
        f"{wall:.1f} ms of wall time (median of {len(runs)} processes), "
        f"{len(facts.own())} modules, 0 scans"
    )
    if len(facts.own()) > arguments.modules:
        print(f"error: above {arguments.modules} modules: {facts.own()}", file=sys.stderr)
        return 1
    if cpu > arguments.limit and percent > arguments.percent:
        print(
            f"error: above {arguments.limit:g} ms and {arguments.percent:g} % of `import torch`",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
