"""Encoders, which see both sides and have no cache, embed prompts as transformers does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM isn't installed; it needs a torch of its own")

import transformers
from serving import embed

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("name", "options"),
    [("Bert", {}), ("ModernBert", {"local_attention": 16, "global_attn_every_n_layers": 2})],
)
def test_prompts_of_several_lengths(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    chosen = random.Random(0)
    prompts = [[chosen.randrange(3, 256) for _ in range(length)] for length in (5, 61, 1, 33)]
    for prompt, found in zip(prompts, embed(tmp_path, prompts), strict=True):
        with torch.no_grad():
            first = model(torch.tensor([prompt])).last_hidden_state[0, 0]
        alone = torch.nn.functional.normalize(first, dim=0)
        torch.testing.assert_close(torch.tensor(found), alone, atol=1e-5, rtol=1e-4)
