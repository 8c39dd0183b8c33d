"""The little that a cached call reads of the registry, kept apart so that ``import anyflex`` and a
cached call load nothing else of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyflex.registry.hooks import Hooks

__all__ = ["changed", "generation", "hooks_in_force", "use_hooks"]

_generations = itertools.count(1)
_generation = 0
_hooks: Hooks | None = None


def generation() -> int:
    """Return a number that changes whenever what was decided may be decided otherwise."""
    return _generation


def changed() -> None:
    """Let everything be decided anew."""
    global _generation
    _generation = next(_generations)


def hooks_in_force() -> Hooks | None:
    """Return the hook plugins, or None before the registry was needed."""
    return _hooks


def use_hooks(hooks: Hooks) -> None:
    """Put hook plugins in force."""
    global _hooks
    _hooks = hooks
