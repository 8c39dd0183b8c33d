"""A compiled spec on Hopper: which calls take its own kernels, and which the portable ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from anyflex.plugin import Call, GradInputs, Grads, Saved, Spec, TensorSpec
from anyflex_cuda.backward_call import (
    hopper_launches,
    hopper_workspace,
    makes_dq,
    why_portable,
    why_portable_call,
    work_of,
)
from anyflex_cuda.gluon_program import is_boxed
from anyflex_cuda.gluon_programs import GluonPrograms
from anyflex_triton.backward_captured import integer_specs
from anyflex_triton.kernel import TritonKernel, cut
from anyflex_triton.launch import launch_all
from anyflex_triton.tuning import Tuner

__all__ = ["HopperKernel"]


class HopperKernel(TritonKernel):
    """Chooses and launches.

    Args:
        spec: what the backend accepted.
        source: of the mods, by `anyflex_triton.mods.write_source`.
        overrides: the user's options by name.
        tuner: finds the portable kernels' fastest configs; None: they are the table's.
    """

    def __init__(
        self,
        spec: Spec,
        source: str,
        overrides: Mapping[str, Any],
        tuner: Tuner | None = None,
    ) -> None:
        super().__init__(spec, source, "hopper", overrides, tuner)
        self._gluon = GluonPrograms(spec, source, overrides)
        self._why = why_portable(spec)

    def describe(self, call: Call) -> str:
        """As the portable one's, then what makes gradients: ``backward hopper``, or ``backward
        portable (why)``."""
        text = super().describe(call)
        if not self.spec.needs_backward:
            return text
        why = self._why_portable(call)
        if why is not None:
            return f"{text}; backward portable ({why})"
        if makes_dq(self.spec) or "q" not in self.spec.gradients:
            return f"{text}; backward hopper"
        return f"{text}; backward hopper, dQ portable"

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Hopper's backward: `hopper_workspace`, then what the portable pass over query rows
        takes, where that makes dQ."""
        if direction == "forward" or self._why_portable(call) is not None:
            return super().workspace(call, direction)
        return (*hopper_workspace(self.spec, call), *self._query_specs(call))

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`."""
        if self._why_portable(call) is not None:
            super().backward(call, saved, grad, grads)
            return
        if not is_boxed(grad.dout):
            # Often a sum's, broadcast; workspace can't be asked for it, for it comes too late.
            grad = GradInputs(grad.dout.contiguous(), grad.dlse, grad.delta)
        ours, rest = cut(list(grads.workspace), len(hopper_workspace(self.spec, call)))
        work = work_of(ours)
        launches = hopper_launches(self._made, self._gluon, call, saved, grad, grads, work)
        if work.dq_sums is None:
            finer, integers = cut(rest, len(self._finer_specs(call, "queries")))
            launches += self.query_launches(
                call, grad.dout, work.row_values, grads, finer, integers, launches[:1]
            )
        launch_all(launches, call.query.device)

    def _why_portable(self, call: Call) -> str | None:
        """Why this call's backward takes the portable kernels, or None."""
        return self._why or why_portable_call(call)

    def _query_specs(self, call: Call) -> tuple[TensorSpec, ...]:
        if makes_dq(self.spec):
            return ()
        return (*self._finer_specs(call, "queries"), *integer_specs(self._made, call))
