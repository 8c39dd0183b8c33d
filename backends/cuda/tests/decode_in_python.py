"""Whole decoding calls without a GPU: plain Triton's kernels in its interpreter, Hopper's in
`gluon_in_python`. Run as a script by `test_whole_decode`, with TRITON_INTERPRET=1.

Prints one line per call. All outputs must match the reference's, and be non-finite exactly where
these are.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from backward_in_python import InPython, Mod, scaled
from gluon_in_python import Pointer, in_numpy, run_kernel
from scripts_beside import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing
from anyflex_cuda import (
    apply_mods,
    decode_call,
    decode_parts,
    decode_steps,
    forward_call,
    hopper_decode,
    nonfinite_rows,
    packed_steps,
    smem_mailbox,
    split_tiles,
    stored_operands,
    write_softmax_stats,
)
from anyflex_cuda.gluon_launch import GluonProgram
from anyflex_triton import forward, sequences, tiles
from anyflex_triton.building import Program

sys.path.insert(0, str(Path(__file__).parents[2] / "triton" / "tests"))
from interpreting import hasten

LOWEST = torch.finfo(torch.float32).min
CALLED = (
    tiles, forward, sequences, decode_steps, packed_steps, nonfinite_rows, smem_mailbox,
    apply_mods,
    split_tiles, stored_operands, write_softmax_stats, decode_parts,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One decoding call.

    Args:
        heads: number of query heads, of KV heads.
        score, mask: functions that work with torch and numpy alike.
        each: whether the mask differs among batch entries.
        block: block size of the mask.
        odd: whether some elements are non-finite.
        rest: whether the rounding residual of out is wanted too.
        transposed: whether heads are inside of rows in memory.
        cores: number of multiprocessors.
        most_parts: number of a head's parts that the separate kernel adds up at a time.
        most_added: maximum number of rows of parts without that kernel.
        sinks: whether heads have sinks.
    """

    name: str
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    rows: int = 1
    keys: int = 300
    dims: tuple[int, int] = (64, 64)
    score: Mod | None = None
    mask: Mod | None = None
    each: bool = False
    block: int = 128
    odd: bool = False
    rest: bool = False
    transposed: bool = False
    cores: int = 3
    most_parts: int = 64
    most_added: int = 320
    sinks: bool = False


def window(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return (k >= 90) & (k < 280)


def lengths(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    """Mask of lengths by batch entry, 0 for entry 0."""
    return (k < b * 150) & (k >= q)


def lowest(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    """Score mod like an additive mask: some rows' scores are all the lowest float."""
    return score + ((q + h) % 2 == 0) * LOWEST


def farther(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return score * 0.0 + (k // 40) * 300000.0


CASES = [
    Case("plain"),
    Case("many programs", batch=1, keys=2048, cores=30),
    # This case has lengths of its own, because plans of other cases' lengths are cached.
    Case("summed after", batch=1, keys=2048, cores=30, most_added=0, rest=True),
    Case(
        "more parts than at a time",
        batch=1,
        keys=1984,
        cores=30,
        most_parts=2,
        most_added=0,
        sinks=True,
    ),
    Case("mask, summed after", mask=lengths, each=True, batch=3, most_added=0, odd=True),
    Case("groups of units and programs", batch=3, heads=(6, 6), keys=500, cores=6, sinks=True),
    Case("one program", batch=3, keys=512, cores=1, heads=(2, 2)),
    Case("other dims", dims=(40, 72), rows=3, heads=(8, 1)),
    Case("score mod", score=scaled, rows=2),
    Case("mask", mask=window, rows=2),
    Case("a mask for each entry", mask=lengths, each=True, batch=3, rest=True),
    Case(
        "finer blocks than steps",
        mask=lengths,
        each=True,
        batch=3,
        block=16,
        score=scaled,
        sinks=True,
    ),
    Case("odd", mask=window, odd=True),
    Case("far", score=lowest, rows=2, rest=True),
    Case("far, summed after", score=lowest, batch=1, keys=1920, cores=30, most_added=0, rest=True),
    Case("far, odd", score=lowest, mask=window, rows=2, odd=True),
    Case("farther", score=farther, mask=window, rows=2),
    Case("transposed", transposed=True, rows=4, mask=window),
]


def in_python(case: Case, program: Program, grid: int, values: Mapping[str, Any]) -> None:
    """Run a launch of Hopper's kernel, with the case's mods in numpy."""
    given: dict[str, Any] = {**program.constants}
    given |= {"SCORE_MOD": case.score, "MASK_MOD": case.mask}
    given |= in_numpy({name: values[name] for name in program.types})
    memory = given["counts"].array
    given["counts"] = Pointer(memory[: memory.size // 2 * 2].view(np.int64))
    run_kernel(hopper_decode, "decode_kernel", grid, given, seed=0, more=CALLED)


def dense(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return out, computed without lse, which loses row_sum where scores are huge."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.mT * q.shape[3] ** -0.5
    index = [torch.arange(n) for n in scores.shape]
    at = (index[0][:, None, None, None], index[1][:, None, None], index[2][:, None], index[3])
    if case.score is not None:
        scores = case.score(scores, *at)
    if case.mask is not None:
        scores = scores.masked_fill(~case.mask(*at), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def outputs(case: Case, backend: str) -> tuple[list[Tensor], list[str]]:
    """Return out, lse, max_scores, where wanted dQ, which reads saved tensors, and names of
    forward's kernels."""
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

    heads, kv_heads = case.heads
    shapes = [(heads, case.rows, case.dims[0]), *((kv_heads, case.keys, d) for d in case.dims)]
    tensors = [torch.randn(case.batch, *shape).half() for shape in shapes]
    q, k, v = tensors
    if case.odd:
        k[0, 0, 130, 5] = math.inf
        v[1, 0, 20, 7] = math.nan
        v[1, 0, 95, 1] = -math.inf
        v[1, 1, 285, 3] = math.inf
    if case.transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    mask = None
    if case.mask is not None:
        entries = case.batch if case.each else None
        mask = anyflex.create_block_mask(
            case.mask, entries, None, case.rows, case.keys, BLOCK_SIZE=case.block
        )
    if case.rest:
        q.requires_grad_()
    sinks = torch.arange(heads) - 1.5 if case.sinks else None
    options = {"cuda.python": {}} if backend == "cuda.python" else None
    with mock.patch.object(Program, "launch", launched), torch.set_grad_enabled(case.rest):
        out, aux = anyflex.flex_attention(
            q, k, v, score_mod=case.score, block_mask=mask, enable_gqa=True, backend=backend,
            return_aux=anyflex.AuxRequest(lse=True, max_scores=True), kernel_options=options,
            sinks=sinks,
        )  # fmt: skip
        forwards = list(names)
        found = [out, aux.lse, aux.max_scores]
        if case.rest:
            if backend == "reference":
                out = dense(case, q, k, v)
            found += torch.autograd.grad(out.sum(), [q])
    return [x.detach() for x in found], forwards


def check(case: Case) -> None:
    with (
        mock.patch.object(forward_call, "cores", lambda device: case.cores),
        mock.patch.object(decode_call, "_FEW_PARTS", min(decode_call._FEW_PARTS, case.most_parts)),
        mock.patch.object(decode_call, "_MOST_PARTS", case.most_parts),
        mock.patch.object(decode_call, "_MOST_ADDED", case.most_added),
    ):
        ours, names = outputs(case, "cuda.python")
        again, _ = outputs(case, "cuda.python")
    steps = () if case.mask is None else ("steps_kernel",)
    sums = () if case.most_added else ("combine_kernel",)
    assert tuple(names) == (*steps, "decode_kernel", *sums), names
    wanted, _ = outputs(case, "reference")
    for found, same, right in zip(ours, again, wanted, strict=True):
        assert torch.equal(found.nan_to_num(7.0), same.nan_to_num(7.0))
        if case.odd and found is ours[0]:
            assert not np.isfinite(right.numpy()).all(), "a case without what it is about"
        np.testing.assert_allclose(found.numpy(), right.numpy(), atol=3e-3, rtol=3e-3)


def check_steps(seed: int) -> None:
    """Check the kernel that lists a mask's steps, with more runs per row, and more steps per run,
    than it takes at a time."""
    numbers = np.random.default_rng(seed)
    entries, rows, blocks = 40, int(numbers.integers(1, 3)), 90
    block_n, kv_block = 64, int(numbers.choice([16, 48, 64, 128, 256]))
    length = int(numbers.integers(blocks * kv_block - 2 * kv_block, blocks * kv_block))
    runs, offsets, wanted = [], [], []
    for _ in range(entries):
        for row in range(rows):
            offsets.append(len(runs))
            steps = []
            cuts = sorted(set(numbers.integers(0, blocks + 1, numbers.integers(0, 100)).tolist()))
            for begin, end in itertools.pairwise(cuts):
                kind = int(numbers.integers(0, 3))
                if kind:
                    runs.append((begin, end, kind))
                    last = min(end * kv_block, length)
                    for key in range(begin * kv_block, last, block_n):
                        steps.append((key, min(last - key, block_n) * 2 + (kind == 1)))
            if row == 0:
                wanted.append(steps)
        offsets.append(len(runs))
    most = max(map(len, wanted))
    written = torch.full((entries + 1 + entries * most * 2,), -7, dtype=torch.int32)
    edges, listed = written[: entries + 1], written[entries + 1 :].view(entries, most, 2)
    begins = torch.tensor(offsets, dtype=torch.int32)
    decode_steps.steps_kernel[(entries + 1,)](
        begins, begins[1:], torch.tensor(runs, dtype=torch.int32), (rows + 1, 0), written,
        entries, most, length, kv_block, block_n,
    )  # fmt: skip
    assert edges.tolist() == np.cumsum([0, *map(len, wanted)]).tolist()
    for found, steps in zip(listed.tolist(), wanted, strict=True):
        assert found[: len(steps)] == [list(step) for step in steps]
        assert all(step == [-7, -7] for step in found[len(steps) :])


def main() -> int:
    hasten()
    for seed in range(4):
        check_steps(seed)
    print("steps: right", flush=True)
    with isolated(), posing("cuda"), mock.patch.object(decode_call, "_LEAST_SHARE", 64):
        register("cuda.python", InPython)
        for case in CASES if SOAK else CASES[2::3]:
            if len(sys.argv) < 2 or sys.argv[1] in case.name:
                check(case)
                print(f"{case.name}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
