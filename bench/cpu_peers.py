"""Peers that a user of torch has on a CPU without flex attention, beside `anyflex bench`'s own.

A dense bool mask, the heads of a group folded into query rows, and softmax attention written out
for autograd. They are called as a user would, with nothing of anyflex between.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from anyflex.bench.case import BenchCase, Inputs
from anyflex.bench.contenders import Attend, Contender
from anyflex.testing.oracle import dense_mask

__all__ = ["PEERS", "attention_peers"]


def _dense_sdpa(inputs: Inputs) -> Attend:
    """A bool mask [L, S] (made before the clock starts), whose blocks no kernel can skip."""
    assert inputs.mask_mod is not None
    sizes = (inputs.case.q_shape[2], inputs.case.kv_shape[2])
    mask = dense_mask(inputs.mask_mod, 1, 1, *sizes)[0, 0]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)

    return attend


def _folded_sdpa(inputs: Inputs) -> Attend:
    """Query heads of a KV head become its query rows: one step of decoding without a mask."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        folded = query.view(*key.shape[:2], -1, query.shape[3])
        out = torch.nn.functional.scaled_dot_product_attention(folded, key, value)
        return out.view(query.shape)

    return attend


def _written_out(inputs: Inputs) -> Attend:
    """Scores, mod, mask and softmax as a user writes them, S x S stored for autograd. The softcap
    of the case is written by hand: a mod of five indices would need vmap, which is slower."""
    cap = float(inputs.case.mods[0].partition(":")[2])
    length = inputs.case.q_shape[2]
    dead = torch.ones(length, length, dtype=torch.bool).triu(1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * (1 / math.sqrt(query.shape[3]))
        scores = cap * torch.tanh(scores / cap)
        return torch.softmax(scores.masked_fill(dead, -math.inf), -1) @ value

    return attend


def _refusal(
    wanted: Callable[[BenchCase], bool], reason: str
) -> Callable[[BenchCase], str | None]:
    return lambda case: None if wanted(case) else reason


PEERS: dict[str, tuple[Callable[[BenchCase], bool], str, Callable[[Inputs], Attend]]] = {
    "torch.sdpa.dense_mask": (
        lambda case: bool(case.masks) and not case.mods and not case.gqa,
        "takes a mask, and no mods",
        _dense_sdpa,
    ),
    "torch.sdpa.folded": (
        lambda case: case.q_shape[2] == 1 and case.gqa and not case.masks and not case.mods,
        "takes one query row and grouped heads",
        _folded_sdpa,
    ),
    "torch.written_out": (
        lambda case: case.masks == ("causal",) and [m[:8] for m in case.mods] == ["softcap:"],
        "is written for causal and softcap",
        _written_out,
    ),
}
"""name -> the cases that it takes, the reason for refusing others, and its preparation of a
case."""


def attention_peers() -> list[Contender]:
    """Return the peers as contenders."""
    distribution = f"torch {torch.__version__}"
    return [
        Contender(name, "peer", distribution, _refusal(wanted, reason), prepare)
        for name, (wanted, reason, prepare) in PEERS.items()
    ]
