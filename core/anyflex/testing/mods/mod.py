"""Mods of the list: leaves, views of them, numbers, and three forms of the function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from anyflex.testing.mods.leaves import Leaf, Sizes

__all__ = ["FORMS", "Entry", "Form", "Mod", "mod", "numbered"]

Form = Literal["function", "partial", "object"]
Builder = Callable[..., Callable[..., Any]]
FORMS: tuple[Form, ...] = ("function", "partial", "object")


@dataclass(frozen=True)
class Entry:
    """One line of the list.

    Args:
        number: ``"S1"`` to ``"S50"``, ``"M1"`` to ``"M46"``.
        name: the list's name.
        builder: takes the captured tensors and numbers, returns the mod.
        leaves: the tensors that own the captured values.
        views: makes the captured tensors from the sizes and the leaves; None for the leaves.
        numbers: closed-over Python numbers, given the sizes.
        batched, headed: the mod depends on b, on h: its mask can't be broadcast.
        smooth: False where a NaN or an infinite derivative is the point of the mod.
    """

    number: str
    name: str
    builder: Builder
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    views: Callable[..., tuple[Tensor, ...]] | None = None
    numbers: Callable[[Sizes], tuple[int | float, ...]] = lambda sizes: ()
    batched: bool = False
    headed: bool = False
    smooth: bool = True

    @property
    def learns(self) -> bool:
        """Whether some captured tensor requires a gradient."""
        return any(leaf.grad for leaf in self.leaves.values())

    def make(
        self, sizes: Sizes, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Mod:
        """Draw the captured tensors. `dtype`: of the tables that the list calls f32."""
        leaves = {name: leaf.make(sizes, generator, dtype) for name, leaf in self.leaves.items()}
        return Mod(self, sizes, leaves)


def mod(
    builder: Builder,
    *,
    views: Callable[..., tuple[Tensor, ...]] | None = None,
    numbers: Callable[[Sizes], tuple[int | float, ...]] = lambda sizes: (),
    batched: bool = False,
    headed: bool = False,
    smooth: bool = True,
    **leaves: Leaf,
) -> Entry:
    """Return an entry of `numbered`; its builder takes the leaves, or the views, by position."""
    return Entry("", "", builder, leaves, views, numbers, batched, headed, smooth)


def numbered(prefix: str, **entries: Entry) -> dict[str, Entry]:
    """Return the entries by name, numbered in their order: ``"S1"``, ``"S2"``."""
    return {
        name: dataclasses.replace(entry, number=f"{prefix}{place}", name=name)
        for place, (name, entry) in enumerate(entries.items(), 1)
    }


@dataclass(frozen=True)
class Mod:
    """A mod with its captured values."""

    entry: Entry
    sizes: Sizes
    leaves: Mapping[str, Tensor]

    @property
    def learned(self) -> dict[str, Tensor]:
        """The leaves that require a gradient."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}

    def captured(self) -> tuple[Tensor, ...]:
        """Tensors that the builder captures: the leaves or views of them."""
        leaves = tuple(self.leaves.values())
        return leaves if self.entry.views is None else self.entry.views(self.sizes, *leaves)

    def function(self, form: Form = "function") -> Callable[..., Any]:
        """The mod as the user would pass it."""
        values = (*self.captured(), *self.entry.numbers(self.sizes))
        if form == "partial":
            run = _run_score if self.entry.number[0] == "S" else _run_mask
            return functools.partial(run, self.entry.builder, values)
        if form == "object":
            kind = _ScoreObject if self.entry.number[0] == "S" else _MaskObject
            return kind(self.entry.builder, values)
        return self.entry.builder(*values)

    def with_leaves(self, leaves: Mapping[str, Tensor]) -> Mod:
        """The same mod over other tensors of the same names."""
        return dataclasses.replace(self, leaves=dict(leaves))


def _run_score(
    builder: Builder, values: tuple[Any, ...], s: Any, b: Any, h: Any, q: Any, k: Any
) -> Any:
    return builder(*values)(s, b, h, q, k)


def _run_mask(builder: Builder, values: tuple[Any, ...], b: Any, h: Any, q: Any, k: Any) -> Any:
    return builder(*values)(b, h, q, k)


@dataclass(eq=False)
class _Object:
    """A mod that keeps its captured tensors as an object's attributes."""

    builder: Builder
    values: tuple[Any, ...]


class _ScoreObject(_Object):
    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.builder(*self.values)(s, b, h, q, k)


class _MaskObject(_Object):
    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.builder(*self.values)(b, h, q, k)
