"""Request of the static op of packed calls: what is neither a tensor nor a number of one."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

__all__ = ["PackedRequest", "read_packed_request", "write_packed_request"]

VERSION = "anyflex-packed-2"


class PackedRequest(NamedTuple):
    """Arguments of a packed call that are neither tensors nor numbers.

    Args:
        score, mask: graph texts, "" for none.
        slots: how many captured tensors, ints and floats are the score mod's: the mask mod's
            follow them.
        paged: keys are in pages.
        scaled: keys and values are stored in 8 bits, with a scale of each.
        lse, max_scores: auxiliary outputs asked for.
        options: ``kernel_options`` as sorted pairs.
        backend: the ``backend=`` argument, or None.
        batch_invariant: of `Spec`.
    """

    score: str
    mask: str
    slots: tuple[int, int, int]
    paged: bool
    scaled: bool
    lse: bool
    max_scores: bool
    options: tuple[tuple[str, Any], ...]
    backend: str | None
    batch_invariant: bool


def write_packed_request(request: PackedRequest) -> str:
    """Return the request's text, one line: Inductor copies it into comments of generated code.
    Dynamo inlines this."""
    return f"{VERSION} {(*request,)!r}"


@functools.lru_cache(maxsize=1024)
def read_packed_request(text: str) -> PackedRequest:
    """Read a request. Raises ValueError if it is not one of this version."""
    import ast

    version, _, fields = text.partition(" ")
    if version != VERSION:
        raise ValueError(f"a request of format {version!r}, this anyflex reads {VERSION!r}")
    return PackedRequest(*ast.literal_eval(fields))
