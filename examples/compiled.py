"""A layer under torch.compile, whole: one graph, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyflex
from anyflex import masks

torch.manual_seed(0)
B, H, L, E = 2, 4, 128, 16


class Attention(nn.Module):
    """Self-attention that uses keys and values in the layout of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(H * E, 3 * H * E)
        self.out = nn.Linear(H * E, H * E)

    def forward(self, x: Tensor, mask: anyflex.BlockMask) -> Tensor:
        q, k, v = self.heads(x)
        y = anyflex.flex_attention(q, k, v, block_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return self.qkv(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)


layer = Attention()
x = torch.randn(B, L, H * E)
mask = anyflex.create_block_mask(masks.causal(), None, None, L, L)

# Any backend of torch.compile does; "aot_eager" needs no C++ compiler, the default fuses the rest.
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
y = compiled(x, mask)
found = torch.autograd.grad(y.square().sum(), tuple(layer.parameters()))

attended = F.scaled_dot_product_attention(*layer.heads(x), is_causal=True)
expected_y = layer.out(attended.transpose(1, 2).flatten(2))
expected = torch.autograd.grad(expected_y.square().sum(), tuple(layer.parameters()))

torch.testing.assert_close(y, expected_y, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
print("fullgraph=True: no graph break; out and gradients are those of plain torch")
