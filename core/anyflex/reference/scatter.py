"""Scatters: adding the gradients of captured reads to the captured tensors' accumulators."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.mod_graph.evaluate import bounded_index

__all__ = ["TableGradient"]

SCRATCH = 1 << 22
"""Tables up to this many elements are summed in float64 on the CPU: thousands of additions into
one address would lose digits in float32."""


class TableGradient:
    """Sums gradients into one accumulator, in an order that does not change between runs.

    On the CPU one thread adds in the order of the pairs; CUDA sorts. Values are summed first over
    all dimensions that no index depends on.

    Args:
        target: the accumulator, dense, zeroed; any dimension order.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        on_host = target.device.type == "cpu"
        wide = torch.float64 if on_host and target.numel() <= SCRATCH else target.dtype
        self.dtype = wide
        # Dense, so its storage is one range in some dimension order.
        self.flat = torch.as_strided(target, (target.numel(),), (1,))
        self.total = self.flat if wide is target.dtype else torch.zeros_like(self.flat, dtype=wide)

    def add(self, indices: list[Tensor], value: Tensor, shape: torch.Size) -> None:
        """Add `value` at `indices`.

        Args:
            indices: one a dimension, as the load had them; empty for a 0-d tensor.
            value: broadcastable to `shape`, 0 at dead pairs.
            shape: of all pairs; `indices` broadcast to it too.
        """
        if self.target.numel() == 0 or 0 in shape:
            return
        value = value.expand(shape)
        position = torch.zeros((1,) * len(shape), dtype=torch.int64, device=value.device)
        for index, size, stride in zip(
            indices, self.target.shape, self.target.stride(), strict=True
        ):
            position = position + bounded_index(index, size)[0] * stride
        free = [d for d in range(len(shape)) if position.shape[d] == 1 and shape[d] != 1]
        if free:
            # Summed in its own type, pairwise: asking for float64 here would first copy every
            # pair.
            value = value.sum(free, keepdim=True)
        position = position.expand(value.shape).reshape(-1)
        value = value.to(self.dtype).reshape(-1)
        if value.device.type == "cpu":
            self.total.index_add_(0, position, value)
        else:
            self.total.index_put_((position,), value, accumulate=True)

    def add_dense(self, value: Tensor) -> None:
        """Add a gradient of the captured tensor's own shape."""
        self.target += value.to(self.target.dtype)

    def finish(self) -> None:
        """Convert the sums to the accumulator."""
        if self.total is not self.flat:
            self.flat += self.total.to(self.flat.dtype)
