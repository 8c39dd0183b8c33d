"""Dependent launch: which launches may begin before the previous launch ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from compiling_backward import DOCUMENTS, OnHopper, causal, recorded
from scripts_beside import printed_by

import anyflex
from anyflex_triton import dependent_launch
from anyflex_triton.building import Program

LENGTH = 300


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[q] == DOCUMENTS[k]


def named(launched: list[tuple[Program, Mapping[str, object]]]) -> str:
    """Return the kernels' names, each after ">" if it may begin before the previous launch
    ends."""
    words = []
    for program, _ in launched:
        follows = dict(program.options.more).get("launch_pdl", False)
        # Such a kernel is compiled to wait, and the others aren't.
        assert program.constants.get("FOLLOWS", False) is follows
        words.append(">" * follows + program.function.__name__.removesuffix("_kernel"))
    return " ".join(words)


def backward(wanted: str, mask: Any = None, table: Any = None, **options: Any) -> str:
    """Return backward's launches."""
    leaves = {name: torch.zeros(2, 2, LENGTH, 64).bfloat16() for name in "qkv"}
    chosen = [leaves[name].requires_grad_() for name in wanted]
    score = None
    if table is not None:
        chosen.append(table)

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + table[h]

    blocks = mask and anyflex.create_block_mask(mask, None, None, LENGTH, LENGTH)
    with recorded() as launched:
        out = anyflex.flex_attention(
            *leaves.values(), score, blocks, kernel_options={"cuda.recorded": options},
            backend="cuda.recorded",
        )  # fmt: skip
        assert isinstance(out, Tensor)
        launched.clear()
        torch.autograd.grad(out, chosen, torch.zeros_like(out))
    return named(launched)


@pytest.mark.parametrize(
    ("wanted", "launches"),
    [
        ("qkv", "row >key >query"),
        ("v", "row >key"),
        # The query pass needs the results of the launch before it.
        ("q", "row query"),
    ],
)
def test_portable_backward(wanted: str, launches: str) -> None:
    assert backward(wanted, hopper=False) == launches
    assert backward(wanted, causal, hopper=False) == launches


@pytest.mark.parametrize(
    ("target", "overlap"),
    [("hopper", True), ("blackwell", True), ("ampere", False), ("amd", False), ("xpu", False)],
)
def test_launches_overlap_where_the_gpu_knows_how(target: str, overlap: bool) -> None:
    with mock.patch.object(OnHopper, "target", lambda backend: target):
        assert backward("qkv", hopper=False) == "row >key >query".replace(">", ">" * overlap)
        assert decoded(False, False, 2) == "decode >combine".replace(">", ">" * overlap)


@pytest.mark.parametrize(
    ("version", "does"), [(12020, False), (12030, True), (13000, True), (None, True)]
)
def test_launches_overlap_where_the_driver_can_record_them(
    version: int | None, does: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of None means that there is no driver, and kernels are only compiled."""

    class Driver:
        def __init__(self, name: str) -> None:
            if version is None:
                raise OSError(name)

        def cuDriverGetVersion(self, number: Any) -> int:
            number._obj.value = version
            return 0

    monkeypatch.setattr(dependent_launch.ctypes, "CDLL", Driver)
    dependent_launch._driver_version.cache_clear()
    try:
        assert dependent_launch.overlaps("hopper") is does
        assert not dependent_launch.overlaps("ampere")
    finally:
        dependent_launch._driver_version.cache_clear()


def test_nothing_stands_between_portable_launches_that_overlap() -> None:
    """Refined blocks of both kernels are decided before both."""
    found = backward("qkv", documents, hopper=False, finer_mask=True)
    assert found.endswith(" row >key >query"), found
    assert found.count("runs") == 2 and ">" not in found.removesuffix(">key >query")


def test_sums_that_repeat_bit_for_bit_overlap_nothing() -> None:
    table = torch.zeros(2, requires_grad=True)
    assert backward("qkv", table=table, hopper=False) == "row >key >query"
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found = backward("qkv", table=table, hopper=False)
    finally:
        torch.use_deterministic_algorithms(before)
    assert found == "row >key query query total"


def test_hoppers_own_kernels_overlap_nothing() -> None:
    """Overlapping them saved no time: bench/results/h100_cuda.md."""
    assert backward("qkv") == "prepare backward convert repair"
    assert decoded(True, True, 1) == "steps decode combine"


def test_the_portable_pass_after_hoppers_waits_for_it() -> None:
    learned = torch.zeros(2 * LENGTH, requires_grad=True)
    q = torch.zeros(2, 2, LENGTH, 64).bfloat16().requires_grad_()
    with recorded() as launched:
        out = anyflex.flex_attention(
            q, q, q, lambda s, b, h, i, j: s + learned[i - j + LENGTH], backend="cuda.recorded"
        )
        assert isinstance(out, Tensor)
        launched.clear()
        torch.autograd.grad(out, (q, learned), torch.zeros_like(out))
    assert named(launched) == "prepare backward repair query"


@pytest.mark.parametrize("masked", [True, False])
def test_portable_decoding(masked: bool) -> None:
    assert decoded(masked, False, 2) == "decode >combine"


def decoded(masked: bool, hopper: bool, kv_heads: int) -> str:
    """Return the launches of decoding one row."""
    q = torch.zeros(kv_heads, 8, 1, 128).bfloat16()
    kv = torch.zeros(kv_heads, kv_heads, 16384, 128).bfloat16()
    mask = None
    if masked:
        mask = anyflex.create_block_mask(lambda b, h, q, k: k < 9000, None, None, 1, 16384)
    with recorded() as launched:
        anyflex.flex_attention(
            q, kv, kv, block_mask=mask, enable_gqa=True,
            kernel_options={"cuda.recorded": {"hopper": hopper}}, backend="cuda.recorded",
        )  # fmt: skip
    return named(launched)


def test_kernels_wait_before_what_needs_it() -> None:
    """Check the order, in code for Hopper, of accesses of global memory, the wait, and the
    permission for the next launch to begin."""
    lines = printed_by("compiling_dependent_launch.py")
    found = dict(line.split(maxsplit=1) for line in lines)
    assert len(found) == len(lines)
    assert found == {
        # These kernels are launched as usual.
        "row_kernel": "next memory",
        "decode_kernel": "next memory",
        # Keys and values are complete, row values may not be.
        "key_kernel": "loads wait next memory",
        # It waits late, because its inputs were complete before the previous launch began.
        "query_kernel": "memory wait",
        "combine_kernel": "wait memory",
    }
