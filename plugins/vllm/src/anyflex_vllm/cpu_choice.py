"""Attention backend on a CPU, where vLLM asks for CPU_ATTN whatever the user has chosen."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import anyflex
from anyflex_vllm.registration import BACKEND, NAME

__all__ = ["ChosenBackend"]

ChosenBackend: type[AttentionBackend]
"""Anyflex's backend where the user has chosen ANYFLEX, else vLLM's own. It is found when it is
asked for, by the configuration of the model that vLLM is making then."""

# vLLM prints what its own loggers say, no others.
_logger = init_logger(f"vllm.{__name__}")


def __getattr__(name: str) -> Any:
    if name != "ChosenBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    choice = get_current_vllm_config().attention_config
    ours = AttentionBackendEnum[NAME]
    if ours in choice.backend_per_kind.values():
        raise anyflex.ArgumentError(
            f"backend_per_kind must not name {NAME} on a CPU, where vLLM doesn't say which kind "
            f"of layer it asks for: choose it for all layers by attention_backend={NAME!r}"
        )
    if choice.backend is not ours:
        return resolve_obj_by_qualname(AttentionBackendEnum.CPU_ATTN.value)
    _logger.info_once("Using %s on this CPU, by CPU_ATTN's entry.", NAME)
    return resolve_obj_by_qualname(BACKEND)
