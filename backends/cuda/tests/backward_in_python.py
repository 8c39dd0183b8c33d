"""Whole backward calls without a GPU: plain Triton's kernels in its interpreter, Hopper's in
`gluon_in_python`. Run as a script by `test_whole_backward`, with TRITON_INTERPRET=1.

Prints one line per call. Gradients must be non-finite exactly where the portable kernels' are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gluon_in_python import in_numpy, mod_in_python, run_kernel
from scripts_beside import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import Accepted, Decision, Kernel, isolated, register
from anyflex.testing import posing
from anyflex_cuda import (
    apply_mods,
    forward_call,
    hopper_backward,
    hopper_wide_backward,
    kernel,
    smem_mailbox,
    split_tiles,
    write_softmax_stats,
)
from anyflex_cuda.backend import CudaBackend
from anyflex_cuda.gluon_launch import GluonProgram
from anyflex_triton import tiles
from anyflex_triton.building import KernelInputs, Program

sys.path.insert(0, str(Path(__file__).parents[2] / "triton" / "tests"))
from interpreting import hasten

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One backward call.

    Args:
        rows, keys: number of query rows and of keys.
        score, score_backward, mask: functions that work with torch and numpy alike.
        odd: whether some elements are non-finite.
        learns: whether the score mod reads tensors that learn, by head and by key.
        by_pair: whether it reads another one by the distance of query and key.
        dense: whether it reads another one for each pair, which learns if they learn.
        repeatable: whether torch's deterministic mode is on.
        again: whether the call is made a second time, with fixed launches.
        cores: number of the device's multiprocessors; with many of them, KV heads are split.
        launched: names of Hopper's kernel, then of the portable ones that backward launches.
    """

    name: str
    rows: int = 130
    keys: int = 200
    dims: tuple[int, int] = (64, 64)
    score: Mod | None = None
    score_backward: Mod | None = None
    mask: Mod | None = None
    odd: bool = False
    learns: bool = False
    by_pair: bool = False
    dense: bool = False
    repeatable: bool = False
    again: bool = False
    cores: int = 0
    launched: tuple[str, ...] = (
        "prepare_kernel", "backward_kernel", "convert_kernel", "repair_kernel",
    )  # fmt: skip


def scaled(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return score * 0.5 + (k - q) * 0.01


def halved(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return grad * 0.5


def lowest(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    """Score mod like an additive mask: some rows' scores are all the lowest float, others' are far
    apart."""
    return score + ((q % 5 == 0) | ((q >= 64) & (q < 100))) * LOWEST + (k // 40) * (q % 2) * 3e5


def far_without_slope(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return (k - q) * 0.25 + 2e5 + score * 0


def none(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return grad * 0


def steep(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    """Score mod under which most weights underflow."""
    return score - abs(q - k) * 40.0


def same(grad: Any, score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return grad


def packed(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    """Mask of documents of 70 tokens, of which the first two see each other."""
    return (q // 70 == k // 70) | (q // 70 + k // 70 == 1)


LOWEST = torch.finfo(torch.float32).min
PORTABLE_DQ = ("prepare_kernel", "backward_kernel", "repair_kernel", "query_kernel")
SPLIT = ("prepare_kernel", "backward_kernel", "sum_kernel", "convert_kernel", "repair_kernel")
WIDE = ("prepare_kernel", "wide_kernel", "wide_kernel", "repair_kernel")
CASES = [
    Case("plain", again=True),
    Case("score mod and mask", score=scaled, score_backward=halved, mask=packed),
    Case("other dims", dims=(40, 72), mask=packed),
    Case("odd", mask=packed, odd=True),
    Case("odd with a score mod", score=scaled, score_backward=halved, mask=packed, odd=True),
    Case("far", score=lowest, score_backward=same),
    Case("far, mask", score=lowest, score_backward=same, mask=packed),
    Case(
        "far, repeatable", score=lowest, score_backward=same, repeatable=True, launched=PORTABLE_DQ
    ),
    Case("repeatable", mask=packed, repeatable=True, again=True, launched=PORTABLE_DQ),
    Case("learns", score=scaled, score_backward=halved, learns=True, again=True),
    Case(
        "learns, far, no slope",
        score=far_without_slope,
        score_backward=none,
        learns=True,
    ),
    Case("learns, no weights, odd", score=steep, score_backward=same, odd=True, learns=True),
    Case("wide", dims=(136, 160), mask=packed, again=True, launched=WIDE),
    Case("wide keys, repeatable", dims=(136, 40), repeatable=True, launched=WIDE),
    Case(
        "wide values, odd with a score mod",
        dims=(64, 136),
        score=scaled,
        score_backward=halved,
        mask=packed,
        odd=True,
        launched=WIDE,
    ),
    Case(
        "wide, far, no slope",
        dims=(136, 136),
        score=far_without_slope,
        score_backward=none,
        launched=WIDE,
    ),
    Case(
        "wide, learns",
        dims=(136, 136),
        score=scaled,
        score_backward=halved,
        learns=True,
        launched=("prepare_kernel", "wide_kernel", "repair_kernel", "query_kernel"),
    ),
    Case(
        "learns by pair",
        score=scaled,
        score_backward=halved,
        learns=True,
        by_pair=True,
        launched=PORTABLE_DQ,
    ),
    Case("learns, far", score=lowest, score_backward=same, mask=packed, learns=True),
    Case(
        "learns, repeatable",
        score=scaled,
        score_backward=halved,
        learns=True,
        by_pair=True,
        repeatable=True,
        launched=(*PORTABLE_DQ, "query_kernel", *["total_kernel"] * 3),
    ),
    Case("dense", dense=True),
    Case("dense, masked", keys=256, dims=(128, 128), mask=packed, dense=True),
    Case("dense, not aligned", keys=201, dense=True),
    Case("dense, learns", score=scaled, score_backward=halved, dense=True, learns=True),
    Case(
        "dense, learns, masked", keys=256, score=scaled, score_backward=halved, mask=packed,
        dense=True, learns=True,
    ),
    Case(
        "dense, learns, not aligned", keys=201, score=scaled, score_backward=halved, dense=True,
        learns=True,
    ),
    Case("split, plain", dims=(128, 64), again=True, cores=132, keys=260, launched=SPLIT),
    Case("split, odd", mask=packed, odd=True, cores=132, keys=260, launched=SPLIT),
    Case(
        "split, learns", score=scaled, score_backward=halved, learns=True, cores=132, keys=260,
        launched=SPLIT,
    ),
    Case(
        "split, repeatable", mask=packed, repeatable=True, cores=132, keys=260,
        launched=("prepare_kernel", "backward_kernel", "sum_kernel", *PORTABLE_DQ[2:]),
    ),
    Case(
        "split, wide, odd", dims=(136, 72), mask=packed, odd=True, cores=132, keys=260,
        launched=("prepare_kernel", "wide_kernel", "wide_kernel", "sum_kernel", "repair_kernel"),
    ),
]  # fmt: skip
SAMPLE = (4, 12, -3)
"""Cases of `make test`: non-finite, above head dim 128, and learning with split KV heads."""


class InPython(CudaBackend):
    """Backend without bfloat16, whose bits the interpreter multiplies as integers."""

    def probe(self) -> Decision:
        return Accepted()

    def target(self) -> Any:
        return "interpreter"

    def kernel(self, given: KernelInputs) -> Kernel:
        if not given.overrides.get("hopper", True):
            return super().kernel(given)
        return kernel.CudaKernel(given._replace(files=None))


def in_python(case: Case, program: Program, grid: int, values: Mapping[str, Any]) -> None:
    """Run a launch of Hopper's kernel, with the case's mods in numpy."""
    given: dict[str, Any] = {**program.constants}
    given |= {"SCORE_MOD_BACKWARD": case.score_backward, "MASK_MOD": case.mask}
    if case.dense:
        given |= {name: mod_in_python(given[name]) for name in ("SCORE_MOD", "READ_STEP")}
    else:
        given["SCORE_MOD"] = case.score
    if given.get("CAPTURED_GRADIENTS") is not None:
        given["CAPTURED_GRADIENTS"] = mod_in_python(given["CAPTURED_GRADIENTS"])
    given |= in_numpy({name: values[name] for name in program.types})
    more = [
        tiles,
        write_softmax_stats,
        smem_mailbox,
        apply_mods,
        split_tiles,
    ]
    module, name = hopper_backward, program.function.__name__
    if name != "backward_kernel":
        module, more = hopper_wide_backward, [*more, hopper_backward]
    programs = min(grid, 3) if module is hopper_backward else grid
    run_kernel(module, name, programs, given, 0, more=more)


def gradients(case: Case, hopper: bool) -> tuple[list[Tensor], list[str]]:
    """Return dQ, dK, dV and gradients of what learns, and the names of backward's kernels."""
    torch.manual_seed(0)
    names: list[str] = []
    launch = Program.launch

    def launched(
        program: Program, grid: int, device: torch.device, values: Mapping[str, Any]
    ) -> None:
        names.append(program.function.__name__)
        if isinstance(program, GluonProgram):
            in_python(case, program, grid, values)
        else:
            launch(program, grid, device, values)

    q, do = (torch.randn(2, 2, case.rows, d).half() for d in case.dims)
    k, v = (torch.randn(2, 1, case.keys, d).half() for d in case.dims)
    if case.odd:
        q[0, 0, 100, 3] = math.nan
        k[0, 0, 130, 5] = math.inf
        v[1, 0, 20, 7] = math.nan
        v[1, 0, 90, 1] = -math.inf
        do[1, 1, 60, 2] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    score = case.score
    if case.learns:
        bias = torch.zeros(2).requires_grad_()
        by_key = torch.zeros(1, case.keys, 2, dtype=torch.float16).requires_grad_()
        by_distance = torch.zeros(case.rows + case.keys).requires_grad_()
        leaves += [bias, by_key, *([by_distance] if case.by_pair else [])]

        assert case.score is not None
        fixed = case.score

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            s = fixed(s, b, h, i, j) * (1.0 + bias[h]) + by_key[0, j, b]
            return s + by_distance[i - j + case.keys] if case.by_pair else s

    if case.dense:
        numbers = (torch.arange(2 * case.rows * case.keys) * 0.37).sin().mul(3).half()
        numbers = numbers.view(2, case.rows, case.keys).requires_grad_(case.learns)
        leaves += [numbers] if case.learns else []
        others = score

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            s = s if others is None else others(s, b, h, i, j)
            return s + numbers[h, i, j]

    mask = None
    if case.mask is not None:
        mask = anyflex.create_block_mask(case.mask, None, None, case.rows, case.keys)
    torch.use_deterministic_algorithms(case.repeatable)
    with (
        mock.patch.object(Program, "launch", launched),
        mock.patch.object(forward_call, "cores", lambda device: case.cores or 1),
    ):
        out = anyflex.flex_attention(
            q, k, v, score_mod=score, block_mask=mask, enable_gqa=True, backend="cuda.python",
            kernel_options={"cuda.python": {"hopper": hopper}},
        )  # fmt: skip
        names.clear()
        assert isinstance(out, Tensor)
        found = torch.autograd.grad(out, leaves, do)
    torch.use_deterministic_algorithms(False)
    return list(found), names


def check(case: Case) -> None:
    portable, names = gradients(case, False)
    assert "backward_kernel" not in names
    for _ in range(1 + case.again):
        ours, names = gradients(case, True)
        assert tuple(names) == case.launched, names
        for found, wanted in zip(ours, portable, strict=True):
            odd = wanted.numpy()
            if case.odd:
                assert not np.isfinite(odd).all(), "a case without what it is about"
            np.testing.assert_allclose(found.numpy(), odd, atol=5e-3, rtol=5e-3)


def main() -> int:
    hasten()
    with (
        isolated(),
        posing("cuda"),
        # Forward takes the portable kernel.
        mock.patch.object(kernel, "refused_spec", lambda spec, tiles: "run in Python"),
    ):
        register("cuda.python", InPython)
        for case in CASES if SOAK else [CASES[place] for place in SAMPLE]:
            check(case)
            print(f"{case.name}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
