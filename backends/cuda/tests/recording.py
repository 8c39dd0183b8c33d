"""Stand-in GPUs, a Hopper and a Blackwell, that record launches instead of running kernels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import anyflex
from anyflex.plugin import Accepted, Decision, isolated, register
from anyflex.testing import posing
from anyflex_cuda import forward_call
from anyflex_cuda.backend import CudaBackend
from anyflex_triton.building import Program, pointer_type

CORES = 132
UNREAD = (
    "offsets", "ends", "runs", "key_offsets", "key_ends", "key_runs", "tops", "lse", "max_scores",
    "counter", "counts", "edges",
)  # fmt: skip
"""Arguments whose tensors' types aren't checked: others are passed where they are unused, and
decoding's counts are in memory of floats."""


class OnHopper(CudaBackend):
    def probe(self) -> Decision:
        return Accepted()

    def target(self) -> Any:
        return "hopper"


class OnBlackwell(OnHopper):
    def target(self) -> Any:
        return "blackwell"


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def launches_on(
    backend: type[CudaBackend], q: Tensor, k: Tensor, v: Tensor, *mods: Any, **more: Any
) -> tuple[list[Any], str]:
    """Return (a call's launches, explain's description of its kernel)."""
    with isolated():
        register("cuda", backend)
        with recording() as launched:
            anyflex.flex_attention(q, k, v, *mods, backend="cuda", **more)
            found = anyflex.explain(q, k, v, *mods, backend="cuda", **more)
            return launched, str(found)


def takes_fast_tanh(program: Program) -> bool:
    """Return whether the program's score mod uses the GPU's instruction for tanh."""
    mod: Any = program.constants["SCORE_MOD"]
    if mod is None or "fast_tanh_capped(" not in inspect.getsource(mod.fn):
        return False
    return bool(mod.fn.__globals__["COARSE"].value)


@contextmanager
def recording() -> Iterator[list[tuple[Program, int, Mapping[str, object]]]]:
    """Let CPU tensors count as the GPU's. Yield launches: program, grid, values."""
    launched: list[tuple[Program, int, Mapping[str, object]]] = []

    def note(
        program: Program, grid: int, device: torch.device, values: Mapping[str, object]
    ) -> None:
        for name, types in program.types.items():
            if isinstance(types, tuple):
                assert isinstance(values[name], tuple) and len(values[name]) == len(types), name
            elif types.startswith("tensordesc"):
                assert str(values[name].block_shape) in types, name
            elif types.startswith("*"):
                assert pointer_type(values[name].dtype) == types or name in UNREAD, name
        launched.append((program, grid, values))

    with (
        posing("cuda"),
        mock.patch.object(Program, "launch", note),
        mock.patch.object(forward_call, "cores", lambda device: CORES),
        mock.patch.object(Program, "is_compiled", lambda program, device: True),
    ):
        yield launched


def check_half_outputs(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any,
    sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Compare the results of a kernel that ran in Python with the reference, for a call in
    float16."""
    wanted, wanted_lse = anyflex.flex_attention(
        q, k, v, score, mask, enable_gqa=True, return_lse=True, sinks=sinks, backend="reference"
    )
    torch.testing.assert_close(out, wanted, atol=3e-3, rtol=3e-3, equal_nan=True)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=1e-4, equal_nan=True)
