"""Request: the device-independent part of a call, as one canonical line that crosses an op.

`write_request` is part of the traced half: Dynamo inlines it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from anyflex.runtime.saved_for_backward import SavedBytes
    from anyflex.tensors.stand_in import Posed

__all__ = ["Request", "read_request", "write_request"]

VERSION = "anyflex-request-7"


class Request(NamedTuple):
    """Decisions of the traced half, and of a call that goes to its kernel without an op.

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
        saved_bytes: what forward may leave for backward (`anyflex.runtime.saved_for_backward`).
        fp32_precision: `anyflex.tensors.tensor_facts.fp32_precision` when the request was
            written: both passes have it.
        dropout: weights are dropped; the probability and the seed are among the call's numbers.
        kv_layout: ``"packed"`` or ``"paged"`` of a call of packed sequences, else ``"dense"``.
        sinks: () without sinks, else one flag: whether they need a gradient.
        batch_invariant: of `Spec`.
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
    dropout: bool = False
    kv_layout: str = "dense"
    sinks: tuple[bool, ...] = ()
    batch_invariant: bool = False


def write_request(request: Request) -> str:
    """Return the request's text.

    Inductor copies it into comments of generated code, where a second line would be code. repr
    escapes every line ending, in any field.
    """
    return f"{VERSION} {(*request,)!r}"


@functools.lru_cache(maxsize=1024)
def read_request(text: str) -> Request:
    """Read a request. Raises ValueError if it is not one of this version."""
    import ast

    version, *fields = text.split(maxsplit=1)
    if version != VERSION:
        raise ValueError(f"a request of format {version!r}, this anyflex reads {VERSION!r}")
    return Request(*ast.literal_eval(fields[0]))
