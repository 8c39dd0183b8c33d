"""Backends that are right, wrong, wrong in decoding, forward-only or broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved
from anyflex.contract.capabilities import Capabilities
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.option import Option
from anyflex.contract.spec import Spec
from anyflex.reference.backend import ReferenceBackend

__all__ = [
    "DefaultScaleInDecoding",
    "FirstHeadInDecoding",
    "ForwardOnly",
    "Right",
    "WrongBackward",
    "WrongForward",
    "broken",
]


class _Changed(Kernel):
    """The reference's kernel, a change before it of the call, and after it of the results."""

    def __init__(
        self,
        kernel: Kernel,
        call: Callable[[Call], Call],
        out: Callable[[Outputs], object],
        grads: Callable[[Grads], object],
    ) -> None:
        self.kernel = kernel
        self.change_call, self.change_out, self.change_grads = call, out, grads

    def forward(self, call: Call, out: Outputs) -> None:
        self.kernel.forward(self.change_call(call), out)
        self.change_out(out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        self.kernel.backward(call, saved, grad, grads)
        self.change_grads(grads)


class Right(ReferenceBackend):
    """The reference under another name, with an option."""

    options = {"SPLITS": Option(int, 4, "Parts that a row is cut into.", (1, 2, 4))}  # noqa: RUF012

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        kernel = super().compile(dataclasses.replace(spec, options=()), artifacts)
        return _Changed(kernel, self.change_call, self.change_out, self.change_grads)

    def change_call(self, call: Call) -> Call:
        return call

    def change_out(self, out: Outputs) -> object:
        return None

    def change_grads(self, grads: Grads) -> object:
        return None


class WrongForward(Right):
    """One part in a thousand too much."""

    def change_out(self, out: Outputs) -> object:
        return out.out.mul_(1.001)


class WrongBackward(Right):
    """NaN in one place of dk."""

    def change_grads(self, grads: Grads) -> object:
        assert grads.dk is not None
        return grads.dk[0, 1, 40, 3].fill_(float("nan"))


class DefaultScaleInDecoding(Right):
    """Reads the call's scale for more than one row only."""

    def change_call(self, call: Call) -> Call:
        if call.query.shape[2] > 1:
            return call
        return dataclasses.replace(call, scale=call.query.shape[3] ** -0.5)


class FirstHeadInDecoding(Right):
    """Reads the first KV head for all query heads where there is one row."""

    def change_call(self, call: Call) -> Call:
        if call.query.shape[2] > 1:
            return call
        return dataclasses.replace(call, key=call.key[:, :1].expand_as(call.key))


class ForwardOnly(Right):
    """Declares no gradients, and leaves none to core."""

    capabilities = dataclasses.replace(
        ReferenceBackend.capabilities, gradients=frozenset(), core_backward=False
    )


def broken(module: str = "broken_package.backend") -> type[Backend]:
    """Return a class whose probe raises; `module` is the module that it claims."""

    class Broken(Backend):
        capabilities = Capabilities(dtypes=frozenset())

        def probe(self) -> Decision:
            raise OSError("libvendor.so.1: cannot open shared object file")

        def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
            raise AssertionError(Accepted())

    Broken.__module__ = module
    return Broken
