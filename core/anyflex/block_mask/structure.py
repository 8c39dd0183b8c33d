"""What can be asked of a block mask's structure alone."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.block_mask import picture
from anyflex.block_mask.runs import PARTIAL, unpack
from anyflex.block_mask.views import MaskViews

__all__ = ["BlockStructure"]


class BlockStructure:
    """The base of `BlockMask`: sizes, counts and drawings; attributes as there."""

    # Plain attributes, no properties: the traced half of a call reads these under torch.compile.
    offsets: Tensor
    runs: Tensor
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]

    def views(self, device: torch.device | None = None) -> MaskViews:
        """Return the structure for kernels on `device` (default: the mask's), copied once."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B', H', Q_LEN, KV_LEN)."""
        return (self.offsets.shape[0], self.offsets.shape[1], *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        """Where offsets and runs are."""
        return self.offsets.device

    def has_partial(self) -> bool:
        """Tell whether any run is PARTIAL. Reads the runs on the host."""
        host = self.views().on(torch.device("cpu"))
        return bool((unpack(host.offsets, host.runs).kind == PARTIAL).any())

    def numel(self) -> int:
        """Number of elements, live or not."""
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
        """Return int32 [B', H', Qb, Kb]: 1 for a block that is visited."""
        return (self.views().dense() != 0).to(torch.int32)

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Draw the blocks, as torch does: █ all visited, ░ some, a space none.

        Args:
            grid_size: most (rows, columns) of characters; -1 for one a block.
            limit: most (batch, head) pairs that are drawn.
        """
        return picture.draw(self.views(), grid_size, limit)

    def __str__(self) -> str:
        drawn = self.to_string().strip()
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{drawn}\n)"
