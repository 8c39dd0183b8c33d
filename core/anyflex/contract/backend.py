"""Backend and Kernel: the two classes that a plugin implements."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from anyflex.contract.artifacts import Artifacts
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved, TensorSpec
from anyflex.contract.capabilities import Capabilities
from anyflex.contract.decision import Accepted, Decision, Rejected
from anyflex.contract.option import Option
from anyflex.contract.spec import Spec

if TYPE_CHECKING:
    import torch

__all__ = ["Backend", "Kernel"]


class Kernel(abc.ABC):
    """A compiled spec. Safe to use from many threads; runs on the current stream; never
    synchronises the device. Core holds the device guard and allocates every tensor."""

    def describe(self, call: Call) -> str:
        """Name the variant that this call would run (``"decode split=8"``). Host work only."""
        return type(self).__name__

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Return the scratch tensors that this direction of this call needs."""
        return ()

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """Return the tensors that forward leaves for backward beside out and lse. Always the same
        for one call, because behind the static op backward asks again."""
        return ()

    @abc.abstractmethod
    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`. Called only where ``supports`` answered ``Accepted(backward="own")``."""
        raise NotImplementedError(f"{type(self).__qualname__} has no backward")


class Backend(abc.ABC):
    """An entry point of group ``anyflex.backends.v1``: ``name = "module:Class"``.

    The quoted name is the backend's identity and the string for ``backend=``: a torch device type,
    or ``"<device type>.<variant>"``. Core creates one object a name and passes both. One class may
    have several names. Importing the module and creating the object must be cheap: heavy imports
    belong into `compile`.
    """

    priority: ClassVar[int] = 0
    """Priority among the backends of a device type: the highest is asked first."""

    capabilities: ClassVar[Capabilities]
    options: ClassVar[Mapping[str, Option]] = {}
    """Keys of ``kernel_options[name]``; core checks the user's values against them."""

    def __init__(self, name: str, device_type: str) -> None:
        self.name = name
        self.device_type = device_type

    @abc.abstractmethod
    def probe(self) -> Decision:
        """Tell whether the backend can run on this machine at all. Cheap: it starts no device and
        imports no compiler. A rejection's reason ends with the cure."""

    def fingerprint(self) -> str:
        """Name toolchain, driver and instruction set: part of the disk cache's key."""
        return ""

    def notes(self) -> Sequence[str]:
        """Return lines for ``anyflex doctor``: other findings that the user should know.
        They decide nothing. Called whatever `probe` answered; it may start the device."""
        return ()

    def supports(self, spec: Spec) -> Decision:
        """Tell whether the backend takes this spec. Must agree with `capabilities`; override it
        for what they can't express."""
        reason = spec.unsupported_by(self.capabilities)
        if reason is not None:
            return Rejected(reason)
        if spec.needs_backward and self.capabilities.gradient_refusal(spec) is not None:
            return Accepted(backward="core")
        return Accepted()

    def saved_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return (a, b): `Kernel.saved_outputs` asks for at most ``a * Ev + b`` bytes a query row
        of each head, where calls of this dtype need gradients.

        Asked while torch.compile traces, when there is no spec yet. With (0, 0), which means that
        nothing is saved or the size isn't known, a compiled program's backward runs forward again
        for what `Kernel.saved_outputs` asks for. It does so too if one of the tensors, laid one
        after the other, would not begin at a multiple of 16 bytes.
        """
        return (0, 0)

    @abc.abstractmethod
    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Return a kernel for a spec that `supports` accepted. Heavy imports and code generation
        happen here and only here."""
