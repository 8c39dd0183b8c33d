"""Arguments that a mask's factory refuses, by a typed error that names argument, rule and
value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyflex
from anyflex import masks
from anyflex.errors import ArgumentError, ArgumentTypeError

__all__: list[str] = []

IDS = torch.zeros(4, dtype=torch.int32)
META = torch.zeros(3, dtype=torch.int32, device="meta")

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a float offset": (
        lambda: masks.causal(1.5),  # type: ignore[arg-type]
        ArgumentTypeError,
        "causal: offset must be an int, got float",
    ),
    "a bool for an int": (
        lambda: masks.chunked(True),
        ArgumentTypeError,
        "chunked: size must be an int, got bool",
    ),
    "a tensor for an int": (
        lambda: masks.chunked(torch.tensor(4)),  # type: ignore[arg-type]
        ArgumentTypeError,
        r"chunked: size must be an int, got Tensor. Use int\(...\) of it.",
    ),
    "an offset of a float dtype": (
        lambda: masks.causal(torch.zeros(3)),
        ArgumentTypeError,
        "causal: offset must have dtype int64, int32; got torch.float32",
    ),
    "an offset that would wrap": (
        lambda: masks.causal(torch.zeros(3, dtype=torch.int8)),
        ArgumentTypeError,
        "causal: offset must have dtype int64, int32; got torch.int8",
    ),
    "an offset for each batch entry and head": (
        lambda: masks.causal(torch.zeros(3, 4, dtype=torch.int32)),
        ArgumentError,
        r"causal: offset must have shape \[\] or \[B\], got \[3, 4\]",
    ),
    "a negative length": (
        lambda: masks.causal_bottom_right(-1, 4),
        ArgumentError,
        "causal_bottom_right: q_length must be at least 0, got -1",
    ),
    "a window without sides": (
        lambda: masks.sliding_window(None, None),
        ArgumentError,
        "left and right are both None",
    ),
    "a negative side": (
        lambda: masks.sliding_window(4, -1),
        ArgumentError,
        "sliding_window: right must be at least 0, got -1",
    ),
    "sides for each of B and H": (
        lambda: masks.sliding_window(torch.ones(2, 2, dtype=torch.int32)),
        ArgumentError,
        r"sliding_window: left must have shape \[\] or \[H\], got \[2, 2\]",
    ),
    "an empty window": (
        lambda: masks.causal_window(0),
        ArgumentError,
        "causal_window: size must be at least 1, got 0",
    ),
    "no dilation": (
        lambda: masks.dilated(0),
        ArgumentError,
        "dilated: dilation must be at least 1, got 0",
    ),
    "a window for each head of a dilated one": (
        lambda: masks.dilated(2, torch.ones(3, dtype=torch.int32)),  # type: ignore[arg-type]
        ArgumentTypeError,
        "dilated: window must be an int, got Tensor",
    ),
    "an int for a bool": (
        lambda: masks.dilated(2, causal=1),  # type: ignore[arg-type]
        ArgumentTypeError,
        "dilated: causal must be a bool, got int",
    ),
    "global tokens by number": (
        lambda: masks.global_and_window(IDS, 4),
        ArgumentTypeError,
        "global_and_window: global_tokens must have dtype bool; got torch.int32",
    ),
    "a negative number of sinks": (
        lambda: masks.sinks_and_window(-1, 4),
        ArgumentError,
        "sinks_and_window: sinks must be at least 0, got -1",
    ),
    "tensors on two devices": (
        lambda: masks.prefix_lm(IDS, offset=META),
        ArgumentError,
        "prefix_lm: length is on cpu and offset on meta; they must be on one device",
    ),
    "a prefix of None": (
        lambda: masks.prefix_lm(None),  # type: ignore[arg-type]
        ArgumentTypeError,
        "prefix_lm: length must be an int, got NoneType",
    ),
    "answers that can't be negative": (
        lambda: masks.shared_prefix(IDS.to(torch.uint8)),
        ArgumentTypeError,
        "shared_prefix: answers must have dtype int64, int32, int16, int8; got torch.uint8",
    ),
    "groups elsewhere": (
        lambda: masks.shared_prefix(IDS, META),
        ArgumentError,
        "shared_prefix: answers is on cpu and groups on meta",
    ),
    "padding by a list": (
        lambda: masks.padding([3, 4]),  # type: ignore[arg-type]
        ArgumentTypeError,
        "padding: kv_lengths must be an int, got list",
    ),
    "ids in a list": (
        lambda: masks.document([0, 0, 1]),  # type: ignore[arg-type]
        ArgumentTypeError,
        r"document: ids must be a tensor \[S\] or \[B, S\], got list",
    ),
    "ids that are floats": (
        lambda: masks.document(torch.zeros(4)),
        ArgumentTypeError,
        "document: ids must have dtype int64, .*; got torch.float32",
    ),
    "ids that are sparse": (
        lambda: masks.document(IDS.to_sparse()),
        ArgumentTypeError,
        "document: ids must be a dense tensor",
    ),
    "ids of rank 3": (
        lambda: masks.document(IDS.reshape(1, 2, 2)),
        ArgumentError,
        r"document: ids must have shape \[S\] or \[B, S\], got \[1, 2, 2\]",
    ),
    "key ids elsewhere": (
        lambda: masks.document(IDS, META),
        ArgumentError,
        "document: ids is on cpu and kv_ids on meta",
    ),
    "no offsets": (
        lambda: masks.document_offsets(IDS[:0]),
        ArgumentError,
        "document_offsets: offsets must begin with 0, got none",
    ),
    "lengths for offsets": (
        lambda: masks.document_offsets(torch.tensor([5, 3, 2])),
        ArgumentError,
        "document_offsets: offsets must begin with 0, got 5",
    ),
    "offsets that decrease": (
        lambda: masks.document_offsets(torch.tensor([0, 3, 2])),
        ArgumentError,
        "must not decrease, got 3 and then 2 at position 2. Lengths become offsets by cumsum.",
    ),
    "a total that is too small": (
        lambda: masks.document_offsets(torch.tensor([0, 3, 7]), 6),
        ArgumentError,
        "document_offsets: total must be at least the last offset, 7, got 6",
    ),
    "an inner mask that is a tensor": (
        lambda: masks.document_offsets(torch.tensor([0, 3]), inner=IDS),  # type: ignore[arg-type]
        ArgumentTypeError,
        "document_offsets: inner must be a mask mod, got Tensor",
    ),
    "a block without tokens": (
        lambda: masks.block_causal(0),
        ArgumentError,
        "block_causal: size must be at least 1, got 0",
    ),
    "no text to diffuse": (
        lambda: masks.block_diffusion(0, 4),
        ArgumentError,
        "block_diffusion: length must be at least 1, got 0",
    ),
    "a grid of four dimensions": (
        lambda: masks.neighbourhood((4, 4, 4, 4), 3),
        ArgumentError,
        "neighbourhood: grid must have one to three dimensions, got 4",
    ),
    "a grid of floats": (
        lambda: masks.neighbourhood((4, 4.0), 3),  # type: ignore[arg-type]
        ArgumentTypeError,
        "neighbourhood: grid must be an int, got float",
    ),
    "a window of another rank": (
        lambda: masks.neighbourhood((8, 8), (3,)),
        ArgumentError,
        "neighbourhood: window must be one value or 2, one for each dimension of the grid, got 1",
    ),
    "a window larger than the grid": (
        lambda: masks.neighbourhood((8, 4), 5),
        ArgumentError,
        r"must fit into the grid, got 5 \* 1 for a dimension of 4",
    ),
    "a dilation larger than the grid": (
        lambda: masks.neighbourhood(8, 3, 3),
        ArgumentError,
        r"must fit into the grid, got 3 \* 3 for a dimension of 8",
    ),
    "causal flags of another rank": (
        lambda: masks.neighbourhood((8, 8), 3, causal=(True,)),
        ArgumentError,
        "neighbourhood: causal must be one value or 2, one for each dimension",
    ),
    "causal flags that are ints": (
        lambda: masks.neighbourhood((8, 8), 3, causal=(True, 0)),  # type: ignore[arg-type]
        ArgumentTypeError,
        "neighbourhood: causal must be a bool, got int",
    ),
    "a parent that isn't there": (
        lambda: masks.tree(torch.tensor([-1, 0, 3])),
        ArgumentError,
        r"tree: parents must be -1 \(a root\) to 2, got 3 for token 2",
    ),
    "a cycle": (
        lambda: masks.tree(torch.tensor([-1, 2, 1])),
        ArgumentError,
        "tree: parents has a cycle: token 1 has no root among its ancestors",
    ),
    "a negative prefix of a tree": (
        lambda: masks.tree(torch.tensor([-1, 0]), -2),
        ArgumentError,
        "tree: prefix must be at least 0, got -2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_factory_refuses(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_every_factory_has_a_refusal() -> None:
    text = " ".join(message for _, _, message in REFUSED.values())
    for name in set(masks.__all__) - {"sliding_window"}:
        assert f"{name}: " in text, name


def test_ids_that_are_too_few_are_refused_when_the_mask_is_built() -> None:
    with pytest.raises(anyflex.ModIndexError):
        anyflex.create_block_mask(masks.document(IDS), 1, 1, 8, 8)
