"""Training in the ways that users of transformers have."""

from __future__ import annotations

from typing import Any

import anyflex_transformers
import pytest
import torch
import transformers
from comparison import assert_equal, inputs_of, padding
from families import by_name
from models import pair


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    family = by_name("Gemma 2")
    ours, eager = pair(family)
    ours.train()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    mask = padding("left")
    inputs = {**inputs_of(family), "attention_mask": mask, "use_cache": False}
    assert_equal(ours, eager, inputs, mask.bool())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_low_precision_is_as_near_as_eager_attention(dtype: torch.dtype, autocast: bool) -> None:
    family = by_name("Gemma 2")
    inputs = inputs_of(family)
    ours, eager = pair(family)
    with torch.no_grad():
        exact = eager(**inputs).logits
    errors = []
    for model in (ours, eager):
        if not autocast:
            model.to(dtype)
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
            out = model(**inputs).logits
        assert not out.isnan().any()
        errors.append(float((out - exact).abs().mean()))
    assert errors[0] <= 1.5 * errors[1]


def test_a_model_comes_back_from_disk(tmp_path: Any) -> None:
    family = by_name("Llama")
    ours, _ = pair(family)
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=anyflex_transformers.NAME
    )
    assert again.config._attn_implementation == "anyflex"
    with torch.no_grad():
        assert torch.equal(again(**inputs_of(family)).logits, ours(**inputs_of(family)).logits)


def test_a_model_changes_its_implementation() -> None:
    family = by_name("Llama")
    ours, eager = pair(family)
    eager.set_attn_implementation("anyflex")
    with torch.no_grad():
        assert torch.equal(eager(**inputs_of(family)).logits, ours(**inputs_of(family)).logits)


def test_learned_biases_get_their_gradient() -> None:
    from anyflex_transformers.attention import attention

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = random(2, 4, 5, 8), random(2, 2, 7, 8), random(2, 2, 7, 6)
    bias = random(1, 4, 1, 7).requires_grad_()
    live = torch.rand(2, 1, 5, 7, generator=generator) < 0.8
    sinks = random(4).requires_grad_()
    module = torch.nn.Module()
    options = {"scaling": 0.3, "softcap": 2.0, "position_bias": bias, "s_aux": sinks}
    out, _ = attention(module, query, key, value, live, **options)
    keys, values = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = 2.0 * torch.tanh(query @ keys.mT * 0.3 / 2.0) + bias
    scores = scores.masked_fill(~live, -torch.inf)
    scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    expected = (scores.softmax(-1)[..., :-1] @ values).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    weights = random(*out.shape)
    found = torch.autograd.grad((out * weights).sum(), (bias, sinks))
    wanted = torch.autograd.grad((expected * weights).sum(), (bias, sinks))
    torch.testing.assert_close(found, wanted)


def test_weights_are_dropped_in_training_alone() -> None:
    family = by_name("GPT-2")
    inputs = inputs_of(family)
    ours, eager = pair(family)
    for model in (ours, eager):
        for block in model.transformer.h:
            block.attn.attn_dropout.p = 0.5

    def trained(model: Any, seed: int) -> torch.Tensor:
        model.train()
        torch.manual_seed(seed)
        with torch.no_grad():
            return model(**inputs).logits

    with torch.no_grad():
        assert torch.allclose(
            ours.eval()(**inputs).logits, eager.eval()(**inputs).logits, atol=1e-4
        )
    assert torch.equal(trained(ours, 0), trained(ours, 0))
    assert not torch.equal(trained(ours, 0), trained(ours, 1))
    # Each draws masks of its own, so their means over many are compared: one token's logits are
    # apart by what two independent means are.
    means, variances = [], []
    for model in (ours, eager):
        drawn = torch.stack([trained(model, seed) for seed in range(32)])
        means.append(drawn.mean(0))
        variances.append(drawn.var(0) / 32)
    apart = (means[0] - means[1]) / (variances[0] + variances[1]).sqrt().clamp(min=1e-6)
    assert apart[:, 1:].square().mean() < 1.3
