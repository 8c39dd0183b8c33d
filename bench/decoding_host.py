"""Host time of a decoding layer in transformers on Hopper, up to where its kernels start.

Usage: python bench/decoding_host.py [--calls N] [--rounds N] [--json FILE]

CPU tensors pose as a GPU's, and launches are left out: what is measured is the plugin's attention,
anyflex and the backend `cuda` until they would call a launcher. B2, 16 heads of 128 and 4 of keys,
2100 keys and more, bfloat16. Needs the plugin, transformers and Triton. Figures are medians over a
round, of which the best counts. Exits 1 where a kind of call takes longer than its limit on a
reference machine: a length that was seen 80 us, a new one 180, a row of a padded batch 110, a
static cache 120.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
from anyflex_transformers.attention import attention
from anyflex_transformers.carrier import Carrier
from host_time import run

import anyflex
from anyflex.plugin import Accepted, Decision, isolated, register
from anyflex.testing import posing
from anyflex_cuda import forward_call
from anyflex_cuda.backend import CudaBackend
from anyflex_triton.building import Program

BATCH, HEADS, KEY_HEADS, KEYS, ROOM, DIM = 2, 16, 4, 2100, 2112, 128
WARM_UP, LONGEST = 20, 9000
LIMITS_US = {
    "a length that was seen": 80.0,
    "a new length": 180.0,
    "a row of a padded batch": 110.0,
    "a static cache": 120.0,
}


class OnHopper(CudaBackend):
    def probe(self) -> Decision:
        return Accepted()

    def target(self) -> object:
        return "hopper"


class Layer(torch.nn.Module):
    is_causal = True


def kinds() -> dict[str, Callable[[], object]]:
    """Return a function that makes the next call of each kind and returns its arguments."""
    query = torch.zeros(BATCH, HEADS, 1, DIM, dtype=torch.bfloat16)
    memory = torch.zeros(BATCH * KEY_HEADS * LONGEST * DIM, dtype=torch.bfloat16)
    lengths = iter(range(ROOM, LONGEST))

    def cached(keys: int) -> torch.Tensor:
        return memory[: BATCH * KEY_HEADS * keys * DIM].view(BATCH, KEY_HEADS, keys, DIM)

    seen, room = cached(KEYS), cached(ROOM)
    live = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
    live[0, ..., : KEYS // 2] = False
    count = Carrier(None, (BATCH, 1, 1, ROOM), torch.tensor(KEYS), KEYS)

    def new_length() -> object:
        keys = cached(next(lengths))
        return query, keys, keys, None

    return {
        "a length that was seen": lambda: (query, seen, seen, None),
        "a new length": new_length,
        "a row of a padded batch": lambda: (query, seen, seen, live),
        "a static cache": lambda: (query, room, room, count),
    }


def measure(calls: int) -> dict[str, float]:
    """Medians in us."""
    layer, layers = Layer(), kinds()
    options = {"scaling": DIM**-0.5, "dropout": 0.0, "position_ids": None, "use_cache": True}
    taken: dict[str, list[float]] = {name: [] for name in layers}
    left_out = (
        mock.patch.object(Program, "launch", lambda *arguments: None),
        mock.patch.object(Program, "is_compiled", lambda *arguments: True),
        mock.patch.object(forward_call, "cores", lambda device: 132),
    )
    with contextlib.ExitStack() as stack:
        for context in (isolated(), posing("cuda"), *left_out, torch.no_grad()):
            stack.enter_context(context)
        register("cuda", OnHopper)
        stack.enter_context(anyflex.use_backend("cuda"))
        # Layers of a step ask for the same kind of call, one after the other.
        for name, arguments in layers.items():
            for turn in range(-WARM_UP, calls):
                given = arguments()
                begin = time.perf_counter_ns()
                attention(layer, *given, **options)
                end = time.perf_counter_ns()
                if turn >= 0:
                    taken[name].append((end - begin) / 1000)
    return {name: statistics.median(times) for name, times in taken.items()}


if __name__ == "__main__":
    sys.exit(run(__doc__, measure, LIMITS_US, calls=1_000, rounds=3))
