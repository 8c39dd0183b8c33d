"""Attention as transformers calls it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import anyflex
from anyflex_transformers.carrier import Carrier
from anyflex_transformers.masks import causal_mask
from anyflex_transformers.score_mods import score_mod
from anyflex_transformers.sequences import Offsets, packed_attention

__all__ = ["attention"]

WITHOUT_EFFECT = frozenset(
    # The mask has these.
    "position_ids cache_position seq_idx "
    # These concern the cache, other layers, and what a model returns.
    "use_cache past_key_value past_key_values encoder_hidden_states output_router_logits "
    "output_hidden_states return_dict num_items_in_batch deterministic "
    # Continuous batching has used these when keys and values arrive.
    "read_index write_index logits_indices logits_processor_args".split()
)
"""Keywords that models hand on to attention, and that mean nothing to it."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | TorchBlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    kernel_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return (out [B, L, Hq, Ev], None).

    Args:
        module: the attention layer; its `is_causal` decides where there is no mask.
        query, key, value: [B, Hq, L, E], [B, Hkv, S, E], [B, Hkv, S, Ev].
        attention_mask: what `masks.mask` made; torch's BlockMask; a tensor [1 or B, 1 or Hq,
            1 or L, at least S], bool (True is live) or added to the scores; or None: causal where
            the layer is and there are several rows, else everything.
        dropout: probability with which weights are dropped; models pass 0 in evaluation.
        softcap, position_bias: applied to the scores in this order, before the mask.
        s_aux: [Hq], sinks.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: offsets of sequences packed into
            one row, and bounds of their lengths; without a mask they are the mask. A mask that was
            made of position_ids tells sequences apart itself, and no other one is taken with them.
        sliding_window: keys that a token of a packed sequence sees, its own included; elsewhere
            the mask has it.
        kernel_options: as for `anyflex.flex_attention`.

    Raises:
        ArgumentError: a mask or bias of a shape that doesn't fit, or a keyword that would change
            the result in a way that is unknown here.
        ArgumentTypeError: a mask or bias of another dtype.
    """
    if not others.keys() <= WITHOUT_EFFECT:
        _refuse_unknown(module, others)
    if output_attentions:
        warnings.warn(
            "attn_implementation='anyflex' returns no attention weights, for output_attentions; "
            "load the model with 'eager' to see them",
            stacklevel=2,
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    rows, keys = query.shape[2], key.shape[2]
    given: Any = attention_mask
    if given is not None and cu_seq_lens_q is not None:
        _check_knows_sequences(module, given, cu_seq_lens_q)
    elif cu_seq_lens_q is not None:
        _refuse_packed(module, dropout, position_bias)
        out = packed_attention(
            module,
            (query, key, value),
            Offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k),
            score_mod((*query.shape[:3], keys), softcap, None, None),
            (is_causal, sliding_window),
            scaling,
            s_aux,
            kernel_options,
        )
        return out, None
    if given is None and is_causal and rows > 1:
        given = causal_mask(query.shape[0], rows, keys, device=query.device)
    block_mask: Any = given
    on_scores: Any = None
    if isinstance(given, Tensor):
        block_mask, on_scores = None, given
    elif isinstance(given, Carrier):
        block_mask = given.own
        if not is_compiling() and given.count is not None:
            # Fewer keys cost less than a mask.
            keys = given.count
            key, value = key.narrow(2, 0, keys), value.narrow(2, 0, keys)
        else:
            on_scores = given.seen
    changed: Any = None
    if softcap is not None or position_bias is not None or on_scores is not None:
        shape = (query.shape[0], query.shape[1], rows, keys)
        changed = score_mod(shape, softcap, position_bias, on_scores)
    out = anyflex.flex_attention(
        query,
        key,
        value,
        changed,
        block_mask,
        scaling,
        enable_gqa=True,
        kernel_options=kernel_options,
        dropout_p=dropout,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def _refuse_packed(module: torch.nn.Module, dropout: float, position_bias: Tensor | None) -> None:
    given = {"dropout": dropout or None, "position_bias": position_bias}
    for name in given:
        if given[name] is not None:
            raise anyflex.ArgumentError(
                f"{type(module).__name__} calls attention with cu_seq_lens_q, sequences packed "
                f"into one row, and {name}=, which packed sequences don't have: pass position_ids "
                "of the sequences instead, which makes a mask"
            )


def _check_knows_sequences(module: torch.nn.Module, mask: Any, offsets: Tensor) -> None:
    # One sequence needs no mask of documents, and transformers makes none for it.
    if isinstance(mask, Carrier) and (mask.documents or offsets.shape[0] == 2):
        return
    raise anyflex.ArgumentError(
        f"{type(module).__name__} calls attention with cu_seq_lens_q, sequences packed into one "
        "row, and with attention_mask, which doesn't keep them apart: leave attention_mask out, "
        "and pass position_ids of the sequences with use_cache=False, from which a mask is made"
    )


def _refuse_unknown(module: torch.nn.Module, others: Mapping[str, Any]) -> None:
    for name, given in others.items():
        if name in WITHOUT_EFFECT or given is None:
            continue
        raise anyflex.ArgumentError(
            f"{type(module).__name__} calls attention with {name}= ({type(given).__name__}), "
            "which attn_implementation='anyflex' doesn't know, and which might change the result: "
            "load the model with attn_implementation='eager'"
        )
