"""Rows 51 to 90: block masks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex

import anyflex
from anyflex import BlockMask, create_block_mask
from anyflex.errors import ArgumentTypeError, BlockMaskError
from tests.misuse.row import Attend, Table, inputs

__all__ = ["TABLE"]

TABLE = Table()
legal = TABLE.legal


def wrong(
    number: int, *names: str, error: type[Exception] = BlockMaskError, **options: Any
) -> Any:
    """Enter a row; nearly all raise BlockMaskError."""
    return TABLE.wrong(number, error, *names, **options)


def building(number: int, *names: str, error: type[Exception] = BlockMaskError) -> Any:
    """Enter a row that ends before any call."""
    return TABLE.wrong(number, error, *names, attends=False)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def by_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q + b >= k


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q + h >= k


@building(51, r"\b3\b", r"\b4\b|q_idx")
def mask_mod_with_three_arguments(attend: Attend) -> None:
    create_block_mask(lambda b, q, k: q >= k, 1, 1, 16, 16)


@building(51, r"\b5\b", r"\b4\b|q_idx")
def mask_mod_with_five_arguments(attend: Attend) -> None:
    create_block_mask(lambda s, b, h, q, k: q >= k, 1, 1, 16, 16)


@building(52, "int64", "!= 0")
def mask_mod_returns_an_int(attend: Attend) -> None:
    create_block_mask(lambda b, h, q, k: q - k, 1, 1, 16, 16)


@building(53, "float32")
def mask_mod_returns_a_float(attend: Attend) -> None:
    create_block_mask(lambda b, h, q, k: q * 0.5, 1, 1, 16, 16)


@legal(54, compiled=True)
def mask_mod_returns_true(attend: Attend) -> None:
    mask = create_block_mask(lambda b, h, q, k: True, 1, 1, 16, 16)
    query, key, value = inputs()
    assert torch.equal(attend(query, key, value, block_mask=mask), attend(query, key, value))


@building(55, r"\[3\]|\(3,\)")
def mask_mod_returns_a_row(attend: Attend) -> None:
    table = torch.ones(16, 3, dtype=torch.bool)
    create_block_mask(lambda b, h, q, k: table[q], 1, 1, 16, 16)


@legal(56, attends=False)
def mask_mod_captures_what_requires_a_gradient(attend: Attend) -> None:
    table = torch.randn(16, requires_grad=True)
    create_block_mask(lambda b, h, q, k: table[k] > 0, 1, 1, 16, 16)


@building(57, "Q_LEN", "-1")
def negative_q_length(attend: Attend) -> None:
    create_block_mask(causal, 1, 1, -1, 16)


@building(57, "KV_LEN", "-16")
def negative_kv_length(attend: Attend) -> None:
    create_block_mask(causal, 1, 1, 16, -16)


@building(58, "KV_LEN", "float")
def kv_length_is_a_float(attend: Attend) -> None:
    create_block_mask(causal, 1, 1, 16, 16.0)  # type: ignore[arg-type]


@legal(59, attends=False)
def empty_masks(attend: Attend) -> None:
    for batch, heads in ((0, 1), (1, 0), (0, 0)):
        mask = create_block_mask(lambda b, h, q, k: q + b + h >= k, batch, heads, 16, 16)
        assert mask.shape == (batch, heads, 16, 16)
        assert "BlockMask" in repr(mask)


@building(60, r"\bB\b", r"1\.5|float")
def batch_is_a_float(attend: Attend) -> None:
    create_block_mask(causal, 1.5, 1, 16, 16)  # type: ignore[arg-type]


@building(61, "BLOCK_SIZE", r"\b0\b")
def block_size_is_zero(attend: Attend) -> None:
    create_block_mask(causal, 1, 1, 16, 16, BLOCK_SIZE=0)


@building(62, "BLOCK_SIZE", "-4")
def block_size_is_negative(attend: Attend) -> None:
    create_block_mask(causal, 1, 1, 16, 16, BLOCK_SIZE=-4)


@building(63, "BLOCK_SIZE", "int", "pair")
def block_size_is_a_float(attend: Attend) -> None:
    create_block_mask(causal, 1, 1, 16, 16, BLOCK_SIZE=16.0)  # type: ignore[arg-type]


@building(63, "BLOCK_SIZE", "int", "pair")
def block_size_is_a_triple(attend: Attend) -> None:
    create_block_mask(causal, 1, 1, 16, 16, BLOCK_SIZE=(16, 16, 16))  # type: ignore[arg-type]


@building(64, "device", "warp")
def unknown_device(attend: Attend) -> None:
    create_block_mask(causal, 1, 1, 16, 16, device="warp")


@wrong(65, r"\b32\b", r"\b16\b", "row_slice|rebuild|build", compiled=True)
def mask_is_longer_than_the_call(attend: Attend) -> None:
    attend(*inputs(), block_mask=create_block_mask(causal, 1, 1, 32, 32))


@wrong(66, r"\b8\b", r"\b16\b", compiled=True)
def mask_is_shorter_than_the_call(attend: Attend) -> None:
    attend(*inputs(), block_mask=create_block_mask(causal, 1, 1, 8, 8))


@wrong(67, r"\b2\b", r"\b3\b", "1 or", compiled=True)
def mask_batch_is_smaller(attend: Attend) -> None:
    attend(*inputs(batch=3), block_mask=create_block_mask(by_batch, 2, 1, 16, 16))


@wrong(68, r"\b3\b", r"\b1\b", compiled=True)
def mask_batch_is_larger(attend: Attend) -> None:
    attend(*inputs(batch=1), block_mask=create_block_mask(by_batch, 3, 1, 16, 16))


@wrong(69, r"\b2\b", r"\b4\b", compiled=True)
def mask_has_the_key_heads(attend: Attend) -> None:
    mask = create_block_mask(by_head, 1, 2, 16, 16)
    attend(*inputs(heads=4, kv_heads=2), block_mask=mask, enable_gqa=True)


@wrong(70, "meta", "cpu")
def mask_is_on_a_device_without_values(attend: Attend) -> None:
    attend(*inputs(), block_mask=create_block_mask(causal, 1, 1, 16, 16).to("meta"))


def from_lists(
    counts: list[int], indices: list[list[int]], *, dtype: torch.dtype = torch.int32, **more: Any
) -> BlockMask:
    """A mask of 2 x 2 blocks of 16 from torch's index lists."""
    return BlockMask.from_kv_blocks(
        torch.tensor([[counts]], dtype=dtype),
        torch.tensor([[indices]], dtype=dtype),
        BLOCK_SIZE=16,
        mask_mod=causal,
        seq_lengths=(32, 32),
        **more,
    )


@building(71, "row", r"\b5\b", r"\b2\b")
def block_past_the_last_column(attend: Attend) -> None:
    from_lists([1, 2], [[0, 0], [0, 5]])


@building(72, "row", "-1")
def negative_block(attend: Attend) -> None:
    from_lists([1, 2], [[0, 0], [0, -1]])


@building(73, "row", r"\b1\b", "twice|duplicate")
def duplicate_block(attend: Attend) -> None:
    from_lists([1, 2], [[0, 0], [1, 1]])


@legal(74, attends=False)
def unsorted_blocks(attend: Attend) -> None:
    assert from_lists([1, 2], [[0, 0], [1, 0]]) == from_lists([1, 2], [[0, 0], [0, 1]])


@building(75, "row", r"\b3\b", r"\b2\b")
def count_larger_than_the_list(attend: Attend) -> None:
    from_lists([1, 3], [[0, 0], [0, 1]])


@building(76, "row", "-1")
def negative_count(attend: Attend) -> None:
    from_lists([1, -1], [[0, 0], [0, 1]])


@building(77, "float32", "int32")
def counts_are_floats(attend: Attend) -> None:
    from_lists([1, 2], [[0, 0], [0, 1]], dtype=torch.float32)


@building(78, "full_kv_indices")
def full_counts_without_indices(attend: Attend) -> None:
    counts = torch.tensor([[[0, 0]]], dtype=torch.int32)
    from_lists([1, 2], [[0, 0], [0, 1]], full_kv_num_blocks=counts)


@building(79, "row", "block 0", "full", "partial")
def block_both_full_and_partial(attend: Attend) -> None:
    from_lists(
        [1, 2],
        [[0, 0], [0, 1]],
        full_kv_num_blocks=torch.tensor([[[0, 1]]], dtype=torch.int32),
        full_kv_indices=torch.tensor([[[[0, 0], [0, 0]]]], dtype=torch.int32),
    )


def from_runs(offsets: list[int], runs: list[tuple[int, int, int]], **more: Any) -> BlockMask:
    """A mask of 2 x 4 blocks of 16."""
    more.setdefault("mask_mod", causal)
    return BlockMask.from_runs(
        torch.tensor([[offsets]], dtype=torch.int32),
        torch.tensor(runs, dtype=torch.int32),
        seq_lengths=(32, 64),
        block_size=16,
        **more,
    )


@building(80, "run 1", r"\b2\b", r"\b3\b")
def run_that_ends_before_it_begins(attend: Attend) -> None:
    from_runs([0, 1, 2], [(0, 1, 2), (3, 2, 2)])


@building(80, "run 0", r"\b1\b")
def empty_run(attend: Attend) -> None:
    from_runs([0, 1, 2], [(1, 1, 2), (0, 2, 2)])


@building(81, r"runs 1 and 2", "row")
def overlapping_runs(attend: Attend) -> None:
    from_runs([0, 1, 3], [(0, 1, 2), (0, 2, 1), (1, 3, 2)])


@building(81, r"runs 1 and 2", "row")
def unsorted_runs(attend: Attend) -> None:
    from_runs([0, 1, 3], [(0, 1, 2), (2, 3, 1), (0, 1, 2)])


@building(82, "run 1", r"\b7\b", "FULL", "PARTIAL")
def unknown_kind(attend: Attend) -> None:
    from_runs([0, 1, 2], [(0, 1, 2), (0, 2, 7)])


@building(83, "position", r"\b0\b")
def decreasing_offsets(attend: Attend) -> None:
    from_runs([0, 2, 0], [(0, 1, 2), (2, 3, 2)])


@building(83, "offsets", r"\b5\b", r"\b2\b")
def offsets_past_the_runs(attend: Attend) -> None:
    from_runs([0, 1, 5], [(0, 1, 2), (0, 2, 2)])


@wrong(84, "row|PARTIAL", "noop_mask")
def partial_run_without_a_mask_mod(attend: Attend) -> None:
    mask = from_runs([0, 1, 2], [(0, 1, 2), (0, 2, 1)], mask_mod=None)
    attend(*inputs(q_length=32, kv_length=64), block_mask=mask)


@building(85, r"\b7\b", "batch|B")
def slice_out_of_range(attend: Attend) -> None:
    create_block_mask(by_batch, 2, 1, 16, 16)[7]


@building(85, r"\b7\b", "head|H")
def head_slice_out_of_range(attend: Attend) -> None:
    create_block_mask(by_head, 1, 2, 16, 16)[0, 7]


@wrong(86, "mask_mod", "assign|set")
def sliced_mask_without_a_mask_mod(attend: Attend) -> None:
    mask = torch_flex.create_block_mask(causal, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=16)
    sliced = mask[:, :, 1:]
    sliced.seq_lengths = (16, 32)  # torch 2.13 keeps the old lengths
    attend(*inputs(q_length=16, kv_length=32), block_mask=sliced)


@building(87, r"\b[12]\b|second", "int", error=ArgumentTypeError)
def and_masks_of_a_number(attend: Attend) -> None:
    anyflex.and_masks(causal, 3)  # type: ignore[arg-type]


@building(88, "object", "attribute|kv_num_blocks", error=ArgumentTypeError)
def from_torch_of_something_else(attend: Attend) -> None:
    BlockMask.from_torch(object())


@building(90, "2147483648")
def more_runs_than_int32_counts(attend: Attend) -> None:
    # Expanded, so that it takes no memory; a check that copies it would take 24 GB, so the call is
    # made in a process that may not.
    done = subprocess.run(
        [sys.executable, "-c", _TOO_MANY], capture_output=True, text=True, timeout=120
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "BlockMaskError" in last, done.stderr
    raise BlockMaskError(last)


_TOO_MANY = """
import resource
import torch
import anyflex
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
offsets = torch.tensor([[[0, 2**31 - 1]]], dtype=torch.int32)
runs = torch.tensor([[0, 1, 1]], dtype=torch.int32).expand(2**31, 3)
anyflex.BlockMask.from_runs(offsets, runs, seq_lengths=(16, 16), block_size=16, mask_mod=None)
"""
