"""Choice of a backend: who computes a call, why the others don't, and how to force one."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import anyflex
from anyflex import masks

torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
mask = anyflex.create_block_mask(masks.causal(), None, None, 256, 256)
expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)

# `explain` takes the arguments of the call, and computes nothing.
explanation = anyflex.explain(q, k, v, block_mask=mask)
print(explanation)

# Forced for one call, or for a block. The reference runs on any device.
out = anyflex.flex_attention(q, k, v, block_mask=mask, backend="reference")
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
with anyflex.use_backend("reference"):
    assert anyflex.explain(q, k, v, block_mask=mask).to_dict()["backend"] == "reference"
    out = anyflex.flex_attention(q, k, v, block_mask=mask)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

# A backend that doesn't exist, or doesn't take the call, is an error: nothing falls back.
try:
    anyflex.flex_attention(q, k, v, block_mask=mask, backend="referense")
except anyflex.ArgumentError as error:
    print(f"\nArgumentError: {error}")
else:
    raise AssertionError("a wrong name was taken")
