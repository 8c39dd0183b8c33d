"""Decorator that enters a builder into one of the two tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anyflex.testing.mods.leaves import Leaf, Sizes
from anyflex.testing.mods.mod import Entry

__all__ = ["register"]

Builder = Callable[..., Callable[..., Any]]


def register(
    table: dict[str, Entry],
    number: str,
    *,
    views: Callable[..., tuple[Tensor, ...]] | None = None,
    numbers: Callable[[Sizes], tuple[int | float, ...]] = lambda sizes: (),
    batched: bool = False,
    headed: bool = False,
    smooth: bool = True,
    **leaves: Leaf,
) -> Callable[[Builder], Builder]:
    """Enter the decorated builder under its own name."""

    def enter(builder: Builder) -> Builder:
        name = builder.__name__
        table[name] = Entry(number, name, builder, leaves, views, numbers, batched, headed, smooth)
        return builder

    return enter
