"""Models of every family compute with anyflex what they compute with eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_equal, inputs_of, packed_positions, padding
from families import FAMILIES, Family, some
from models import pair

TEXT = [family for family in FAMILIES if family.kind in ("decoder", "encoder", "encoder-decoder")]


def named(families: Any) -> Any:
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)


@named(FAMILIES)
def test_outputs_and_gradients_are_those_of_eager_attention(family: Family) -> None:
    ours, eager = pair(family)
    assert_equal(ours, eager, inputs_of(family), None)


@named(some(TEXT))
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(family: Family, side: str) -> None:
    if side not in family.sides:
        pytest.skip("the model doesn't offer it")
    ours, eager = pair(family)
    mask = padding(side)
    inputs = {**inputs_of(family), "attention_mask": mask}
    live = mask.bool() if family.kind != "encoder-decoder" else None
    assert_equal(ours, eager, inputs, live)


@named(some([family for family in FAMILIES if family.kind == "decoder" and family.packed]))
def test_packed_documents(family: Family) -> None:
    ours, eager = pair(family)
    inputs = {**inputs_of(family, rows=1), "position_ids": packed_positions(9, 1, 11)}
    assert_equal(ours, eager, {**inputs, "use_cache": False}, None)


@named(some([family for family in FAMILIES if family.kind == "decoder" and family.dense]))
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bool", "float"])
def test_masks_of_the_user(family: Family, dtype: torch.dtype) -> None:
    ours, eager = pair(family)
    inputs = inputs_of(family)
    length = inputs["input_ids"].shape[1]
    generator = torch.Generator().manual_seed(2)
    live = torch.rand(2, 1, length, length, generator=generator) < 0.7
    live = live.tril() | torch.eye(length, dtype=torch.bool)
    mask = torch.where(live, 0.0, torch.finfo(torch.float32).min)
    layers = set(getattr(ours.config, "layer_types", None) or [])
    given = live if dtype is torch.bool else mask

    def inputs_with(mask: Any) -> Any:
        return {**inputs, "attention_mask": dict.fromkeys(layers, mask) if layers else mask}

    expected = eager(**inputs_with(mask)).logits
    out = ours(**inputs_with(given)).logits
    torch.testing.assert_close(out, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


@named(some([family for family in FAMILIES if family.generate]))
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens(family: Family, cache: str) -> None:
    if cache not in family.generate:
        pytest.skip("the model doesn't offer it")
    ours, eager = pair(family, cache)
    mask = padding("left")
    inputs = {**inputs_of(family), "attention_mask": mask}
    inputs.pop("decoder_input_ids", None)
    # One more than a window or a chunk of any family has.
    options = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    options |= {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    with torch.no_grad():
        found, expected = (model.generate(**inputs, **options) for model in (ours, eager))
    assert (found.sequences == expected.sequences).all()
    for step, logits in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(step, logits, atol=5e-5 * float(logits.abs().max()), rtol=0)


@named(some([family for family in FAMILIES if family.compiles], 8))
def test_one_graph_computes_the_same(family: Family) -> None:
    ours, eager = pair(family, "compiles")
    mask = padding("left")
    inputs = {**inputs_of(family), "attention_mask": mask}
    torch.compiler.reset()
    try:
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        assert_equal_models(compiled, ours, eager, inputs, mask)
    finally:
        torch.compiler.reset()


def assert_equal_models(compiled: Any, ours: Any, eager: Any, inputs: Any, mask: Any) -> None:
    class Called:
        zero_grad = ours.zero_grad
        named_parameters = ours.named_parameters

        def __call__(self, **given: Any) -> Any:
            return compiled(**given)

    assert_equal(Called(), eager, inputs, mask.bool())


@named(some([family for family in FAMILIES if family.kind == "decoder"], 12))
def test_training_steps(family: Family) -> None:
    models = pair(family)
    inputs = inputs_of(family)["input_ids"]
    losses = []
    for model in models:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        lost = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=inputs, labels=inputs).loss
            loss.backward()
            optimizer.step()
            lost.append(float(loss))
        losses.append(lost)
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
    assert losses[0][2] < losses[0][0]
