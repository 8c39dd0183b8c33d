"""Row slices on an accelerator: steps of decoding and aligned slices of a mask don't wait for the
device."""

from __future__ import annotations

import pytest
import torch

from anyflex.block_mask.create import create_block_mask
from tests.core.given_masks import by_batch_and_head

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_steps_and_aligned_slices_do_not_synchronise() -> None:
    for sizes in ((1, 1), (2, 3)):
        here = create_block_mask(by_batch_and_head, *sizes, 70, 90, BLOCK_SIZE=16)
        mask = create_block_mask(by_batch_and_head, *sizes, 70, 90, device="cuda", BLOCK_SIZE=16)
        assert mask == here and hash(mask) == hash(here)
        mask.row_slice(0, 1)
        ranges = [(t, t + 1) for t in range(70)] + [(16, 48), (32, 70), (0, 0), (33, 40)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            slices = [mask.row_slice(*rows) for rows in ranges]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for rows, sliced in zip(ranges, slices, strict=True):
            wanted = here.row_slice(*rows)
            assert sliced.device.type == "cuda" and sliced == wanted
            assert torch.equal(sliced.offsets.cpu(), wanted.offsets)
            used = int(wanted.offsets.max())
            assert torch.equal(sliced.runs.cpu()[:used], wanted.runs[:used])
        assert mask.row_slice(5, 60) == here.row_slice(5, 60)
        assert mask.extend(100, 80) == here.extend(100, 80)
        assert mask[:, :, [3, 1]].row_slice(4, 9) == here[:, :, [3, 1]].row_slice(4, 9)
