"""Oracle (b): torch's own flex_attention, forward and backward, on the CPU, where it can be made
to take the case.

It is torch's public function with its checks, run without its compiler (its own debug flag), with
three patches: the device check that refuses gradients on the CPU; the check that refuses
max_scores there; and the call of the higher-order operation, which is given the captured tensors
that require a gradient as the compiler would give them. 2 to 20 ms a case.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

from anyflex.testing.mods import Mod
from anyflex.testing.results import Forward

__all__ = ["NotTaken", "torch_attention"]


class NotTaken(Exception):
    """torch can't be made to take this case; the text is the reason."""


@contextlib.contextmanager
def _patched(learned: tuple[Tensor, ...], found: dict[str, Tensor]) -> Iterator[None]:
    operation = torch_flex.flex_attention_hop

    def with_captured(query, key, value, score_mod, block_mask, scale, options):
        outputs = operation(query, key, value, score_mod, block_mask, scale, options, learned, ())
        # The operation works to base 2, its max_scores as well.
        found["max_scores"] = outputs[2] * math.log(2.0)
        return outputs

    with (
        mock.patch.object(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        mock.patch.object(torch_flex, "_validate_device", lambda *tensors: None),
        mock.patch.object(torch_flex, "flex_attention_hop", with_captured),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    *,
    needs_grad: bool = True,
) -> Forward:
    """out, lse and max_scores by torch; shapes as in `dense_attention`.

    Raises:
        NotTaken: with the reason.
    """
    batch, _, q_length, _ = query.shape
    kv_length = key.shape[2]
    if kv_length == 0:
        raise NotTaken("no keys: torch takes a maximum over an empty dimension")
    if query.numel() == 0:
        raise NotTaken("no query rows: torch's vmap refuses a dimension of size 0")
    learned = dict(score_mod.learned) if score_mod is not None and needs_grad else {}
    if any(leaf.ndim == 0 for leaf in learned.values()):
        raise NotTaken("the gradient of a 0-d captured tensor")
    if needs_grad and score_mod is not None and score_mod.entry.name in _WITHOUT_SCORE:
        raise NotTaken("the gradients of a score mod that doesn't use the score")

    function: Callable[..., Any] | None = None
    if score_mod is not None:
        names = list(learned)

        def function(s, b, h, q, k, *tensors):
            leaves = {**score_mod.leaves, **dict(zip(names, tensors, strict=True))}
            return score_mod.with_leaves(leaves).function()(s, b, h, q, k)

    # torch's eager path applies the mask function everywhere and reads none of the block lists;
    # one PARTIAL block stands for all of them. Keys of batch 1 need the query's batch here.
    counts = torch.ones((batch, 1, 1), dtype=torch.int32)
    block = torch_flex.BlockMask.from_kv_blocks(
        counts,
        torch.zeros((batch, 1, 1, 1), dtype=torch.int32),
        BLOCK_SIZE=max(q_length, kv_length),
        mask_mod=mask_mod or torch_flex.noop_mask,
        seq_lengths=(q_length, kv_length),
    )
    found: dict[str, Tensor] = {}
    with _patched(tuple(learned.values()), found):
        out, aux = torch_flex.flex_attention(
            query,
            key,
            value,
            function,
            block,
            scale,
            enable_gqa=True,
            return_aux=torch_flex.AuxRequest(lse=True),
        )
    return Forward(out, aux.lse, found["max_scores"].detach())


_WITHOUT_SCORE = ("ignores_score", "constant_score")
