"""Request: the device-independent part of a call, as one canonical line that crosses an op.

`write_request` is part of the traced half: Dynamo inlines it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyflex.registry.hot_path import Posed
    from anyflex.runtime.saved_bytes import SavedBytes

__all__ = ["Request", "read_request", "write_request"]

VERSION = "anyflex-request-3"


@dataclass(frozen=True, slots=True)
class Request:
    """What the traced half decided.

    Args:
        score, mask: graph texts, "" for none.
        score_slots: how many captured tensors, ints and floats are the score mod's: the mask
            mod's follow them.
        lse, max_scores: auxiliary outputs asked for.
        needs_lse: lse is computed, for the caller or for backward.
        gradients: a flag for query, key, value and then each captured tensor.
        backend: the ``backend=`` argument, or None.
        options: ``kernel_options`` as sorted (name, value) pairs, nested names joined by "/".
        posed: the device type and architecture that CPU tensors stand in for, or None: a backward
            pass may run after the end of `anyflex.testing.posing`.
        saved_bytes: what forward may leave for backward (`anyflex.runtime.saved_bytes`).
        fp32_precision: `anyflex.runtime.facts.fp32_precision` when the request was written: both
            passes have it.
    """

    score: str
    mask: str
    score_slots: tuple[int, int, int]
    lse: bool
    max_scores: bool
    needs_lse: bool
    gradients: tuple[bool, ...]
    backend: str | None
    options: tuple[tuple[str, object], ...]
    posed: Posed | None
    saved_bytes: SavedBytes
    fp32_precision: str


def write_request(
    score: str,
    mask: str,
    score_slots: tuple[int, int, int],
    lse: bool,
    max_scores: bool,
    needs_lse: bool,
    gradients: list[bool],
    backend: str | None,
    options: tuple[tuple[str, object], ...],
    posed: Posed | None,
    saved_bytes: SavedBytes,
    fp32_precision: str,
) -> str:
    """Return the request's text. One line a field; a graph's text holds no line break."""
    flags = "".join(["1" if flag else "0" for flag in gradients])
    lines = [
        VERSION if posed is None else f"{VERSION} {posed[0]} {posed[1]}",
        score,
        mask,
        f"{score_slots[0]} {score_slots[1]} {score_slots[2]}",
        f"{int(lse)}{int(max_scores)}{int(needs_lse)}",
        flags,
        f"{saved_bytes[0]} {saved_bytes[1]}",
        fp32_precision,
        "" if backend is None else backend,
    ]
    for name, value in options:
        lines.append(f"{name}={value!r}")
    return "\n".join(lines)


@functools.lru_cache(maxsize=1024)
def read_request(text: str) -> Request:
    """Read a request. Raises ValueError if it is not one of this version."""
    import ast

    version, score, mask, slots, aux, flags, saved, precision, backend, *options = text.split("\n")
    version, *posed = version.split(" ")
    if version != VERSION:
        raise ValueError(f"a request of format {version!r}, this anyflex reads {VERSION!r}")
    captured, ints, floats = map(int, slots.split())
    values, rows = map(int, saved.split())
    pairs = []
    for option in options:
        name, _, value = option.partition("=")
        pairs.append((name, ast.literal_eval(value)))
    return Request(
        score,
        mask,
        (captured, ints, floats),
        aux[0] == "1",
        aux[1] == "1",
        aux[2] == "1",
        tuple(flag == "1" for flag in flags),
        backend or None,
        tuple(pairs),
        (posed[0], posed[1]) if posed else None,
        (values, rows),
        precision,
    )
