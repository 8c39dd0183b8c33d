"""Caches in fp8: what is stored, and what a model says that rounds its keys and values so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM isn't installed; it needs a torch of its own")

import transformers
from anyflex_vllm.attention import AnyflexImpl
from models import FAMILIES, write
from serving import serve
from test_generation import REQUESTS, check
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward


def test_rows_are_divided_by_the_scale_of_the_layer_and_saturate() -> None:
    impl = AnyflexImpl(4, 32, 0.5, 2, kv_cache_dtype="fp8")
    layer = SimpleNamespace(_k_scale=torch.tensor(2.0), _v_scale=torch.tensor(0.25))
    key, value = torch.randn(2, 3, 2, 32).unbind(0)
    key[0] *= 1e6
    cache = torch.full((5, 2, 4, 64), 0x7F, dtype=torch.uint8)  # NaN in fp8
    impl.do_kv_cache_update(layer, key, value, cache, torch.tensor([6, -1, 17]))
    stored = cache.view(torch.float8_e4m3fn)
    for token, block, row in ((0, 1, 2), (2, 4, 1)):
        found_key, found_value = stored[block, :, row].float().split(32, -1)
        exact = (key[token] / 2).clamp(-448, 448)
        torch.testing.assert_close(found_key, exact, atol=2**-10, rtol=2**-4)
        torch.testing.assert_close(found_value, value[token] * 4, atol=2**-10, rtol=2**-4)
        cache[block, :, row] = 0x7F
    assert (cache == 0x7F).all()


def test_answers_are_those_of_the_model_with_rounded_keys_and_values(tmp_path: Path) -> None:
    model = write(FAMILIES["grouped queries"], tmp_path)
    answers, _ = serve(tmp_path, "ANYFLEX", REQUESTS, kv_cache_dtype="fp8")
    transformers.AttentionInterface.register("rounded", rounded_attention)
    transformers.AttentionMaskInterface.register("rounded", eager_mask)
    model.set_attn_implementation("rounded")
    # A number near the middle of two of fp8 may be rounded to either.
    check(model, REQUESTS, answers, tolerance=0.05)


def rounded_attention(
    module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any
) -> Any:
    """Eager attention over keys and values in fp8."""
    key, value = (each.to(torch.float8_e4m3fn).to(each.dtype) for each in (key, value))
    return eager_attention_forward(module, query, key, value, *rest, **more)
