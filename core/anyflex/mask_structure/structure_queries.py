"""Queries that a block mask's structure alone can answer."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from anyflex.errors import BlockMaskError
from anyflex.mask_structure import picture
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.run_checks import checked_grid_size, checked_length
from anyflex.mask_structure.runs import PARTIAL, unpack

__all__ = ["BlockStructure"]

_FROZEN = ("offsets", "runs", "BLOCK_SIZE")


class BlockStructure:
    """The base of `BlockMask`: sizes, counts and drawings; attributes as there."""

    # Plain attributes, no properties: a call reads them on its way.
    offsets: Tensor
    runs: Tensor
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]
    _asked: tuple[int, int] | None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FROZEN:
            raise BlockMaskError(
                f"{name} of a block mask can't be assigned: build a new one with from_runs"
            )
        super().__setattr__(name, value)

    def views(self, device: torch.device | None = None) -> MaskViews:
        """Return the structure for kernels on `device` (default: the mask's), copied once."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q_LEN, KV_LEN). B and H are those that `create_block_mask` was asked for, also
        where `offsets` has one B' or H' for all. Masks made otherwise, and those rebuilt from the
        leaves of a pytree, say B' and H'."""
        batch, heads = self._asked or self.offsets.shape[:2]
        return (batch, heads, *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        """Where offsets and runs are."""
        return self.offsets.device

    def has_partial(self) -> bool:
        """Tell whether any run is PARTIAL. Reads the runs on the host."""
        host = self.views().on(torch.device("cpu"))
        return bool((unpack(host.offsets, host.runs).kind == PARTIAL).any())

    def numel(self) -> int:
        """Number of elements, live and dead."""
        batch, heads, q_length, kv_length = self.shape
        return batch * heads * q_length * kv_length

    def sparsity(self) -> float:
        """Percentage of blocks that are not visited; 0.0 if there are no blocks."""
        host = self.views().on(torch.device("cpu"))
        listed = unpack(host.offsets, host.runs)
        total = host.offsets.shape[0] * host.offsets.shape[1] * host.q_blocks * host.kv_blocks
        visited = int((listed.end - listed.first).sum())
        return 100 * (1 - visited / total) if total else 0.0

    def to_dense(self) -> Tensor:
        """Return int32 [B, H, Qb, Kb]: 1 for a block that is visited."""
        return (self.views().dense() != 0).to(torch.int32).expand(*self.shape[:2], -1, -1)

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Draw the blocks, as torch does: █ all visited, ░ some, a space none.

        Args:
            grid_size: most (rows, columns) of characters; -1 for one a block.
            limit: most (batch, head) pairs that are drawn.

        Raises:
            BlockMaskError: `grid_size` is neither such an int nor a pair of them, or `limit` is
                no int or is negative.
        """
        return picture.draw(
            self.views(), checked_grid_size(grid_size), checked_length("limit", limit)
        )

    def plot(self, path: str | os.PathLike[str], batch: int = 0, head: int = 0) -> None:
        """Write a PNG picture of the blocks of one batch entry and head; needs no library.

        FULL is dark, PARTIAL light blue, what is not visited grey; queries go down, keys to the
        right. Of a mask of more than 512 blocks a side, a pixel shows the mean of several.

        Raises:
            BlockMaskError: `path` is no path, or doesn't end in .png, or `batch` or `head` is out
                of range, or B or H is 0.
            OSError: the file can't be written.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise BlockMaskError(f"path must be a str or a path, got {type(path).__name__}")
        if not os.fspath(path).lower().endswith(".png"):
            raise BlockMaskError(f"path must end in .png, the one format of plot, got {path!r}")
        for name, value, size in (
            ("batch", batch, self.shape[0]),
            ("head", head, self.shape[1]),
        ):
            if not size:
                raise BlockMaskError(
                    f"a mask of shape {self.shape} has no batch entry and head to plot"
                )
            if not isinstance(value, int) or not 0 <= value < size:
                raise BlockMaskError(f"{name} must be in 0..{size - 1}, got {value!r}")
        with open(path, "wb") as file:
            # Places that share one stored structure share its picture.
            batches, heads = self.offsets.shape[:2]
            file.write(picture.png(self.views(), min(batch, batches - 1), min(head, heads - 1)))

    def _repr_png_(self) -> bytes | None:
        """The picture of the first batch entry and head, for notebooks."""
        if not self.offsets.shape[0] * self.offsets.shape[1]:
            return None
        return picture.png(self.views(), 0, 0)

    def _repr_html_(self) -> str:
        """Pictures of the first four batch entries and heads with a legend, for notebooks."""
        q_block, kv_block = self.BLOCK_SIZE
        facts = (
            f"{self.shape}, blocks of {q_block} queries (down) by {kv_block} keys, "
            f"{self.sparsity():.2f} % not visited"
        )
        return picture.html(self.views(), facts, 4)

    def __str__(self) -> str:
        drawn = self.to_string().strip()
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{drawn}\n)"
