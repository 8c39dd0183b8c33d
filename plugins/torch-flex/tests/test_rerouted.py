"""A call of torch's function that is re-routed to anyflex, and from there to torch."""

from __future__ import annotations

import pytest
import torch
from anyflex_torch_flex.backend import TorchFlexCpu
from anyflex_torch_flex.kernel import TorchFlexKernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import anyflex
from anyflex.plugin import isolated, register

__all__: list[str] = []


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rerouted_call_reaches_torch_s_kernel_once(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = []
    forward = TorchFlexKernel.forward

    def counted(self, call, out):
        launches.append(call)
        assert len(launches) == 1
        forward(self, call, out)

    monkeypatch.setattr(TorchFlexKernel, "forward", counted)
    query, key, value = torch.randn(3, 1, 2, 64, 16)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu")
    call = flex_attention
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    anyflex.reroute_torch(["cpu"])
    try:
        with isolated():
            register("cpu.torch", TorchFlexCpu)
            out = call(query, key, value, block_mask=mask)
    finally:
        anyflex.restore_torch()
    torch.testing.assert_close(out, wanted)
    assert len(launches) == 1


def test_this_backend_makes_no_device_a_default_one() -> None:
    assert TorchFlexCpu.priority < 0
