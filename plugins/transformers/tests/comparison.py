"""A forward and backward of two models on equal inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["assert_equal", "inputs_of", "packed_positions", "padding"]

LENGTH = 21


def padding(side: str, rows: int = 2, length: int = LENGTH) -> Tensor:
    """attention_mask whose first row has a third of padding."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    third = length // 3
    if side == "left":
        mask[0, :third] = 0
    else:
        mask[0, -third:] = 0
    return mask


def packed_positions(*lengths: int) -> Tensor:
    """position_ids of documents of these lengths in one row."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def inputs_of(family: Any, *, rows: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def tokens() -> Tensor:
        return torch.randint(3, 64, (rows, length), generator=generator)

    if family.kind == "vision":
        return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=generator)}
    if family.kind == "images and text":
        text = tokens() % 60
        text[:, 5:9] = 63
        images = torch.randn(rows, 3, 32, 32, generator=generator)
        kinds = (text == 63).to(torch.int64)
        return {"input_ids": text, "pixel_values": images, "token_type_ids": kinds}
    if family.kind == "audio":
        features = torch.randn(rows, 16, 64, generator=generator)
        return {"input_features": features, "decoder_input_ids": tokens()}
    if family.kind == "encoder-decoder":
        return {"input_ids": tokens(), "decoder_input_ids": tokens()[:, :13]}
    return {"input_ids": tokens()}


def assert_equal(ours: Any, eager: Any, inputs: dict[str, Tensor], live: Tensor | None) -> None:
    """Compare outputs and gradients.

    Args:
        live: bool [B, L], the tokens to compare; None: all. What a padding row attends to is up to
            the implementation.
    """
    (out, gradients), (expected, expected_gradients) = (
        _run(model, inputs, live) for model in (ours, eager)
    )
    assert not out.isnan().any()
    largest = expected.abs().max()
    torch.testing.assert_close(out / largest, expected / largest, atol=2e-5, rtol=0)
    # A key's bias has gradient 0 but for rounding: all are relative to the largest.
    scale = max(each.abs().max() for each in expected_gradients.values())
    assert scale > 0
    for name, gradient in expected_gradients.items():
        found = gradients[name] / scale
        assert (found - gradient / scale).abs().max() < 2e-4, name


def _run(
    model: Any, inputs: dict[str, Tensor], live: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**inputs)
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    if live is not None:
        out = out[live]
    # Weights that differ for each number: a mean would hide errors that cancel.
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights.sin()).sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return out.detach(), gradients
