"""Reads of captured tensors in Metal: every dtype, any strides, indices outside, no elements."""

from __future__ import annotations

import pytest
import torch
from metal_values import values_of_nodes
from torch import Tensor

from anyflex.plugin import DTYPES, Node

COUNT = 300
HELD = [name for name in DTYPES if name != "f64"]
INDEX_TYPES = ["u8", "i8", "i16", "i32", "i64"]


def table_of(name: str, way: str) -> Tensor:
    """Return a tensor [4, 6, 5] of a type, laid out in a way."""
    generator = torch.Generator().manual_seed(len(name + way))
    dtype = DTYPES[name]
    shapes = {"expanded": (4, 1, 5), "transposed": (5, 6, 4), "sliced": (9, 6, 15)}
    shape = shapes.get(way, (4, 6, 5))
    if dtype.is_floating_point:
        values = torch.randn(shape, generator=generator).to(dtype)
    elif dtype is torch.bool:
        values = torch.rand(shape, generator=generator) < 0.5
    else:
        limits = torch.iinfo(dtype)
        values = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)
    if way == "transposed":
        return values.transpose(0, 2)
    return values[1::2, :, 2::3] if way == "sliced" else values.expand(4, 6, 5)


def placed(index: Tensor, size: int) -> Tensor:
    """Return where an index reads: negative ones count from the end, others are clamped."""
    index = index.long()
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def loaded(table: Tensor, indices: list[Tensor]) -> Tensor:
    """Return what the emulator reads at the indices, which are captured tensors themselves."""
    place = Node("input", torch.int64, (), "q_idx")
    nodes = [place] + [Node("load", x.dtype, (0,), i) for i, x in enumerate(indices)]
    arguments = tuple(range(1, len(indices) + 1))
    nodes.append(Node("load", table.dtype, arguments, len(indices)))
    columns = torch.zeros(len(indices[0]) if indices else COUNT, dtype=torch.int64)
    (found,) = values_of_nodes(nodes, [len(nodes) - 1], [*indices, table], kv_idx=columns)
    return found


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found, wanted.float() if wanted.is_floating_point() else wanted.long())


def draw(low: int, high: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (COUNT,), generator=generator).to(dtype)


@pytest.mark.parametrize("way", ["plain", "expanded", "transposed", "sliced"])
@pytest.mark.parametrize("name", HELD)
def test_a_load_reads_the_element_whatever_the_strides(name: str, way: str) -> None:
    table = table_of(name, way)
    indices = [draw(-9, 9, torch.int64, seed) for seed in range(3)]
    places = [placed(index, size) for index, size in zip(indices, table.shape, strict=True)]
    assert same(loaded(table, indices), table[tuple(places)])


@pytest.mark.parametrize("name", INDEX_TYPES)
def test_an_index_of_any_type_and_size_stays_inside(name: str) -> None:
    dtype = DTYPES[name]
    limits = torch.iinfo(dtype)
    index = draw(max(limits.min, -20), 20, dtype, 3)
    extremes = [limits.min, limits.max, limits.min + 1, limits.max // 2]
    index[: len(extremes)] = torch.tensor(extremes, dtype=dtype)
    table = torch.randn(11, generator=torch.Generator().manual_seed(1))
    assert same(loaded(table, [index]), table[placed(index, 11)])


def test_an_offset_of_64_bits_is_not_cut() -> None:
    """The memory is reserved, but for the pages of three elements."""
    far = torch.empty((2 << 32) + 1, dtype=torch.uint8)[:: 1 << 32]
    far.copy_(torch.tensor([3, 5, 7]))
    index = draw(-3, 3, torch.int64, 4)
    assert same(loaded(far, [index]), far[placed(index, 3)])


def test_an_index_that_is_never_negative_is_clamped_too() -> None:
    table = torch.randn(7, generator=torch.Generator().manual_seed(1))
    place = Node("input", torch.int64, (), "q_idx")
    nodes = [place, Node("load", torch.float32, (0,), 0)]
    (found,) = values_of_nodes(nodes, [1], [table], kv_idx=torch.zeros(20))
    assert torch.equal(found, table[torch.arange(20).clamp(max=6)])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (3, 0, 2)])
@pytest.mark.parametrize("name", ["f32", "bf16", "i64", "bool"])
def test_a_tensor_without_elements_reads_as_0(name: str, shape: tuple[int, ...]) -> None:
    indices = [draw(-2, 2, torch.int64, seed) for seed in range(len(shape))]
    found = loaded(torch.zeros(shape, dtype=DTYPES[name]), indices)
    assert found.eq(0).all()


@pytest.mark.parametrize("name", HELD)
def test_a_tensor_without_dimensions_is_its_element(name: str) -> None:
    value = table_of(name, "plain")[0, 0, 0]
    assert same(loaded(value, []), value.expand(COUNT))
