"""Ring attention's arithmetic on one machine: parts of the keys, merged by lse, and backward."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import anyflex
from anyflex import masks

torch.manual_seed(0)
B, H, L, E, PARTS = 1, 4, 256, 32, 4
WIDTH = L // PARTS
q, k, v = (torch.randn(B, H, L, E, requires_grad=True) for _ in range(3))
dout = torch.randn(B, H, L, E)


def part_of(part: int):
    """The keys and values of one rank, and causal's mask of all queries with them."""
    place = slice(part * WIDTH, (part + 1) * WIDTH)
    mask = anyflex.create_block_mask(masks.causal(offset=-place.start), None, None, L, WIDTH)
    return place, mask


# Forward: each part has a softmax of its own, and its lse says how much it weighs.
out = torch.zeros(B, H, L, E)
lse = torch.full((B, H, L), -torch.inf)
with torch.no_grad():
    for part in range(PARTS):
        place, mask = part_of(part)
        ours, aux = anyflex.flex_attention(
            q,
            k[:, :, place],
            v[:, :, place],
            block_mask=mask,
            return_aux=anyflex.AuxRequest(lse=True),
        )
        merged = torch.logaddexp(lse, aux.lse)
        out = out * (lse - merged).exp()[..., None] + ours * (aux.lse - merged).exp()[..., None]
        lse = merged

# Backward: each part computes with the lse of the whole row; dq is the sum of the parts'.
dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
with torch.no_grad():
    for part in range(PARTS):
        place, mask = part_of(part)
        grads = anyflex.flex_attention_backward(
            dout, q, k[:, :, place], v[:, :, place], out, lse, block_mask=mask
        )
        dq += grads.query
        dk[:, :, place], dv[:, :, place] = grads.key, grads.value

whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
expected = torch.autograd.grad(whole, (q, k, v), dout)
torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-5)
torch.testing.assert_close((dq, dk, dv), expected, rtol=1e-4, atol=1e-4)
print(f"{PARTS} parts of {WIDTH} keys, merged: out and gradients are those of the whole")

# An attention sink is one more part, of one score and a value of 0.
sink = torch.randn(H)
one_more = torch.logaddexp(lse, sink[:, None])
torch.testing.assert_close(
    anyflex.with_sinks(out, lse, sink), out * (lse - one_more).exp()[..., None]
)
print("a sink is one more part, whose value is 0")
