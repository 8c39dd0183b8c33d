"""AnyflexBackend: what vLLM is told about anyflex before it makes a model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from anyflex_vllm.attention import ATTENTION_TYPES, CACHE_DTYPES, AnyflexImpl
from anyflex_vllm.metadata import AnyflexMetadataBuilder
from anyflex_vllm.registration import NAME

__all__ = ["AnyflexBackend"]


class AnyflexBackend(AttentionBackend):
    """Attention over vLLM's paged cache by `anyflex.flex_attention_packed`.

    Pages of any size and any of vLLM's layouts are taken as they are. What isn't declared here
    vLLM refuses on a GPU; on a CPU it doesn't look, so that `AnyflexImpl` refuses it as well.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[AnyflexImpl]:
        return AnyflexImpl

    @staticmethod
    def get_builder_cls() -> type[AnyflexMetadataBuilder]:
        return AnyflexMetadataBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ATTENTION_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True
