"""A small right backend, which takes no mods and no masks, and the parts of wrong ones."""

from __future__ import annotations

from typing import ClassVar

import torch

from anyflex.plugin import (
    CONTRACT_1_FIELDS,
    Accepted,
    Artifacts,
    Backend,
    Call,
    Capabilities,
    Decision,
    Kernel,
    Outputs,
    Rejected,
    Spec,
)

__all__ = ["Absent", "Broken", "Dense", "DenseKernel", "wrong"]


class DenseKernel(Kernel):
    """softmax(q k^T * scale) v, with torch operations."""

    def forward(self, call: Call, out: Outputs) -> None:
        ratio = call.query.shape[1] // call.key.shape[1]
        key = call.key.float().repeat_interleave(ratio, 1)
        value = call.value.float().repeat_interleave(ratio, 1)
        scores = call.query.float() @ key.mT * call.scale
        out.out.copy_(scores.softmax(-1) @ value)
        if out.lse is not None:
            out.lse.copy_(scores.logsumexp(-1))


class Dense(Backend):
    """Attention without mods; gradients are core's."""

    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        head_dim_max=512,
        different_value_head_dim=True,
        gqa=True,
        kv_broadcast=True,
        scattered=True,
        aux=frozenset({"lse"}),
        core_backward=True,
        known_fields=CONTRACT_1_FIELDS - {"score_graph", "mask_graph", "mask_kind"},
    )
    kernel: ClassVar[type[Kernel]] = DenseKernel

    def probe(self) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        return self.kernel()


def wrong(kernel: type[Kernel]) -> type[Dense]:
    """A `Dense` that computes by another kernel."""
    return type(f"With{kernel.__name__}", (Dense,), {"kernel": kernel})


class Absent(Dense):
    """Its device isn't there."""

    def probe(self) -> Decision:
        return Rejected("no abacus in this machine; buy one")


class Broken(Dense):
    """Its module raises."""

    def probe(self) -> Decision:
        raise OSError("libabacus.so.3: cannot open shared object file")
