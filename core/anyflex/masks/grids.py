"""Neighbourhood attention on grids of one, two or three dimensions."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from anyflex.errors import ArgumentError
from anyflex.mods.factory_arguments import checked_bool, checked_each, checked_int
from anyflex.tracing.mod_types import MaskMod

__all__ = ["neighbourhood"]

_Axis = tuple[int, int, int, int, bool]
"""Stride in the row, length, window, dilation, causal."""


def neighbourhood(
    grid: int | tuple[int, ...],
    window: int | tuple[int, ...],
    dilation: int | tuple[int, ...] = 1,
    causal: bool | tuple[bool, ...] = False,
) -> MaskMod:
    """Return the mask mod in which a point of a grid sees the `window` points around it.

    At an edge the window is moved inside of the grid, so that all points see equally many. With
    dilation d, a dimension falls apart into d grids of every d-th point, each with windows of its
    own. Points are numbered row by row, the last dimension fastest; all lengths are the number of
    points.

    Examples:
        >>> mask_mod = neighbourhood((32, 48), 7)  # 7 x 7 points of an image of 32 x 48

    Args:
        grid: size of each of one to three dimensions; an int for one.
        window: points that are seen along each dimension; of an even number, one more lies before
            the point than after it.
        dilation: at least 1 for each dimension; ``window * dilation`` must fit into the grid.
        causal: True, for a dimension: the last `window` points up to its own, and none beyond the
            edge, where a point then sees fewer.

    Raises:
        ArgumentTypeError: a wrong type.
        ArgumentError: a number of dimensions other than 1 to 3, tuples of another length than
            that, an int below 1, or a window that doesn't fit.

    Source: Hassani et al. 2022, Neighborhood Attention Transformer, arXiv:2204.07143; dilation:
    Hassani and Shi 2022, arXiv:2209.15001.
    """
    sizes = grid if isinstance(grid, (tuple, list)) else (grid,)
    if not 1 <= len(sizes) <= 3:
        raise ArgumentError(
            f"neighbourhood: grid must have one to three dimensions, got {len(sizes)}."
        )
    positive = partial(checked_int, least=1)
    sizes = checked_each("neighbourhood: grid", sizes, len(sizes), positive)
    windows = checked_each("neighbourhood: window", window, len(sizes), positive)
    dilations = checked_each("neighbourhood: dilation", dilation, len(sizes), positive)
    flags = checked_each("neighbourhood: causal", causal, len(sizes), checked_bool)
    for size, width, step in zip(sizes, windows, dilations, strict=True):
        if width * step > size:
            raise ArgumentError(
                f"neighbourhood: window * dilation must fit into the grid, got {width} * {step} "
                f"for a dimension of {size}."
            )
    axes: list[_Axis] = []
    stride = 1
    for axis in reversed(range(len(sizes))):
        axes.append((stride, sizes[axis], windows[axis], dilations[axis], flags[axis]))
        stride *= sizes[axis]
    parts = tuple(reversed(axes))

    def neighbourhood_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        live: Any = None
        for position, part in enumerate(parts):
            near = _near(q_idx, kv_idx, part, position == 0)
            live = near if live is None else live & near
        return live

    return neighbourhood_mask


def _near(q_idx: Tensor, kv_idx: Tensor, part: _Axis, outermost: bool) -> Any:
    """Tell whether the key is in the query's window along one dimension."""
    stride, size, window, dilation, causal = part
    query = q_idx if stride == 1 else q_idx // stride
    key = kv_idx if stride == 1 else kv_idx // stride
    if not outermost:
        query, key = query % size, key % size
    if dilation == 1:
        return _in_window(query, key, window, size - window, causal)
    # Points with one remainder are a grid of their own, of one point more for small remainders.
    remainder = query % dilation
    points = size // dilation if size % dilation == 0 else (size - 1 - remainder) // dilation + 1
    near = _in_window(query // dilation, key // dilation, window, points - window, causal)
    return (remainder == key % dilation) & near


def _in_window(query: Any, key: Any, window: int, last: Any, causal: bool) -> Any:
    """Tell whether the key is among `window` ones, the first of which is at most `last`."""
    if causal:
        distance = query - key
        return (distance >= 0) & (distance < window)
    first = (query - window // 2).clamp(min=0).clamp(max=last)
    return (key >= first) & (key < first + window)
