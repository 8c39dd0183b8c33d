"""Metadata of a batch: vLLM's device tensors as a step of anyflex."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

import anyflex

__all__ = ["AnyflexMetadata", "AnyflexMetadataBuilder"]


class AnyflexMetadata(NamedTuple):
    """State that the layers of one group share in one forward pass.

    Args:
        step: whose rows and pages are whose. It keeps what the layers find out about their masks.
        num_actual_tokens: rows of query before vLLM's padding.
        causal: a token sees no later ones.
    """

    step: anyflex.Step
    num_actual_tokens: int
    causal: bool


class AnyflexMetadataBuilder(AttentionMetadataBuilder[AnyflexMetadata]):
    """Makes the metadata of a batch from its tensors, without reading them on the host."""

    # A captured graph would need the step to begin inside of it; vLLM builds metadata before.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._encodes = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> AnyflexMetadata:
        """Return the metadata of a batch.

        Args:
            common_prefix_len: always 0.
            common_attn_metadata: vLLM's CommonAttentionMetadata; its lengths stay on the device.
            fast_build: without a meaning here, nothing is built that a draft wouldn't need.

        Raises:
            ArgumentError: the batch asks for a mask that isn't taken; the message names it.
        """
        batch = common_attn_metadata
        if not isinstance(batch.causal, bool):
            _refuse("causal, one for each request", "a bool for the whole batch")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(batch, name) is not None:
                _refuse(name, "None: no prefix that sees itself")
        if self._encodes:
            # Keys are the tokens of the call itself, in no cache.
            packed = anyflex.Packed(
                batch.query_start_loc, max_q=batch.max_query_len, max_kv=batch.max_query_len
            )
        else:
            packed = anyflex.Packed(
                batch.query_start_loc,
                batch.seq_lens,
                page_table=batch.block_table_tensor,
                max_q=batch.max_query_len,
                max_kv=batch.max_seq_len,
            )
        return AnyflexMetadata(packed.begin(), batch.num_actual_tokens, batch.causal)


def _refuse(what: str, required: str) -> None:
    raise anyflex.ArgumentError(
        f"the batch has {what}, and ANYFLEX requires {required}: choose another attention_backend "
        "for this model"
    )
