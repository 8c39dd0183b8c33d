"""Tiny models with random weights, written by transformers; no downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

__all__ = ["FAMILIES", "Family", "write"]

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


class Family(NamedTuple):
    """A family of models, and what it adds to attention.

    Args:
        model: name of transformers' class.
        options: fields of its configuration, beside `SIZES`.
    """

    model: str
    options: dict[str, Any]


FAMILIES = {
    "grouped queries": Family("LlamaForCausalLM", {}),
    "window": Family("MistralForCausalLM", {"sliding_window": 24}),
    "soft cap, window in every other layer": Family(
        "Gemma2ForCausalLM",
        {
            "sliding_window": 24,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "ALiBi": Family("BloomForCausalLM", {"n_head": 4, "n_layer": 2, "tie_word_embeddings": True}),
    "sinks, window in every other layer": Family(
        "GptOssForCausalLM",
        {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}
"""Families by what attention has in them."""


def write(family: Family, folder: Path) -> Any:
    """Return a model of random weights, in float32, after writing it to `folder`."""
    torch.manual_seed(0)
    made = getattr(transformers, family.model)
    config = made.config_class(**{**SIZES, **family.options}, pad_token_id=0)
    config._attn_implementation = "eager"
    model = made(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif "norm" not in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model
