"""Block masks in torch's form, checked pair by pair."""

from __future__ import annotations

import pytest
import torch
from anyflex_torch_flex.block_masks import torch_block_mask
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import anyflex
from anyflex.plugin import PARTIAL, MaskViews


def visited_pairs(mask: BlockMask, lengths: tuple[int, int]) -> Tensor:
    """bool [B', H', Q, KV]: pairs that torch's kernels visit."""
    q_block, kv_block = mask.BLOCK_SIZE
    batch, heads = mask.kv_num_blocks.shape[:2]
    live = torch.zeros(batch, heads, *lengths, dtype=torch.bool)
    index = torch.meshgrid(*(torch.arange(n) for n in live.shape), indexing="ij")
    kept = mask.mask_mod(*index).expand(live.shape)
    for counts, blocks, full in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for b, h, row in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
            for column in blocks[b, h, row, : counts[b, h, row]].tolist():
                rows = slice(row * q_block, (row + 1) * q_block)
                keys = slice(column * kv_block, (column + 1) * kv_block)
                live[b, h, rows, keys] = True if full else kept[b, h, rows, keys]
    return live


@pytest.mark.parametrize("multiple", [1, 32, 128])
@pytest.mark.parametrize("heads", [None, 3])
def test_no_pair_is_lost_or_gained_where_blocks_become_larger(
    multiple: int, heads: int | None
) -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k - 7 * h) & ((q // 40) == (k // 40)) | (k < 20)

    lengths = (150, 170)
    built = anyflex.create_block_mask(mask_mod, None, heads, *lengths, BLOCK_SIZE=16)
    views = MaskViews(built.offsets, built.runs, *lengths, (16, 16))
    # FULL blocks and blocks that aren't listed don't call the function.
    wrong_elsewhere = visited_pairs(torch_block_mask(views, None, 1), lengths)
    kinds = views.dense()

    def partly_wrong(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        kind = kinds[b * int(kinds.shape[0] > 1), h * int(kinds.shape[1] > 1), q // 16, k // 16]
        return torch.where(kind == PARTIAL, mask_mod(b, h, q, k), kind == 0)

    index = torch.meshgrid(*(torch.arange(n) for n in wrong_elsewhere.shape), indexing="ij")
    found = visited_pairs(torch_block_mask(views, partly_wrong, multiple), lengths)
    assert torch.equal(found, mask_mod(*index).expand(found.shape))
    without = visited_pairs(torch_block_mask(views, None, multiple), lengths)
    assert torch.equal(without, wrong_elsewhere)


def test_the_structure_is_made_once_for_a_mask() -> None:
    built = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, BLOCK_SIZE=16)
    views = MaskViews(built.offsets, built.runs, 64, 64, (16, 16))
    for multiple in (1, 128):
        first, second = (torch_block_mask(views, None, multiple) for _ in range(2))
        assert first is not second and first.q_indices is second.q_indices


@pytest.mark.parametrize("multiple", [1, 128])
def test_the_lists_of_columns_are_torch_s_own(multiple: int) -> None:
    built = anyflex.create_block_mask(
        lambda b, h, q, k: (q >= k) & (k // 70 != 1), None, None, 300, 500, BLOCK_SIZE=32
    )
    views = MaskViews(built.offsets, built.runs, 300, 500, (32, 32))
    found = torch_block_mask(views, None, multiple)
    torchs = BlockMask.from_kv_blocks(
        found.kv_num_blocks,
        found.kv_indices,
        found.full_kv_num_blocks,
        found.full_kv_indices,
        BLOCK_SIZE=found.BLOCK_SIZE,
        seq_lengths=(300, 500),
    )
    for prefix in ("", "full_"):
        counts = getattr(found, f"{prefix}q_num_blocks")
        assert torch.equal(counts, getattr(torchs, f"{prefix}q_num_blocks"))
        for row, count in enumerate(counts[0, 0].tolist()):
            listed = (getattr(mask, f"{prefix}q_indices")[0, 0, row] for mask in (found, torchs))
            assert len({tuple(each[:count].tolist()) for each in listed}) == 1
