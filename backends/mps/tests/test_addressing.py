"""Bounds of sizes and offsets. Tensors of the device "meta" have strides, and no memory."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from anyflex.plugin import (
    BackendRefused,
    Call,
    GradInputs,
    Grads,
    Outputs,
    Saved,
    Spec,
    parse_graph,
)
from anyflex_mps.addressing import check_sizes, fits_int
from anyflex_mps.kernel import MpsKernel
from anyflex_mps.lowering import LONGEST, MOST_HEADS
from anyflex_mps.mods import mods_source
from anyflex_mps.shaders import Shaders


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        # The last element of a head is number 2^31 - 1, and one more.
        ((2, 3, 1 << 15, 1 << 16), (1 << 33, 1 << 32, 1 << 16, 1), True),
        ((1, 1, 2, 2), (1, 1, (1 << 31) - 2, 1), True),
        ((1, 1, 2, 2), (1, 1, (1 << 31) - 1, 1), False),
        ((1, 1, 2, 2), (1, 1, 1, (1 << 31) - 1), False),
        ((1, 1, 1 << 27, 16), (0, 0, 16, 1), True),
        ((1, 1, (1 << 27) + 1, 16), (0, 0, 16, 1), False),
        # Expanded rows have no extent, and one row or column has none either.
        ((1, 1, 1 << 40, 256), (0, 0, 0, 1), True),
        ((1, 1, 1, 1), (0, 0, 1 << 40, 1 << 40), True),
        ((1, 1, 0, 16), (0, 0, 16, 1), True),
    ],
    ids=str,
)
def test_offsets_inside_of_a_head_fit_up_to_the_last_one(
    shape: tuple[int, ...], strides: tuple[int, ...], fits: bool
) -> None:
    tensor = torch.empty_strided(shape, strides, device="meta")
    assert fits_int(tensor) is fits


class Recorder:
    """Compiles nothing, and keeps the sources that are launched."""

    def __init__(self) -> None:
        self.launched: dict[str, str] = {}

    def __call__(self, source: str) -> Any:
        found = re.search(r"kernel void (\w+)\(", source)
        assert found is not None
        name = found[1]

        def run(*arguments: Any, threads: list[int], group_size: list[int]) -> None:
            assert max(threads) < 1 << 32
            self.launched[name] = source

        vars(run)["max_threads_per_threadgroup"] = 1024
        return SimpleNamespace(**{name: run})


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")


def rows_of(tensor: torch.Tensor, *more: int) -> torch.Tensor:
    return torch.empty((*tensor.shape[:3], *more), dtype=torch.float32, device="meta")


def call_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Call:
    return Call(query, key, value, None, (), (), (), 0.25)


def launched(call: Call, value_dim: int, wide: str = "") -> dict[str, str]:
    """Launch forward and backward; return the sources.

    Args:
        wide: name of the only output, or gradient, whose rows are 2^31 elements apart.
    """
    spec = Spec(
        "mps", "apple9", torch.float16, call.query.shape[3], value_dim,
        needs_lse=True, gradients=("q", "k", "v"),
    )  # fmt: skip
    recorder = Recorder()
    kernel = MpsKernel(spec, Shaders(recorder), 8)

    def like(name: str, tensor: torch.Tensor, columns: int) -> torch.Tensor:
        shape = (*tensor.shape[:3], columns)
        row = 1 << 31 if name == wide else columns
        return torch.empty_strided(shape, (0, 0, row, 1), dtype=torch.float16, device="meta")

    query, key, value = call.query, call.key, call.value
    out = like("out", query, value_dim)
    saved = tuple(
        torch.empty(each.shape, dtype=each.dtype, device="meta")
        for each in kernel.saved_outputs(call)
    )
    workspace = [
        tuple(torch.empty(each.shape, device="meta") for each in kernel.workspace(call, direction))
        for direction in ("forward", "backward")
    ]
    lse = rows_of(query)
    kernel.forward(call, Outputs(out, lse, None, saved, workspace[0]))
    kernel.backward(
        call,
        Saved(out, lse, saved),
        GradInputs(like("dout", query, value_dim)),
        Grads(
            like("dq", query, query.shape[3]), like("dk", key, query.shape[3]),
            like("dv", value, value_dim), (), workspace[1],
        ),
    )  # fmt: skip
    return recorder.launched


def is_wide(source: str) -> bool:
    return "long row_stride" in source


@pytest.mark.parametrize("rows", [4, 80])
@pytest.mark.parametrize("wide", ["", "out", "dout", "dq", "dk", "dv"])
def test_one_wide_tensor_widens_the_offsets_of_its_kernels(wide: str, rows: int) -> None:
    found = launched(
        call_of(empty(1, 1, rows, 16), empty(1, 1, 70, 16), empty(1, 1, 70, 16)), 16, wide
    )
    forward = "decode" if rows == 4 else "forward"
    assert found.keys() == {forward, "rows", "keys", "queries"} | (
        {"combine"} if rows == 4 else set()
    )
    assert is_wide(found[forward]) == (wide == "out")
    assert is_wide(found["keys"]) == is_wide(found["queries"]) == (wide != "")


@pytest.mark.parametrize(("rows", "wide"), [((1 << 23) - 64, False), ((1 << 23) + 64, True)])
def test_an_output_may_need_wider_offsets_than_its_inputs(rows: int, wide: bool) -> None:
    """The query's elements fit 32 bits: those of an out of 256 columns don't."""
    call = call_of(empty(1, 1, rows, 1), empty(1, 1, 70, 1), empty(1, 1, 70, 256))
    assert is_wide(launched(call, 256)["forward"]) is wide


def test_positions_and_slots_of_packed_sequences_may_be_any_int() -> None:
    """The host doesn't know them: a difference of positions may need 64 bits."""
    graph = parse_graph("input i64 - q_idx;input i64 - b;sub i64 0,1 -;cast f32 2 -;=3")
    dense = Spec("mps", "apple9", torch.float16, 16, 16, score_graph=graph)
    packed = replace(dense, q_layout="packed", kv_layout="packed")
    of_dense, of_packed = (mods_source(spec, "score_mod()") for spec in (dense, packed))
    assert "const int v0 = q_idx - b;" in of_dense
    assert "const long v0 = " not in of_dense
    assert re.search(r"const long v\d+ = .*\(ulong\)", of_packed) is None
    assert re.search(r"const long v\d+ = v\d+ - v\d+;", of_packed)


SIZES = [
    ((1, 1, LONGEST, 1), (1, 1, 70, 1), ""),
    ((1, 1, 70, 1), (1, 1, LONGEST, 1), ""),
    ((MOST_HEADS, 1, 70, 1), (MOST_HEADS, 1, 70, 1), ""),
    ((1, MOST_HEADS, 70, 1), (1, MOST_HEADS, 70, 1), ""),
    ((1, 1, LONGEST + 1, 1), (1, 1, 70, 1), "number of query rows is 134216705"),
    ((1, 1, 70, 1), (1, 1, LONGEST + 1, 1), "number of keys is 134216705"),
    ((MOST_HEADS + 1, 1, 70, 1), (MOST_HEADS + 1, 1, 70, 1), "batch is 1048577"),
    ((1, MOST_HEADS + 1, 70, 1), (1, MOST_HEADS + 1, 70, 1), "number of query heads is 1048577"),
]


@pytest.mark.parametrize(("query", "key", "reason"), SIZES, ids=str)
def test_sizes_beyond_the_kernels_integers_are_refused(
    query: tuple[int, ...], key: tuple[int, ...], reason: str
) -> None:
    call = call_of(empty(*query), empty(*key), empty(*key))
    if not reason:
        assert launched(call, 1).keys() >= {"rows", "keys", "queries"}
        return
    cure = r"count from 0 to \d+\. Call it in parts, or use backend='reference'$"
    with pytest.raises(BackendRefused, match=f"{reason}, and its kernels {cure}"):
        launched(call, 1)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("offset", [-1, 1])
def test_offsets_of_indices_count(axis: int, offset: int) -> None:
    size = LONGEST if axis > 1 else MOST_HEADS
    shape = [size if at == axis else 1 for at in range(4)]
    query, key = empty(*shape[:3], 1), empty(*shape[:2], shape[3], 1)
    call = call_of(query, key, key)
    check_sizes(call)
    offsets = tuple(offset if at == axis else 0 for at in range(4))
    object.__setattr__(call, "index_offsets", offsets)
    with pytest.raises(BackendRefused, match=f", from {offset} on, is {size}, and its kernels"):
        check_sizes(call)


@pytest.mark.parametrize("index_width", [32, 64])
@pytest.mark.parametrize(("factor", "type_"), [(16, "int"), (17, "long")])
def test_an_index_is_int_where_no_length_makes_it_longer(
    factor: int, type_: str, index_width: Literal[32, 64]
) -> None:
    graph = parse_graph(f"input i64 - q_idx;const i64 - {factor};mul i64 0,1 -;cast f32 2 -;=3")
    spec = Spec("mps", "apple9", torch.float16, 16, 16, score_graph=graph, index_width=index_width)
    assert (LONGEST - 1) * 16 < 1 << 31 < (LONGEST - 1) * 17
    text = mods_source(spec, "score_mod()")
    assert re.search(rf"const {type_} v\d+ = (\w+) \* (\w+);", text)
