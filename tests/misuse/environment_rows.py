"""Rows 125 to 132 and 158, as far as they need no plugin."""

from __future__ import annotations

import pickle
import threading
from typing import Any
from unittest import mock

import torch

import anyflex
from anyflex import create_block_mask
from anyflex.errors import (
    AnyflexError,
    ArgumentError,
    ArgumentTypeError,
    BlockMaskError,
)
from tests.misuse.row import Attend, Table, inputs

__all__ = ["TABLE"]

TABLE = Table()


def wrong(number: int, error: Any, *names: str) -> Any:
    """Enter a row that says its own backend."""
    return TABLE.wrong(number, error, *names, attends=False)


@wrong(125, ArgumentError, "cudaa", "reference")
def unknown_backend(attend: Attend) -> None:
    anyflex.flex_attention(*inputs(), backend="cudaa")


@wrong(125, ArgumentError, "referense", "reference")
def misspelt_backend(attend: Attend) -> None:
    anyflex.flex_attention(*inputs(), backend="referense")


@wrong(129, (ArgumentError, ArgumentTypeError), "backend", "int")
def backend_is_a_number(attend: Attend) -> None:
    anyflex.flex_attention(*inputs(), backend=3)  # type: ignore[arg-type]


@wrong(130, ArgumentError, "cudaa")
def unknown_backend_in_a_context(attend: Attend) -> None:
    with anyflex.use_backend("reference"), anyflex.use_backend("cudaa"):
        raise AssertionError("entered")


@wrong(131, ArgumentError, "thread")
def context_is_left_in_another_thread(attend: Attend) -> None:
    context = anyflex.use_backend("reference")
    context.__enter__()
    raised: list[Exception] = []

    def leave() -> None:
        try:
            context.__exit__(None, None, None)
        except AnyflexError as error:
            raised.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    context.__exit__(None, None, None)
    raise raised[0]


@wrong(158, BlockMaskError, "format", r"\b2\b", r"\b999\b")
def pickle_of_another_format(attend: Attend) -> None:
    from anyflex.block_mask import mask_state

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 16, 16)
    with mock.patch.object(mask_state, "FORMAT", 999):
        data = pickle.dumps(mask)
    assert torch.equal(pickle.loads(pickle.dumps(mask)).offsets, mask.offsets)
    pickle.loads(data)
