"""One training script through torch's API, re-routed to anyflex, and through anyflex's own."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor, nn
from torch.nn import functional as F

import anyflex

B, H, L, E, STEPS = 4, 4, 128, 16, 10
documents = torch.arange(L) // 48  # three documents packed into each row


def document_causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)


class Model(nn.Module):
    """A layer of attention with a learned penalty a head; `library` is torch's module or anyflex,
    None for the dense formula."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library = library
        self.embed = nn.Embedding(64, H * E)
        self.qkv = nn.Linear(H * E, 3 * H * E)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.4, H))
        self.head = nn.Linear(H * E, 64)

    def forward(self, tokens: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)

        def penalty(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - self.slopes[h] * (q_idx - kv_idx)

        if self.library is None:
            distance = torch.arange(L)[:, None] - torch.arange(L)
            bias = torch.where(mask, -self.slopes[:, None, None] * distance, -torch.inf)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            y = self.library.flex_attention(q, k, v, penalty, mask)
        return self.head(y.transpose(1, 2).flatten(2))


def train(library: Any, *, compiled: bool = False) -> Tensor:
    """Return the loss of each step."""
    torch.manual_seed(0)
    model = Model(library)
    tokens = (torch.arange(B * L).reshape(B, L) * 7) % 64
    if library is None:
        rows, columns = torch.arange(L)[:, None], torch.arange(L)
        mask = document_causal(rows, rows, rows, columns)
    else:
        mask = library.create_block_mask(document_causal, None, None, L, L, device="cpu")
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    began = time.perf_counter()
    for _ in range(STEPS):
        logits = call(tokens, mask)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    name = "the dense formula" if library is None else library.__name__
    print(f"{name}: loss {losses[-1]:.3f}, {time.perf_counter() - began:.2f} s")
    return torch.stack(losses)


try:
    train(torch_flex)
except NotImplementedError as error:
    print(f"torch by itself: {error}")

print("re-routed on", *anyflex.reroute_torch(["cpu"]))
rerouted = train(torch_flex)
rerouted_and_compiled = train(torch_flex, compiled=True)
anyflex.restore_torch()

dense = train(None)
torch.testing.assert_close(rerouted, dense, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(rerouted_and_compiled, dense, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(train(anyflex), dense, rtol=1e-4, atol=1e-4)
print("torch's API re-routed, eager and compiled, and anyflex's own: the losses are the same")
