"""Compiles the kernels that backward launches on Hopper; no device is needed.

Run as a script by `test_compiled_backward`. It prints one line per kernel: the case, with "split"
at its end where KV heads are split, the kernel,
bytes of shared memory, bytes of spills, whether ptxas makes products wait for each other
("serialized"), the fraction of loops over a mask's runs that load each run's bounds, and the
fraction of hand-overs of stored tiles without a fence before them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from scripts_beside import SOAK
from with_ptxas import compiled, compiling, spills_of

import anyflex
from anyflex.plugin import Accepted, Decision, isolated, register
from anyflex.testing import posing
from anyflex_cuda import forward_call
from anyflex_cuda.backend import CudaBackend
from anyflex_cuda.gluon_launch import GluonProgram
from anyflex_triton.building import Program

LENGTH = 1024
Mod = Callable[..., Any]

SLOPES = torch.linspace(0.1, 0.4, 4)
LEARNED_SLOPES = torch.linspace(0.1, 0.4, 4, requires_grad=True)
LEARNED_BY_DISTANCE = torch.zeros(4, 2 * LENGTH, requires_grad=True)
BIASES = torch.zeros(4, LENGTH, LENGTH, dtype=torch.bfloat16)
LEARNED_BIASES = torch.zeros(4, LENGTH, LENGTH, requires_grad=True)
DOCUMENTS = torch.arange(LENGTH, dtype=torch.int32) // 100
TABLES = [torch.zeros(LENGTH, 2, 1, 1, dtype=torch.int32) + i for i in range(9)]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def many(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Mask that reads more tensors than shared memory has room for beside the largest tiles."""
    live = q >= k
    for table in TABLES:
        live = live & (table[q, 0, 0, 0] <= table[k, 0, 0, 0])
    return live


CASES: Mapping[str, tuple[Mod | None, Mod | None]] = {
    "full": (None, None),
    "causal": (None, causal),
    "softcap": (lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), causal),
    "alibi": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), causal),
    "slopes that learn": (lambda s, b, h, q, k: s + LEARNED_SLOPES[h] * (k - q), causal),
    "distances that learn": (
        lambda s, b, h, q, k: s + LEARNED_BY_DISTANCE[h, q - k + LENGTH],
        causal,
    ),
    "dense": (lambda s, b, h, q, k: s + BIASES[h, q, k], causal),
    "dense that learns": (lambda s, b, h, q, k: s + LEARNED_BIASES[h, q, k], causal),
    "documents": (None, lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k)),
    "many": (None, many),
}


CALLS: Sequence[tuple[str, dict[str, Any]]] = [
    ("causal", {"kv_heads": 1}),
    ("documents", {"dims": (256, 256)}),
]
"""Cases with split KV heads and with tiles of 256 columns."""
MORE: Sequence[tuple[str, dict[str, Any]]] = [
    ("causal", {}),
    ("distances that learn", {"dims": (64, 64)}),
    ("full", {"dims": (64, 64)}),
    ("documents", {"dims": (64, 64)}),
    ("slopes that learn", {}),
    ("softcap", {"dims": (128, 64), "lengths": (1000, 900), "kv_heads": 2}),
    ("full", {"dims": (64, 64), "kv_heads": 1}),
    ("full", {}),
    ("softcap", {}),
    ("softcap", {"dims": (64, 64)}),
    ("documents", {}),
    ("many", {"dims": (64, 64)}),
    ("dense", {}),
    ("dense that learns", {"dims": (64, 64)}),
    ("distances that learn", {}),
    ("alibi", {"dims": (64, 128), "dtype": torch.float16}),
    ("full", {"dims": (256, 256)}),
    ("softcap", {"dims": (256, 256), "lengths": (1000, 900), "kv_heads": 2}),
    ("causal", {"dims": (192, 128), "dtype": torch.float16}),
    ("alibi", {"dims": (64, 192)}),
]


class OnHopper(CudaBackend):
    def probe(self) -> Decision:
        return Accepted()

    def target(self) -> Any:
        return "hopper"


@contextmanager
def recorded() -> Iterator[list[tuple[Program, Mapping[str, object]]]]:
    """Let CPU tensors count as a Hopper GPU's. Yield the launches, which aren't run."""
    launched: list[tuple[Program, Mapping[str, object]]] = []

    def note(
        program: Program, grid: int, device: torch.device, values: Mapping[str, object]
    ) -> None:
        assert set(values) >= set(program.types)
        launched.append((program, {name: values[name] for name in program.types}))

    with (
        isolated(),
        posing("cuda"),
        mock.patch.object(Program, "launch", note),
        mock.patch.object(Program, "is_compiled", lambda program, device: True),
        mock.patch.object(forward_call, "cores", lambda device: 132),
    ):
        register("cuda.recorded", OnHopper)
        yield launched


def backward_of(
    case: str,
    dims: tuple[int, int] = (128, 128),
    lengths: tuple[int, int] = (LENGTH, LENGTH),
    kv_heads: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    hopper: bool = True,
) -> list[tuple[Program, Mapping[str, object]]]:
    """Return backward's launches; without `hopper`, those of the portable kernels."""
    score, mask_mod = CASES[case]
    q = torch.zeros(1, 4, lengths[0], dims[0]).to(dtype).requires_grad_()
    k, v = (torch.zeros(1, kv_heads, lengths[1], d).to(dtype).requires_grad_() for d in dims)
    mask = None
    if mask_mod is not None:
        mask = anyflex.create_block_mask(mask_mod, None, None, *lengths)
    with recorded() as launched:
        out = anyflex.flex_attention(
            q, k, v, score_mod=score, block_mask=mask, enable_gqa=True,
            kernel_options={"cuda.recorded": {"hopper": hopper}}, backend="cuda.recorded",
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        launched.clear()
        out.backward(torch.zeros_like(out))
    return launched


def run_loops(ttgir: str) -> str:
    """Return "6/6": number of loops over runs, which contain loops over steps, that load a run's
    bounds, and number of all."""
    lines = ttgir.splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines]

    def loop_around(place: int) -> int | None:
        indent = indents[place]
        for line in range(place - 1, -1, -1):
            if indents[line] < indent:
                indent = indents[line]
                if "scf.for" in lines[line]:
                    return line
        return None

    loops = [place for place, line in enumerate(lines) if "scf.for" in line]
    around = {place: loop_around(place) for place in loops}
    steps = [place for place in loops if place not in around.values()]
    loads = {
        outer: any("tt.load" in line for line in lines[outer:place])
        for place in steps
        if (outer := around[place]) is not None
    }
    return f"{sum(loads.values())}/{len(loads)}"


def unfenced(ptx: str, to_products: bool) -> str:
    """Return "0/9": number of places where tiles in shared memory are handed to TMA or to the
    other consumer's products without a fence since they were stored, and number of all such
    places.

    Args:
        to_products: whether a consumer hands tiles to the other's products.
    """
    handed, bare, stored = 0, 0, False
    places = r"cp\.\S*bulk\.tensor\S*\.global\.shared::cta"
    if to_products:
        places += r"|bar\.arrive .*, 256;"
    for line in ptx.splitlines():
        if "stmatrix" in line or "st.shared.v4" in line:
            stored = True
        elif "fence.proxy.async" in line:
            stored = False
        elif re.search(places, line):
            handed += 1
            bare += stored
    return f"{bare}/{handed}"


def main() -> int:
    done: set[Program] = set()
    with compiling():
        for case, more in (*CALLS, *(MORE if SOAK else ())):
            for program, _ in backward_of(case, **more):
                # Other kernels are checked in one case: repair compiles for five seconds.
                needed = SOAK or case == "causal" or isinstance(program, GluonProgram)
                if program in done or not needed:
                    continue
                done.add(program)
                made, told = compiled(program)
                kernel = program.function.__name__
                if wide := kernel == "wide_kernel":
                    kernel = "wide_queries" if program.constants["OF_QUERIES"] else "wide_keys"
                name = f"{case} {more.get('dims', (128, 128))}".replace(" ", "")
                if program.types.get("key_sums") is not None:
                    name += "split"
                print(
                    name, kernel, made.metadata.shared,
                    spills_of(told), "serialized" if "serialized" in told else "free",
                    run_loops(made.asm["ttgir"]), unfenced(made.asm["ptx"], not wide), flush=True,
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
