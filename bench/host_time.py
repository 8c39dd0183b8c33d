"""Host time of calls up to where their kernel starts: what `front_end.py` and `serving_host.py`
have in common.

Importing this file registers nothing; `run` puts `NullBackend` in front of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping

import torch

import anyflex
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved
from anyflex.contract.capabilities import CONTRACT_1_FIELDS, Capabilities
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.spec import Spec
from anyflex.registry.backend_table import register

__all__ = ["run"]


class NullKernel(Kernel):
    def forward(self, call: Call, out: Outputs) -> None:
        pass

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        pass


class NullBackend(Backend):
    priority = 1000
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32}),
        known_fields=CONTRACT_1_FIELDS | {"q_layout", "kv_layout", "page_size"},
    )

    def probe(self) -> Decision:
        return Accepted()

    def supports(self, spec: Spec) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: object) -> Kernel:
        return NullKernel()


def machine() -> str:
    """The processor's name, and its number of cores."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = [line for line in file if line.startswith("model name")]
        name = models[0].partition(":")[2].strip()
    except (OSError, IndexError):  # not on Linux: use the architecture
        name = platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def run(
    about: str,
    measure: Callable[[int], dict[str, float]],
    limits: Mapping[str, float],
    calls: int,
    rounds: int,
) -> int:
    """Measure by one thread, print figures beside their limits, and return the exit status: 1
    above a limit. Of several rounds the best counts, since another load on the machine can only
    add.

    Args:
        about: the program's description.
        measure: takes a number of calls and returns medians in us by name.
        limits: us on an idle reference machine, for some of the names.
        calls, rounds: defaults of the program's options.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--calls", type=int, default=calls)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    register("cpu.null", NullBackend)
    torch.set_num_threads(1)
    measured = [measure(arguments.calls) for _ in range(arguments.rounds)]
    figures = {name: min(each[name] for each in measured) for name in measured[0]}
    for name, figure in figures.items():
        limit = limits.get(name)
        print(f"{name:36s} {figure:7.1f} us" + (f"   limit {limit:.0f}" if limit else ""))
    if arguments.json:
        facts = {
            "command": f"python {' '.join(sys.argv)}",
            "machine": machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "anyflex": anyflex.__version__,
            "commit": commit(),
            "calls": arguments.calls,
            "rounds": arguments.rounds,
            "median_us": figures,
            "limits_us": dict(limits),
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=2)
            file.write("\n")
    return int(any(figures[name] > limit for name, limit in limits.items()))
