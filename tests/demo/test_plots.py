"""The pictures, where matplotlib is installed, and what they are drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import anyflex
from anyflex.demo.plots import block_kinds, plot_block_mask, plot_loss


def _mask() -> anyflex.BlockMask:
    document = (torch.arange(256) >= 100).long()
    return anyflex.create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv]),
        None,
        None,
        256,
        256,
        BLOCK_SIZE=32,
    )


def test_the_picture_tells_the_kinds_of_blocks_apart() -> None:
    kinds = block_kinds(_mask())
    assert len(kinds) == 8 and all(len(row) == 8 for row in kinds)
    document = (torch.arange(256) >= 100).long()
    q, kv = torch.arange(256)[:, None], torch.arange(256)
    live = ((q >= kv) & (document[q] == document[kv])).view(8, 32, 8, 32)
    share = live.float().mean((1, 3))
    expected = torch.where(share == 1, 2, torch.where(share == 0, 0, 1))
    assert torch.equal(torch.tensor(kinds), expected)


def test_two_png_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra demo is not installed")
    plot_block_mask(_mask(), tmp_path / "mask.png")
    plot_loss([5.0, 4.0, 3.5], (5.5, 3.4), tmp_path / "loss.png")
    for name in ("mask.png", "loss.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
