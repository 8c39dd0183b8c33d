"""Continuous batching, which transformers offers to a closed list of implementations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transformers

import anyflex

__all__ = ["continuous_batching"]


@contextlib.contextmanager
def continuous_batching() -> Iterator[None]:
    """Let ``model.generate_batch`` take models of attn_implementation="anyflex" while entered.

    transformers checks the implementation's name against a list that nobody can add to. This
    replaces that check, ``ContinuousBatchingManager.switch_to_cb_friendly_attn``, by one that
    leaves anyflex's models as they are, and puts it back at the end. Nothing else of transformers
    is touched.

    Raises:
        ArgumentError: this version of transformers has no such check.
    """
    manager = _manager()
    checked = manager.switch_to_cb_friendly_attn

    def switch_to_cb_friendly_attn(self: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        if model.config._attn_implementation == "anyflex":
            return None
        return checked(self, model, *arguments, **options)

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
    try:
        yield
    finally:
        manager.switch_to_cb_friendly_attn = checked


def _manager() -> Any:
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager as found
    except ImportError:
        found = None
    if not hasattr(found, "switch_to_cb_friendly_attn"):
        raise anyflex.ArgumentError(
            "continuous batching with anyflex needs transformers 5.21 or newer, got "
            f"{transformers.__version__}"
        )
    return found
