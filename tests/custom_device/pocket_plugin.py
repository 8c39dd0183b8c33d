"""A plugin for the device "pocket": computes on copies of a call's data on the host."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from anyflex.plugin import (
    Accepted,
    Artifacts,
    Backend,
    Call,
    Capabilities,
    Decision,
    GradInputs,
    Grads,
    Kernel,
    Outputs,
    Rejected,
    Saved,
    Spec,
    TensorSpec,
)
from anyflex.reference.backend import ReferenceBackend

__all__ = ["PocketBackend", "PocketKernel"]

_HOST = torch.device("cpu")


class PocketBackend(Backend):
    """The reference's arithmetic, behind the walls that a device has."""

    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.float64, torch.bfloat16}),
        head_dim_max=256,
        different_value_head_dim=True,
        gqa=True,
        kv_broadcast=True,
        scattered=True,
        aux=frozenset({"lse", "max_scores"}),
        gradients=frozenset({"q", "k", "v", "captured", "lse"}),
        captured_dtypes=frozenset({torch.float32, torch.float64, torch.int32, torch.int64}),
        deterministic=True,
    )

    def probe(self) -> Decision:
        if getattr(torch, self.device_type, None) is None:
            return Rejected(
                f"torch has no device {self.device_type!r}; import tests.custom_device"
            )
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        on_host = ReferenceBackend("reference", "*").compile(spec, artifacts)
        return PocketKernel(on_host)


class PocketKernel(Kernel):
    """Notes on which devices the tensors are that it gets."""

    launches: ClassVar[list[tuple[str, set[torch.device]]]] = []

    def __init__(self, on_host: Kernel) -> None:
        self.on_host = on_host

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        return (TensorSpec((4,), torch.int32, zeroed=True),)

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        return (TensorSpec((2,), torch.float32),)

    def forward(self, call: Call, out: Outputs) -> None:
        self._note("forward", call, out.out, out.lse, out.max_scores, *out.saved, *out.workspace)
        for saved in out.saved:
            saved.fill_(1.0)
        host = Outputs(
            torch.zeros_like(out.out, device=_HOST), *map(_like, (out.lse, out.max_scores))
        )
        self.on_host.forward(_call_on_host(call), host)
        _bring_back((host.out, host.lse, host.max_scores), (out.out, out.lse, out.max_scores))

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        filled = (grads.dq, grads.dk, grads.dv, *grads.captured)
        given = (saved.out, saved.lse, *saved.extras, grad.dout, grad.dlse, grad.delta)
        self._note("backward", call, *given, *filled, *grads.workspace)
        assert saved.extras[0].sum().item() == 2.0
        first, second, third, *captured = (_like(tensor) for tensor in filled)
        host = Grads(first, second, third, tuple(captured))
        self.on_host.backward(
            _call_on_host(call),
            Saved(saved.out.cpu(), saved.lse.cpu()),
            GradInputs(grad.dout.cpu(), *map(_on_host, (grad.dlse, grad.delta))),
            host,
        )
        _bring_back((host.dq, host.dk, host.dv, *host.captured), filled)

    def _note(self, direction: str, call: Call, *others: Tensor | None) -> None:
        tensors = [call.query, call.key, call.value, *call.captured]
        if call.mask is not None:
            tensors += [call.mask.offsets, call.mask.runs]
        tensors += [tensor for tensor in others if tensor is not None]
        self.launches.append((direction, {tensor.device for tensor in tensors}))


def _on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def _like(tensor: Tensor | None) -> Tensor | None:
    # Zeroed, as core zeroes the accumulators of captured tensors.
    return None if tensor is None else torch.zeros_like(tensor, device=_HOST)


def _call_on_host(call: Call) -> Call:
    return Call(
        call.query.cpu(),
        call.key.cpu(),
        call.value.cpu(),
        None if call.mask is None else call.mask.on(_HOST),
        tuple(tensor.cpu() for tensor in call.captured),
        call.ints,
        call.floats,
        call.scale,
    )


def _bring_back(results: tuple[Tensor | None, ...], places: tuple[Tensor | None, ...]) -> None:
    for result, place in zip(results, places, strict=True):
        if place is not None and result is not None:
            place.copy_(result)
