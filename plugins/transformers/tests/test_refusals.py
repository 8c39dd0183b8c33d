"""Calls that would give another result than the model's authors mean are refused, by name."""

from __future__ import annotations

import warnings
from itertools import accumulate
from typing import Any

import anyflex_transformers
import pytest
import torch
import transformers
from anyflex_transformers.attention import attention
from anyflex_transformers.carrier import Carrier, NoTensorError
from anyflex_transformers.masks import MASKS_TAKE_POSITIONS, causal_mask
from families import by_name
from models import pair

import anyflex


def layer(**fields: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    module.config = transformers.PretrainedConfig(**fields)  # type: ignore[assignment]
    return module


def tensors() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 5, 8) for _ in range(3)]


@pytest.mark.parametrize("name", ["indices", "block_indices", "head_mask", "invented"])
def test_unknown_keywords_are_refused(name: str) -> None:
    with pytest.raises(anyflex.ArgumentError, match=f"calls attention with {name}= \\(Tensor\\)"):
        attention(layer(), *tensors(), None, **{name: torch.zeros(1)})


def test_unknown_keywords_that_are_none_are_taken() -> None:
    out, weights = attention(layer(), *tensors(), None, indices=None)
    assert out.shape == (1, 5, 2, 8) and out.is_contiguous() and weights is None


@pytest.mark.parametrize("kind", ["a block mask", "a tensor"])
def test_offsets_of_sequences_beside_a_mask_that_does_not_know_them_are_refused(kind: str) -> None:
    mask = causal_mask(1, 5, 5) if kind == "a block mask" else torch.ones(1, 1, 5, 5).bool()
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(anyflex.ArgumentError, match=r"cu_seq_lens_q.*leave attention_mask out"):
        attention(layer(), *tensors(), mask, cu_seq_lens_q=offsets)


@pytest.mark.parametrize("lengths", [(3, 4), (7,)])
def test_offsets_of_sequences_are_taken_beside_a_mask_that_was_made_of_positions(
    lengths: tuple[int, ...],
) -> None:
    ours, eager = pair(by_name("Llama"))
    tokens = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    given = {"position_ids": positions, "use_cache": False}
    found = ours(tokens, **given, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets).logits
    apart = [eager(part, use_cache=False).logits for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(found, torch.cat(apart, 1), atol=1e-4, rtol=1e-4)


def test_attention_weights_are_not_returned_and_it_says_so() -> None:
    with pytest.warns(UserWarning, match="returns no attention weights"):
        attention(layer(), *tensors(), None, output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(layer(), *tensors(), None, output_attentions=False)


@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("attention_mask", (1, 5)),
        ("attention_mask", (1, 3, 5, 5)),
        ("attention_mask", (1, 1, 4, 5)),
        ("attention_mask", (1, 1, 5, 4)),
        ("position_bias", (2, 2, 5, 5)),
    ],
)
def test_masks_and_biases_of_a_wrong_shape(argument: str, shape: tuple[int, ...]) -> None:
    given = {"attention_mask": None, argument: torch.zeros(shape)}
    with pytest.raises(anyflex.ArgumentError, match=f"{argument} must have shape .* got"):
        attention(layer(), *tensors(), **given)


@pytest.mark.parametrize(
    ("argument", "dtype"), [("attention_mask", torch.int64), ("position_bias", torch.bool)]
)
def test_masks_and_biases_of_a_wrong_dtype(argument: str, dtype: torch.dtype) -> None:
    given = {"attention_mask": None, argument: torch.ones(1, 1, 5, 5, dtype=dtype)}
    with pytest.raises(anyflex.ArgumentTypeError, match=f"{argument} must be .*got {dtype}"):
        attention(layer(), *tensors(), **given)


USES: dict[str, Any] = {
    "added": lambda mask: torch.zeros(1, 2, 5, 5) + mask,
    "added to": lambda mask: mask + torch.zeros(1, 2, 5, 5),
    "inverted": lambda mask: 1.0 - mask,
    "given to torch": lambda mask: torch.where(mask, 1.0, 0.0),
    "cast": lambda mask: mask.to(torch.float32),
    "cast by name": lambda mask: mask.to(dtype=torch.float32),
    "a method": lambda mask: mask.bool(),
    "an attribute": lambda mask: mask.dtype,
    "another slice": lambda mask: mask[:, :, :, :3],
    "a step": lambda mask: mask[:, :, ::2, :],
    "indexed": lambda mask: mask[0],
    "compared": lambda mask: mask > 0,
}


@pytest.mark.parametrize("use", USES)
def test_a_block_mask_is_no_tensor(use: str) -> None:
    with pytest.raises(NoTensorError, match=r"computes attention itself.*attn_implementation='ea"):
        USES[use](causal_mask(1, 5, 5))


def test_what_transformers_does_with_a_mask_it_may() -> None:
    mask = causal_mask(2, 5, 7)
    assert isinstance(mask, torch.nn.attention.flex_attention.BlockMask)
    assert mask.shape == (2, 1, 5, 7) and mask.ndim == 4 and not mask.requires_grad
    assert not hasattr(mask, "dtype")
    assert mask.to("cpu").own is not None and mask.to(device="cpu", non_blocking=True)
    assert mask.contiguous() is mask
    rows = mask[:, :, -2:, :]
    assert isinstance(rows, Carrier) and rows.shape == (2, 1, 2, 7)
    dense = anyflex.create_mask(causal_mask(1, 5, 7).own.mask_mod, 1, 1, 5, 7)[:, :, -2:]
    assert (anyflex.create_mask(rows.own.mask_mod, 1, 1, 2, 7) == dense).all()


def test_models_that_compute_attention_themselves_are_told_apart() -> None:
    ours, _ = pair(by_name("Llama"))
    assert anyflex_transformers.supports(ours)
    config = transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=1, n_head=4)
    assert not anyflex_transformers.supports(transformers.BloomForCausalLM(config))
    assert not anyflex_transformers.supports(torch.nn.Linear(1, 1))


@pytest.mark.skipif(
    MASKS_TAKE_POSITIONS, reason="this transformers makes the mask of such a model elsewhere"
)
def test_a_model_that_computes_attention_itself_fails_with_the_cure() -> None:
    config = transformers.MptConfig(vocab_size=64, d_model=64, n_heads=4, n_layers=1)
    config._attn_implementation = "anyflex"
    model = transformers.MptForCausalLM(config)
    assert not anyflex_transformers.supports(model)
    with pytest.raises(NoTensorError, match=r"supports\(model\) tells beforehand"):
        model(torch.zeros(1, 5, dtype=torch.int64))
