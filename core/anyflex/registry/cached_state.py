"""Registry state that a cached call reads, kept apart so that ``import anyflex`` and a cached call
load nothing else of the registry."""

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
        """Report a launch to the hook plugins."""
        ...


_generations = itertools.count(1)
_forget: list[Callable[[], None]] = []


class State:
    """State in force, whose attributes each call reads.

    Attributes:
        generation: a number that changes whenever decisions have to be made again.
        hooks: the hook plugins, or None before the registry was needed.
        environment_names: names that ANYFLEX_BACKEND forces, or None before it was read.
    """

    generation = 0
    hooks: Listeners | None = None
    environment_names: tuple[str, ...] | None = None


STATE = State()


def changed() -> None:
    """Let all decisions be made again."""
    STATE.generation = next(_generations)


def on_replaced(forget: Callable[[], None]) -> None:
    """Call `forget` whenever another table of backends is put in force."""
    _forget.append(forget)


def replaced() -> None:
    """Call the registered `forget` functions."""
    for forget in _forget:
        forget()
    changed()
