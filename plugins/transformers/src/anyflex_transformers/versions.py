"""Versions of transformers that the plugin was run with, and what differs between them.

Data alone, which needs no transformers: the documentation's table is made of it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CHANGES", "TESTED", "Change"]

TESTED = ("4.57.6", "5.24.0")
"""Oldest and newest version that all tests were run with."""


class Change(NamedTuple):
    """A change in transformers, and what the plugin does about it."""

    since: str
    changed: str
    handled: str


CHANGES = (
    Change(
        "5.0",
        "encoders ask for their mask by the registered function; before, some make a dense one",
        "dense masks are taken too; they skip no blocks",
    ),
    Change(
        "5.4",
        "mask functions take q_length and q_offset instead of cache_position",
        "`masks.MASKS_TAKE_POSITIONS` chooses which of two functions is registered",
    ),
    Change(
        "5.4",
        "a static cache tells its length by a tensor that it later increments in place",
        "`masks.mask` reads it, or computes with it, before the cache does",
    ),
    Change(
        "5.13",
        "T5 and its family compute attention by the interface, and pass position_bias",
        "before, `supports` says no: they are loaded with eager attention",
    ),
    Change(
        "5.19",
        'continuous batching takes "sdpa", "paged|eager" and names that contain "flash"; before, '
        'any that begins with "paged|"',
        "`continuous_batching.BATCHED` is the name that this transformers takes; 5.17 to 5.20 ran "
        "too, older ones didn't",
    ),
    Change(
        "5.21",
        "continuous batching asks its cache for keys before it asks for attention",
        "before, `continuous_batching.attention_of_requests` asks the cache",
    ),
)
"""Differences between the versions from the oldest to the newest that were tested."""
