"""Request of the op that builds a block mask, and how much room its result has."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from anyflex.tensors.symbolic_numbers import least

__all__ = ["LEAST_ROOM", "ROOM_OF_A_ROW", "Request", "read_request", "room", "write_request"]

ROOM_OF_A_ROW = 32
"""Mean number of runs that each row of blocks of a large mask has room for."""

LEAST_ROOM = 1 << 16
"""Number of runs (768 KiB) below which a mask has room for every block to be a run."""

VERSION = "anyflex-mask-1"


class Request(NamedTuple):
    """Arguments of `create_block_mask` that are neither tensors nor numbers.

    Args:
        text: the mask mod's graph.
        names: of the tensors that it captured, "" where unknown.
        separate_full_blocks, exact: the arguments.
    """

    text: str
    names: tuple[str, ...]
    separate_full_blocks: bool
    exact: bool


def write_request(request: Request) -> str:
    """Return the request's text, one line: Inductor copies it into comments of generated code.
    Dynamo inlines this."""
    return f"{VERSION} {(*request,)!r}"


@functools.lru_cache(maxsize=1024)
def read_request(text: str) -> Request:
    """Read a request. Raises ValueError if it is not one of this version."""
    import ast

    version, fields = text.split(maxsplit=1)
    if version != VERSION:
        raise ValueError(f"a request of format {version!r}, this anyflex reads {VERSION!r}")
    return Request(*ast.literal_eval(fields))


def room(batch: Any, heads: Any, rows: Any, columns: Any) -> Any:
    """Return the number of runs that a built mask has room for; sizes may be symbolic.

    Args:
        rows, columns: of blocks, in one batch entry and head.
    """
    places = batch * heads * rows
    return least(places * columns, places * ROOM_OF_A_ROW + LEAST_ROOM)
