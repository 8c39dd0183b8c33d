"""ALiBi: scores fall with the distance, at a slope of each head's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.mods.factory_arguments import (
    FLOATS,
    check_one_device,
    check_tensor,
    checked_bool,
    checked_int,
    query_position,
)
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["alibi", "alibi_slopes"]


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return the published slopes, float32 [heads].

    For a power of two, slope i is ``2 ** (-8 * i / heads)``, i = 1 to heads. Otherwise come the
    slopes of the power of two below, and then every other slope of the one above.

    Args:
        heads: at least 1.
        device: of the tensor; None: torch's default.

    Raises:
        ArgumentTypeError, ArgumentError: heads is no int, or below 1.

    Source: as `alibi`.
    """
    count = checked_int("alibi_slopes: heads", heads, 1)
    below = 1
    while below * 2 <= count:
        below *= 2
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (count - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi(slopes: int | Tensor, symmetric: bool = False, offset: int | Tensor = 0) -> ScoreMod:
    """Return the score mod ``score + slopes[h] * (kv_idx - q_idx)``.

    Args:
        slopes: floating tensor [Hq], which may be learned; or the number of heads, which stands
            for `alibi_slopes` of it, on torch's default device.
        symmetric: True: ``score - slopes[h] * |q_idx - kv_idx|``, for masks that are not causal.
        offset: of the query's place; int, or int32 or int64 tensor, [] or [B].

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a tensor of a wrong rank, a number of heads below 1, or tensors on different
            devices.

    Source: Press et al. 2021, Train Short, Test Long, arXiv:2108.12409.
    """
    if isinstance(slopes, Tensor):
        check_tensor("alibi: slopes", slopes, ("[Hq]",), FLOATS, "a number of heads or ")
        steepness = slopes
    else:
        steepness = alibi_slopes(checked_int("alibi: slopes", slopes, 1))
    both_sides = checked_bool("alibi: symmetric", symmetric)
    position = query_position("alibi: offset", offset)
    check_one_device("alibi", slopes=slopes, offset=offset)

    def alibi_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        distance = kv_idx - position(b, q_idx)
        if both_sides:
            distance = -distance.abs()
        return score + steepness[h] * distance

    return alibi_mod
