"""The reference as a backend: the last candidate for every device type."""

from __future__ import annotations

import torch

from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved
from anyflex.contract.capabilities import CONTRACT_1_FIELDS, Capabilities
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.spec import Spec
from anyflex.mod_graph.dtypes import DTYPE_NAMES
from anyflex.reference.backward import backward
from anyflex.reference.compiled_spec import Prepared, prepare
from anyflex.reference.forward import forward

__all__ = ["ReferenceBackend"]


class ReferenceBackend(Backend):
    """Plain torch operations: right everywhere, fast nowhere. Never refuses a device."""

    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        head_dim_max=1 << 20,
        different_value_head_dim=True,
        gqa=True,
        kv_broadcast=True,
        scattered=True,
        aux=frozenset({"lse", "max_scores"}),
        gradients=frozenset({"q", "k", "v", "captured", "lse"}),
        captured_dtypes=frozenset(DTYPE_NAMES),
        deterministic=True,
        known_fields=CONTRACT_1_FIELDS | {"dropout", "opaque", "sinks"},
    )

    def probe(self) -> Decision:
        """Accept: torch is all it needs."""
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Return a kernel with prepared graphs. Nothing is generated."""
        return _ReferenceKernel(prepare(spec))


class _ReferenceKernel(Kernel):
    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared

    def describe(self, call: Call) -> str:
        return "torch operations on chunks of rows"

    def forward(self, call: Call, out: Outputs) -> None:
        forward(self.prepared, call, out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        backward(self.prepared, call, saved, grad, grads)
