"""Ways to generate text."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import transformers
from comparison import inputs_of, padding
from families import by_name, some
from models import pair


def both(name: str, **options: Any) -> tuple[Any, Any]:
    family = by_name(name)
    mask = padding("left")
    given = {**inputs_of(family), "attention_mask": mask, "eos_token_id": None}
    given |= {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    with torch.no_grad():
        found, expected = (model.generate(**copy.copy(given)) for model in pair(family))
    return found, expected


@pytest.mark.parametrize("name", some(["Gemma 3", "Llama"], 2))
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"prefill_chunk_size": 8},
        {"prompt_lookup_num_tokens": 3},
        {"num_beams": 2, "cache_implementation": "static"},
    ],
    ids=["beams", "chunks of the prompt", "prompt lookup", "beams, static"],
)
def test_generated_tokens_are_those_of_eager_attention(name: str, options: Any) -> None:
    if "prompt_lookup_num_tokens" in options:
        # It takes one sequence alone, and older versions need an eos_token_id.
        rows = inputs_of(by_name(name), rows=1)
        mask = torch.ones(1, 21, dtype=torch.int64)
        options = {**options, **rows, "attention_mask": mask, "eos_token_id": 2}
    found, expected = both(name, **options)
    assert torch.equal(found, expected)


def test_an_assistant_proposes_tokens() -> None:
    family = by_name("Llama")
    found = []
    for model in pair(family):
        assistant = copy.deepcopy(model)
        with torch.no_grad():
            assistant.lm_head.weight[5] += 0.05
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        options |= {"eos_token_id": None, "assistant_model": assistant}
        found.append(model.generate(**inputs_of(family, rows=1), **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["Mistral", "Llama 4"])
def test_a_filled_sliding_cache_goes_on(name: str) -> None:
    family = by_name(name)
    tokens = inputs_of(family, length=30)["input_ids"]
    outputs = []
    for model in pair(family):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[:, :20], past_key_values=cache)
            outputs.append(model(tokens[:, 20:], past_key_values=cache).logits)
    found, expected = outputs
    torch.testing.assert_close(found, expected, atol=5e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.skipif(
    os.environ.get("ANYFLEX_SOAK") != "1",
    reason="only in make soak: compiles for seconds; the forward is compiled by test_families.py",
)
def test_a_compiled_step_decodes_with_a_static_cache() -> None:
    family = by_name("Llama")
    ours, eager = pair(family)
    mask = padding("left")
    given = {**inputs_of(family), "attention_mask": mask, "max_new_tokens": 8}
    given |= {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given["cache_implementation"] = "static"
    compiled = transformers.CompileConfig(backend="aot_eager", fullgraph=True)
    # On a CPU transformers compiles only when it is told to.
    compiled._compile_all_devices = True
    torch.compiler.reset()
    try:
        with torch.no_grad():
            found = ours.generate(**given, compile_config=compiled)
            assert torch.equal(found, eager.generate(**given))
    finally:
        torch.compiler.reset()
