"""Decoding against a dense formula: all numbers of rows and all widths that its products treat
apart."""

from __future__ import annotations

import pytest
import torch
from dense import assert_near, dense_attention
from torch import Tensor

import anyflex

# Neither a multiple of a turn's 64 keys, nor of a tile's 256.
KEYS = 1000
WIDTHS = [(128, 128), (64, 256), (96, 32), (32, 160), (40, 128), (64, 72), (72, 64), (256, 96)]
KV_HEADS = 2


def drawn(
    rows: int, widths: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with this many rows per KV head; keys and values are laid out as
    projections leave them."""
    generator = torch.Generator().manual_seed(rows)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = some(2, KV_HEADS * rows, 1, widths[0])
    key, value = (some(2, KEYS, KV_HEADS, width).transpose(1, 2) for width in widths)
    return query, key, value


def recent(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k > 300) & (k < 900)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16])
def test_decoding_rounds_nothing_but_its_result(
    rows: int, widths: tuple[int, int], level: str
) -> None:
    query, key, value = drawn(rows, widths)
    out = anyflex.flex_attention(query, key, value, enable_gqa=True, backend="cpu")
    wanted, _ = dense_attention(query, key, value)
    # Weights rounded to bfloat16 would change one element in four.
    changed = (out != wanted.bfloat16()).double().mean().item()
    assert changed < 0.02
    assert_near(out, wanted, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 96, 128])
def test_rows_beside_one_another_and_apart(width: int, dtype: torch.dtype, level: str) -> None:
    query, key, value = drawn(7, (width, width), dtype)
    wanted, _ = dense_attention(query, key, value)
    # The level decides which of these are read in order, and which in streams.
    for read in (key, value), (key.contiguous(), value.contiguous()):
        out = anyflex.flex_attention(query, *read, enable_gqa=True, backend="cpu")
        assert_near(out, wanted, dtype)


def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (q - k) * 0.01


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (9, torch.float16), (16, torch.float32), (17, torch.float16), (64, torch.float32),
        (80, torch.float32), (80, torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("widths", [(128, 64), (72, 96), (40, 512), (512, 17)], ids=str)
def test_from_nine_rows_on_each_is_a_lane(
    widths: tuple[int, int], rows: int, dtype: torch.dtype, level: str
) -> None:
    # With 80 rows no head has more than four; with other numbers one head has them all.
    heads, length = (20, 4) if rows == 80 else (1, rows)
    _, key, value = drawn(1, widths, dtype)
    query = torch.randn(2, heads * KV_HEADS, length, widths[0]).to(dtype)
    assert "decode" in str(anyflex.explain(query, key, value, enable_gqa=True, backend="cpu"))
    wanted, _ = dense_attention(query, key, value)
    # Rows with gaps, elements with gaps, and contiguous ones.
    apart = tuple(each.mT.contiguous().mT for each in (key, value))
    for read in (key, value), apart, (key.contiguous(), value.contiguous()):
        out = anyflex.flex_attention(query, *read, enable_gqa=True, backend="cpu")
        assert_near(out, wanted, dtype)
    mask = anyflex.create_block_mask(recent, None, None, length, KEYS, BLOCK_SIZE=128)
    wanted, _ = dense_attention(query, key, value, biased, recent)
    out = anyflex.flex_attention(query, key, value, biased, mask, enable_gqa=True, backend="cpu")
    assert_near(out, wanted, dtype)


@pytest.mark.parametrize("beside", [False, True], ids=["apart", "beside"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_an_infinite_value_reaches_its_own_element(rows: int, beside: bool, level: str) -> None:
    query, key, value = drawn(rows, (128, 128))
    if beside:
        key, value = key.contiguous(), value.contiguous()
    value[:, :, 500, 6] = torch.inf
    out = anyflex.flex_attention(query, key, value, enable_gqa=True, backend="cpu")
    assert (out[..., 6] == torch.inf).all()
    value[:, :, 500, 6] = 0
    wanted, _ = dense_attention(query, key, value)
    others = torch.arange(128) != 6
    assert_near(out[..., others], wanted[..., others], torch.bfloat16)


@pytest.mark.parametrize("beside", [False, True], ids=["apart", "beside"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_what_is_at_dead_keys_reaches_nothing(rows: int, beside: bool, level: str) -> None:
    query, key, value = drawn(rows, (128, 128))
    if beside:
        key, value = key.contiguous(), value.contiguous()
    wanted, _ = dense_attention(query, key, value, None, recent)
    mask = anyflex.create_block_mask(recent, None, None, 1, KEYS, BLOCK_SIZE=128)
    dead = ~recent(*torch.zeros(3, 1), torch.arange(KEYS))
    key[:, :, dead] = torch.nan
    value[:, :, dead] = torch.inf
    out = anyflex.flex_attention(query, key, value, None, mask, enable_gqa=True, backend="cpu")
    assert_near(out, wanted, torch.bfloat16)
