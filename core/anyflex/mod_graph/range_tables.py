"""Range tables: the smallest and the largest element of each stretch of a captured tensor.

A block graph reads a captured tensor at an index that moves with the query or the key by them:
two entries bound all that a tile reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RangeTable"]


@dataclass(frozen=True, slots=True)
class RangeTable:
    """Description of a range table.

    Args:
        captured: position of the tensor among the mask mod's captured tensors.
        dimension: the one that is indexed by a query or key.
        block: ``"q_block"`` or ``"kv_block"``, the input that says how many elements each entry
            stands for.
    """

    captured: int
    dimension: int
    block: str

    def made(self, captured: Sequence[Tensor], q_block: int, kv_block: int) -> Tensor:
        """Return the table on its tensor's device, without a synchronisation.

        Returns:
            [2, ...] of the tensor's type: smallest and largest element, NaN where there is one,
            with ``ceil(N / block)`` entries along the dimension, of N elements.
        """
        tensor = captured[self.captured]
        size = tensor.shape[self.dimension]
        if tensor.numel() == 0:
            return tensor.new_empty((2, *tensor.shape))
        block = q_block if self.block == "q_block" else kv_block
        blocks = -(-size // block)
        if blocks * block > size:
            index = torch.arange(blocks * block, device=tensor.device).clamp_(max=size - 1)
            tensor = tensor.index_select(self.dimension, index)
        before, after = tensor.shape[: self.dimension], tensor.shape[self.dimension + 1 :]
        stretches = tensor.reshape(*before, blocks, block, *after)
        return torch.stack(torch.aminmax(stretches, dim=self.dimension + 1))
