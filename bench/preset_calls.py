"""Calls of `anyflex bench --preset h200`, shrunk: of the same kernels, compiled alike.

`gpu_random.py` takes them by numbers from `FIRST` on, and holds them to the formula as it does
random calls, which hardly ever have what a preset's kernels are compiled for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyflex.bench.case import BenchCase, Direction
from anyflex.bench.drawn_patterns import PatternCall
from anyflex.bench.patterns import make_mask_mod, make_score_mod
from anyflex.bench.presets import PRESETS
from anyflex.testing.attention_case import QKV, AttentionCase, Drawn
from anyflex.testing.mods import Entry, Mod

__all__ = ["FIRST", "NUMBERS", "PresetCall", "nearer", "preset_call"]

FIRST = 1_000_000
"""Random calls have numbers below."""
_LENGTH = 256
"""Length of two blocks of the mask, and two tiles: under a causal mask one of these is FULL, one
PARTIAL."""
_HEADS = 4
_ENTRIES = 18
"""Number of batch entries: 144 tiles of 128 rows or keys, or of up to 192 rows, are more than the
132 multiprocessors of a Hopper, so that some take a second tile."""
_GROUPED_HEADS = 8
"""Number of KV heads where query heads share them and the measured call doesn't split them over
programs: 288 tiles of keys are too many for that."""
_MULTIPROCESSORS = 132
_LEAST_ROWS = 64
"""Minimum rows of a tile: calls whose tiles of this height don't outnumber the multiprocessors
have kernels of their own."""
_SHORTER = 16
"""Factor by which a decoding step's keys are shortened. The rest is more than one program's share
of a head."""
_NEARER: Mapping[str, str] = {
    "causal_window:1024": "causal_window:100",
    "prefix_lm:1000": "prefix_lm:100",
}
"""Masks whose numbers are beyond `_LENGTH`, where they would be causal and full."""


@dataclass(frozen=True)
class PresetCall(AttentionCase):
    """A call whose mods are named as the command line names them.

    Args:
        masks, mods: of `BenchCase`.
    """

    masks: tuple[str, ...] = ()
    mods: tuple[str, ...] = ()

    def draw(self, device: torch.device) -> Drawn:
        """Draw the inputs."""
        shape = (self.batch, self.heads, self.q_length, self.kv_length)
        entries = {}
        if self.mods:
            entries["score"] = _entry(
                "S", lambda place: make_score_mod(self.mods, PatternCall(shape, place.device))
            )
        if self.masks:
            entries["mask"] = _entry(
                "M", lambda place: make_mask_mod(self.masks, PatternCall(shape, place.device))
            )
        # A leaf in place of the tensors that a mod makes for itself, where they are wanted.
        place = {"place": torch.empty(0)}
        mods = {kind: Mod(entry, self.sizes, place) for kind, entry in entries.items()}
        return dataclasses.replace(super().draw(device), mods=mods)


def _entry(letter: str, builder: Callable[..., Any]) -> Entry:
    return Entry(letter, "preset", builder, {}, None, lambda sizes: (), False, False, True)


def _shrunk(case: BenchCase, direction: Direction) -> PresetCall:
    batch, heads, q_length, width = case.q_shape
    kv_heads, kv_length = case.kv_shape[1:3]
    group = heads // kv_heads
    if q_length == 1:
        # Entries and heads decide which tiles share a program.
        kv_length //= _SHORTER
    else:
        many = batch * heads * -(-q_length // _LEAST_ROWS) > _MULTIPROCESSORS
        batch, kv_heads = _ENTRIES if many else 1, max(_HEADS // group, 1)
        if group > 1 and direction != "forward" and not case.splits_query_heads():
            kv_heads = _GROUPED_HEADS
        q_length, kv_length = min(q_length, _LENGTH), min(kv_length, _LENGTH)
    return PresetCall(
        name=f"{case.name}, {direction}, shrunk",
        shows="a row of a preset",
        batch=batch,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        q_length=q_length,
        kv_length=kv_length,
        head_dim=width,
        value_head_dim=case.v_shape[3],
        dtype=case.torch_dtype,
        block_size=(case.block_size, case.block_size),
        gradients=frozenset() if direction == "forward" else QKV,
        aux=frozenset(),
        masks=nearer(case.masks),
        mods=case.mods,
    )


def nearer(masks: Sequence[str]) -> tuple[str, ...]:
    """Return the masks with numbers that matter at a call's lengths."""
    return tuple(_NEARER.get(text, text) for text in masks)


def _each_once() -> tuple[PresetCall, ...]:
    """Return one call for all rows that differ in their sizes alone."""
    found: dict[PresetCall, PresetCall] = {}
    for case in PRESETS["h200"]:
        for direction in case.directions:
            call = _shrunk(case, direction)
            found.setdefault(dataclasses.replace(call, name=""), call)
    return tuple(found.values())


_CALLS = _each_once()

NUMBERS = tuple(range(FIRST, FIRST + len(_CALLS)))
"""Numbers of all calls."""


def preset_call(number: int) -> PresetCall:
    """The call of one of `NUMBERS`."""
    return _CALLS[number - FIRST]
