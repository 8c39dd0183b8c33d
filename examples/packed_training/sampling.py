"""Text from the trained model, one byte at a time."""

from __future__ import annotations

import torch

from packed_training.corpus import DOCUMENT_START
from packed_training.model import Attention, ByteTransformer

__all__ = ["sample_text"]


@torch.no_grad()
def sample_text(
    model: ByteTransformer,
    attention: Attention,
    *,
    prompt: bytes,
    count: int,
    context: int,
    seed: int,
    temperature: float = 0.7,
) -> str:
    """Continue a new document that begins with `prompt` by `count` bytes.

    The whole context is computed again for each byte, so attention meets every length up to
    `context`. A document that ends is followed by the next, two empty lines below.
    """
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = [DOCUMENT_START, *prompt]
    for _ in range(count):
        tokens = torch.tensor([text[-context:]], device=device)
        logits = model(tokens, attention)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    separator = bytes([DOCUMENT_START])
    return bytes(text).strip(separator).replace(separator, b"\n\n").decode("utf-8", "replace")
