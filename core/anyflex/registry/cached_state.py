"""The little that a cached call reads of the registry, kept apart so that ``import anyflex`` and a
cached call load nothing else of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from anyflex.contract.spec import Spec

__all__ = ["STATE", "Listeners", "changed", "on_replaced", "replaced"]


class Listeners(Protocol):
    """The part of `anyflex.registry.hooks.Hooks` that a launch calls."""

    listening: bool

    def launched(self, spec: Spec, backend: str, variant: str, /) -> None:
        """Tell the hook plugins of a launch."""
        ...


_generations = itertools.count(1)
_forget: list[Callable[[], None]] = []


class State:
    """What is in force; a call reads the attributes.

    Attributes:
        generation: a number that changes whenever what was decided may be decided otherwise.
        hooks: the hook plugins, or None before the registry was needed.
    """

    generation = 0
    hooks: Listeners | None = None


STATE = State()


def changed() -> None:
    """Let everything be decided anew."""
    STATE.generation = next(_generations)


def on_replaced(forget: Callable[[], None]) -> None:
    """Let `forget` be called whenever another table of backends is put in force."""
    _forget.append(forget)


def replaced() -> None:
    """Let everybody who keeps something of the table in force forget it."""
    for forget in _forget:
        forget()
    changed()
