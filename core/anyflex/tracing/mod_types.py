"""Types of the functions that a user writes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["MaskMod", "ScoreMod"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``f(b, h, q_idx, kv_idx) -> bool scalar``."""
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``f(score, b, h, q_idx, kv_idx) -> score``."""
