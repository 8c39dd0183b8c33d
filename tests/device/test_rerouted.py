"""torch's functions re-routed to anyflex on a GPU: the call of torch's own user, compiled by
Inductor, beside torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import anyflex

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)


def results(call: Callable[..., Tensor]) -> list[Tensor]:
    """Out and the gradients of q, k, v and a captured tensor."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    leaves = [
        torch.randn(shape, generator=draw, device="cuda", requires_grad=True)
        for shape in [(2, 4, 256, 64)] * 3 + [(4,)]
    ]
    slopes = leaves[3]

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * 0.01 * (k - q)

    mask = create_block_mask(causal, None, None, 256, 256, device="cuda")
    out = call(*leaves[:3], score, mask)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rerouted_call_trains_and_torch_computes_before_and_after(compiled: bool) -> None:
    torch._dynamo.reset()
    call = torch.compile(flex_attention, fullgraph=True)
    before = results(call)
    anyflex.reroute_torch(["cuda"])
    try:
        routed = results(call if compiled else flex_attention)
    finally:
        anyflex.restore_torch()
    after = results(call)
    for own, again, found in zip(before, after, routed, strict=True):
        torch.testing.assert_close(found, own, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(again, own, rtol=2e-3, atol=2e-3)
