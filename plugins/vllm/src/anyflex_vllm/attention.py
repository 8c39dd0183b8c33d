"""AnyflexImpl: a layer's attention, and its writes to the cache."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

import anyflex
from anyflex_vllm.metadata import AnyflexMetadata
from anyflex_vllm.mods import mask_mod, score_mod

__all__ = ["ATTENTION_TYPES", "CACHE_DTYPES", "AnyflexImpl"]

ATTENTION_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
QUANTISED = torch.float8_e4m3fn
"""Numbers of a cache whose dtype vLLM calls fp8; it hands the cache over as bytes."""


class AnyflexImpl(AttentionImpl[AnyflexMetadata]):
    """Attention of one layer of a model.

    Args:
        num_heads, head_size, num_kv_heads: of this process's part of the layer.
        scale: multiplied into q k^T.
        alibi_slopes: one for each query head; None: no ALiBi.
        sliding_window: keys that a token sees, its own included; None: all.
        kv_cache_dtype: one of `CACHE_DTYPES`; the query's dtype, or 8 bits with one scale a layer.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``; None and 0: they don't.
        attn_type: one of `ATTENTION_TYPES`.
        kv_sharing_target_layer_name: the layer whose cache this one reads; vLLM binds it.
        sinks: [num_heads], one more score a head whose value is 0.
        others: what some models ask of some backends; refused.

    Raises:
        ArgumentError: the layer asks for what isn't taken; the message names it.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        for name, given in others.items():
            _refuse(name, given, "nothing of that name")
        if kv_cache_dtype not in CACHE_DTYPES:
            _refuse("kv_cache_dtype", kv_cache_dtype, f"one of {', '.join(CACHE_DTYPES)}")
        if attn_type not in ATTENTION_TYPES:
            _refuse("attn_type", attn_type, "a decoder, or an encoder alone")
        if self.total_cp_world_size > 1:
            _refuse("context parallelism", self.total_cp_world_size, "1, all keys on each device")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._encodes = attn_type == AttentionType.ENCODER_ONLY
        self._quantised = kv_cache_dtype.startswith("fp8")
        self._score_mod = score_mod(alibi_slopes, logits_soft_cap or None, self._encodes)
        # Kept, so that a step finds the mask that it has seen in an earlier layer.
        self._mask_mods = {
            causal: mask_mod(causal, sliding_window, self._encodes) for causal in (False, True)
        }

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AnyflexMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write attention of the batch to `output` and return it.

        Args:
            layer: vLLM's layer, which has the scales of a quantised cache.
            query: [tokens, num_heads, head_size].
            key, value: [tokens, num_kv_heads, head_size]; a decoder's are in the cache already.
            kv_cache: [blocks, num_kv_heads, block, key's and value's head sizes]; any strides.
            attn_metadata: None while vLLM measures memory: output is zeros.
            output: [tokens, num_heads, head size of value].
            output_scale, output_block_scale: None; quantised outputs aren't taken.
        """
        for name, given in (
            ("output_scale", output_scale),
            ("output_block_scale", output_block_scale),
        ):
            if given is not None:
                _refuse(name, "a tensor", "None: outputs are not quantised")
        if attn_metadata is None:
            return output.fill_(0)
        step, tokens, causal = attn_metadata
        if self._encodes:
            keys, values = key[:tokens], value[:tokens]
        else:
            keys, values = self._pools(kv_cache)
        with torch.no_grad():
            anyflex.flex_attention_packed(
                query[:tokens],
                keys,
                values,
                step,
                self._score_mod,
                self._mask_mods[causal],
                scale=self.scale,
                enable_gqa=self.num_kv_heads != self.num_heads,
                sinks=self.sinks,
                k_scale=layer._k_scale if self._quantised else None,
                v_scale=layer._v_scale if self._quantised else None,
                out=output[:tokens],
            )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the batch's keys and values to the cache; vLLM calls it before `forward`."""
        if self._encodes:
            return
        tokens = slot_mapping.shape[0]
        key, value = key[:tokens], value[:tokens]
        if self._quantised:
            key, value = _quantised(key, layer._k_scale), _quantised(value, layer._v_scale)
        # Padding has slot -1, which isn't in the cache: such rows are dropped.
        torch.ops.anyflex.append_kv(*self._pools(kv_cache), None, None, key, value, slot_mapping)

    def _pools(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values in pages, views of the cache."""
        cache = kv_cache.view(QUANTISED) if self._quantised else kv_cache
        return cache[..., : self.head_size], cache[..., self.head_size :]


def _quantised(rows: Tensor, scale: Tensor) -> Tensor:
    largest = torch.finfo(QUANTISED).max
    return (rows.float() / scale).clamp(-largest, largest).to(QUANTISED)


def _refuse(name: str, given: Any, required: str) -> NoReturn:
    raise anyflex.ArgumentError(
        f"a layer of this model has {name} = {given!r}, and ANYFLEX requires {required}: choose "
        "another attention_backend for this model"
    )
