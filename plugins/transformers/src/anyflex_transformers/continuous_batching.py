"""Continuous batching, which transformers offers to implementations of certain names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

import anyflex
from anyflex_transformers.attention import attention

__all__ = ["BATCHED", "PREFIXED", "attention_of_requests", "continuous_batching"]

PREFIXED = "paged|sdpa" in AttentionInterface().valid_keys()
"""Whether transformers calls implementations whose names begin with "paged|" with its cache, as
from 5.0 to 5.18."""
BATCHED = "paged|anyflex_flash" if PREFIXED else "anyflex_flash"
"""Name of the implementation while requests are batched.

transformers takes any name that contains "flash", and treats it as attention that needs offsets
and no dense mask. Names with a digit behind are FlashAttention's own versions.
"""


@contextlib.contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute attention by anyflex in transformers' continuous batching.

    While entered the implementation's name in the model's config is `BATCHED`, which is
    registered for requests that are batched and for nothing else: call ``model.generate_batch``,
    or run a manager of ``model.init_continuous_batching``, and no other forward.

    Args:
        model: as `supports` takes it; its implementation before doesn't matter.

    Raises:
        ArgumentTypeError: not a model of transformers.
        ArgumentError: this version of transformers has no continuous batching by name.
    """
    if not isinstance(model, PreTrainedModel):
        raise anyflex.ArgumentTypeError(
            f"model must be a PreTrainedModel of transformers, got {type(model).__name__}"
        )
    if not hasattr(model, "generate_batch") or not (PREFIXED or _takes_flash_names()):
        raise anyflex.ArgumentError(
            "continuous batching with anyflex needs transformers 5.0 or newer, got "
            f"{transformers.__version__}"
        )
    # A model of images and text has another config for its text.
    configs = {id(each): each for each in (model.config, model.config.get_text_config())}
    before = {name: each._attn_implementation for name, each in configs.items()}
    try:
        for each in configs.values():
            # As a dict, so that configs below stay as they are.
            each._attn_implementation = {"": BATCHED}
        yield
    finally:
        for name, each in configs.items():
            each._attn_implementation = {"": before[name]}


def _takes_flash_names() -> bool:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    return hasattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn")


def attention_of_requests(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (out [1, T, Hq, Ev], None) of requests whose rows are packed into one.

    Args:
        module, query, key, value: as for `attention`.
        attention_mask: None; offsets are the mask.
        cache: transformers' cache of pages, where it hasn't taken the keys yet (5.0 to 5.20).
        options: as for `attention`, and the cache's.

    Raises:
        ArgumentError: a forward without requests.
    """
    if options.get("cu_seq_lens_q") is None:
        raise anyflex.ArgumentError(
            f"attn_implementation={BATCHED!r} computes batched requests alone, inside of "
            "anyflex_transformers.continuous_batching(model): for everything else load the model "
            "with 'anyflex'"
        )
    if cache is not None and PREFIXED:
        index = {name: options.pop(name) for name in ("read_index", "write_index")}
        key, value = (
            each.transpose(0, 1)[None]
            for each in cache.update(key, value, module.layer_idx, **index)
        )
        _choose_kind(module, options)
    elif cache is not None:
        # It chooses the offsets of the layer's kind.
        key, value = cache.update(key, value, module.layer_idx, kwargs=options)
    return attention(module, query, key, value, attention_mask, **options)


def _choose_kind(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Name bounds as newer versions do, and choose the offsets of the layer's kind."""
    window = options.get("sliding_window") or getattr(module, "sliding_window", None)
    kind = "sliding_attention" if window else "full_attention"
    options["sliding_window"] = window
    options["max_length_q"] = options.pop("max_seqlen_q")
    options["max_length_k"] = options.pop("max_seqlen_k")
    for name in ("cu_seq_lens_k", "max_length_k"):
        if isinstance(options[name], dict):
            options[name] = options[name][kind]
