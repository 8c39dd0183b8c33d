"""Host time of a decode step of 256 sequences over a paged cache: books, places, packed call.

Usage: python bench/serving_host.py [--steps N] [--json FILE]

One thread, float32, kernels too small to count: one KV head of 8 numbers, a null backend. Figures
are medians over the steps of three rounds, of which the best counts. Exits 1 above a limit: 50 us
for `step`, which begins the pass, and 20 us for a layer's packed call before its kernel starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time

import torch

import anyflex
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, Outputs
from anyflex.contract.capabilities import CONTRACT_1_FIELDS, Capabilities
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.spec import Spec
from anyflex.registry.backend_table import register

SEQUENCES, PAGE = 256, 16
LIMITS_US = {"step": 50.0, "packed call of a layer": 20.0}


class NullKernel(Kernel):
    def forward(self, call: Call, out: Outputs) -> None:
        pass


class NullBackend(Backend):
    priority = 1000
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32}),
        known_fields=CONTRACT_1_FIELDS | {"q_layout", "kv_layout", "page_size"},
    )

    def probe(self) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: object) -> Kernel:
        return NullKernel()


def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return q_idx >= kv_idx


def measure(steps: int) -> dict[str, float]:
    """Medians in us. Sequences begin at different lengths, so that each step needs some pages."""
    width = (steps + 2 * PAGE) // PAGE + 1
    cache = anyflex.PagedKVCache(
        2, SEQUENCES * width, PAGE, 1, 8, slots=SEQUENCES, width=width, dtype=torch.float32
    )
    slots = [cache.open() for _ in range(SEQUENCES)]
    cache.step([(slot, 1 + slot % PAGE) for slot in slots])
    wanted, rows = [(slot, 1) for slot in slots], torch.randn(SEQUENCES, 1, 8)
    times: dict[str, list[int]] = {}
    for _ in range(steps):
        clock = [time.perf_counter_ns()]
        step = cache.step(wanted)
        clock.append(time.perf_counter_ns())
        for layer in range(2):
            cache.append(step, layer, rows, rows)
            clock.append(time.perf_counter_ns())
            cache.attend(step, layer, rows, mask_mod=causal)
            clock.append(time.perf_counter_ns())
        took = [end - begin for begin, end in itertools.pairwise(clock)]
        for name, each in (
            ("step", took[0]),
            ("places of the new rows", took[1] - took[3]),
            ("append of a layer", took[3]),
            ("blocks of the mask, once a step", took[2] - took[4]),
            ("packed call of a layer", took[4]),
        ):
            times.setdefault(name, []).append(each)
    return {name: statistics.median(each) / 1000 for name, each in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    register("cpu.null", NullBackend)
    torch.set_num_threads(1)
    rounds = [measure(arguments.steps) for _ in range(3)]
    figures = {name: min(each[name] for each in rounds) for name in rounds[0]}
    for name, figure in figures.items():
        limit = LIMITS_US.get(name)
        print(f"{name:34s} {figure:7.1f} us" + (f"   limit {limit:.0f}" if limit else ""))
    if arguments.json:
        facts = {
            "command": f"python {' '.join(sys.argv)}",
            "torch": torch.__version__,
            "steps": arguments.steps,
            "median_us": figures,
            "limits_us": LIMITS_US,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=2)
            file.write("\n")
    return int(any(figures[name] > limit for name, limit in LIMITS_US.items()))


if __name__ == "__main__":
    sys.exit(main())
