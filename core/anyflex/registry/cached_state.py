"""The little that a cached call reads of the registry, kept apart so that ``import anyflex`` and a
cached call load nothing else of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from anyflex.registry.hooks import Hooks

__all__ = [
    "Posed",
    "changed",
    "generation",
    "hooks_in_force",
    "pose",
    "posed_as",
    "posed_in_force",
    "use_hooks",
]

Posed = tuple[str, str]
"""What CPU tensors stand in for: a device type and its architecture."""

_generations = itertools.count(1)
_generation = 0
_hooks: Hooks | None = None
# Of the process, and a plain global: Dynamo, which traces its reader, puts a guard on it.
_posed: Posed | None = None


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


def posed_as(device: torch.device) -> Posed | None:
    """Return what a tensor on `device` stands in for, or None for itself. On the hot path."""
    return None if _posed is None or device.type != "cpu" else _posed


def posed_in_force() -> Posed | None:
    """Return what CPU tensors stand in for, or None."""
    return _posed


def pose(posed: Posed | None) -> None:
    """Let CPU tensors stand in for something else: for `anyflex.testing.posing`."""
    global _posed
    _posed = posed
