"""Pictures of block masks: characters, PNG files read back by a decoder of the tests, HTML."""

from __future__ import annotations

import base64
import itertools
import random
import re
import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.combine import noop_mask
from anyflex.block_mask.create import create_block_mask
from anyflex.errors import BlockMaskError
from anyflex.mask_structure.picture import coarse_grid
from tests.core.given_masks import by_batch_and_head, causal

EMPTY, FULL, PARTIAL = (0xF4, 0xF4, 0xF4), (0x1F, 0x4E, 0x79), (0x8F, 0xB8, 0xDE)
WHITE = (255, 255, 255)


def decoded(data: bytes) -> Tensor:
    """uint8 [height, width, 3] of a PNG file; every checksum is checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert zlib.crc32(name + body) == checksum
        chunks[name] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert form == [8, 2, 0, 0, 0]
    raw = torch.tensor(list(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8)
    lines = raw.view(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize("seed", range(10))
def test_a_cell_counts_the_blocks_in_it(seed: int) -> None:
    rng = random.Random(seed)
    q, kv, block = rng.randint(0, 300), rng.randint(0, 300), (rng.randint(3, 20), 8)
    mask = create_block_mask(by_batch_and_head, 2, 2, q, kv, BLOCK_SIZE=block)
    kinds = mask.views().dense()
    rows, columns = rng.randint(1, 9), rng.randint(1, 9)
    for b, h in itertools.product(range(2), range(2)):
        full, partial, size = coarse_grid(mask.views(), b, h, rows, columns)
        for i, j in itertools.product(range(size.shape[0]), range(size.shape[1])):
            cell = kinds[b, h, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert int(full[i, j]) == int((cell == 1).sum())
            assert int(partial[i, j]) == int((cell == 2).sum())
            assert int(size[i, j]) == cell.numel() > 0


def test_a_plot_shows_each_block_in_its_colour(tmp_path: Path) -> None:
    mask = create_block_mask(causal, None, None, 64, 48, BLOCK_SIZE=16)
    mask.plot(tmp_path / "mask.png")
    image = decoded((tmp_path / "mask.png").read_bytes())
    side = image.shape[0] // 4
    assert image.shape == (4 * side, 3 * side, 3) and side > 100
    colours = {0: EMPTY, 1: FULL, 2: PARTIAL}
    for row, column in itertools.product(range(4), range(3)):
        pixels = image[row * side : (row + 1) * side - 1, column * side : (column + 1) * side - 1]
        wanted = colours[int(mask.views().dense()[0, 0, row, column])]
        assert bool((pixels == torch.tensor(wanted, dtype=torch.uint8)).all())
    assert tuple(image[side - 1, 0].tolist()) == WHITE
    assert decoded(mask._repr_png_() or b"").equal(image)


def test_a_plot_is_of_the_batch_entry_and_head_asked_for(tmp_path: Path) -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    mask.plot(str(tmp_path / "one.PNG"), batch=1, head=2)
    assert (tmp_path / "one.PNG").read_bytes() == mask[1, 2]._repr_png_()
    assert (tmp_path / "one.PNG").read_bytes() != mask._repr_png_()
    for options, message in (
        ({"batch": 2}, r"batch must be in 0\.\.1, got 2"),
        ({"head": -1}, r"head must be in 0\.\.2, got -1"),
        ({"head": "1"}, "head must be in 0"),
    ):
        with pytest.raises(BlockMaskError, match=message):
            mask.plot(tmp_path / "two.png", **options)  # type: ignore[arg-type]
    empty = create_block_mask(by_batch_and_head, 0, 3, 70, 90, BLOCK_SIZE=16)
    with pytest.raises(BlockMaskError, match=r"\(0, 3, 70, 90\) has no batch entry and head to"):
        empty.plot(tmp_path / "two.png")
    with pytest.raises(BlockMaskError, match=r"path must end in \.png"):
        mask.plot(tmp_path / "mask.svg")
    with pytest.raises(BlockMaskError, match="path must be a str or a path, got int"):
        mask.plot(3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="nowhere"):
        mask.plot(tmp_path / "nowhere" / "mask.png")


def test_a_picture_of_a_huge_mask_is_small_and_shows_means() -> None:
    rows = 8192
    offsets = torch.arange(rows + 1, dtype=torch.int32)[None, None]
    line = torch.arange(rows, dtype=torch.int32)
    runs = torch.stack([line * 0, line + 1, line * 0 + 1], 1)
    mask = BlockMask.from_runs(offsets, runs, seq_lengths=(rows * 128, rows * 128))
    data = mask._repr_png_()
    assert data is not None and len(data) < 50_000
    image = decoded(data)
    assert image.shape == (512, 512, 3)
    assert tuple(image[300, 100].tolist()) == FULL and tuple(image[100, 300].tolist()) == EMPTY
    # A cell of 16 x 16 blocks on the diagonal has 136 FULL blocks.
    mean = [round((136 * a + 120 * b) / 256) for a, b in zip(FULL, EMPTY, strict=True)]
    assert image[200, 200].tolist() == mean
    assert mask.to_string().count("░") == 2 * 20


@pytest.mark.parametrize("lengths", [(1, 100_000), (100_000, 1), (0, 5), (5, 0), (1, 1)])
def test_a_picture_of_any_shape_can_be_seen(lengths: tuple[int, int]) -> None:
    mask = create_block_mask(noop_mask, None, None, *lengths)
    image = decoded(mask._repr_png_() or b"")
    assert 16 <= image.shape[0] <= 1024 and 16 <= image.shape[1] <= 1024


def test_a_mask_without_batch_entries_has_no_picture() -> None:
    mask = create_block_mask(by_batch_and_head, 0, 2, 16, 16)
    assert mask._repr_png_() is None
    assert "BlockMask" in mask._repr_html_()


def test_html_has_pictures_a_legend_and_facts() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=(16, 32))
    text = mask._repr_html_()
    pictures = re.findall(r"base64,([^']*)'", text)
    assert [base64.b64decode(p) for p in pictures] == [
        mask[b, h]._repr_png_() for b, h in ((0, 0), (0, 1), (0, 2), (1, 0))
    ]
    for part in (
        "(2, 3, 70, 90)",
        "16 queries",
        "32 keys",
        f"{mask.sparsity():.2f} %",
        "not visited",
        "PARTIAL",
        "FULL",
        "batch 1, head 0",
        "2 more",
    ):
        assert part in text
    single = create_block_mask(causal, None, None, 64, 64)._repr_html_()
    assert "more" not in single and "batch 0, head 0</fig" not in single
