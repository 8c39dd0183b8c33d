"""Kernel of a spec on Hopper: Hopper's own kernels where they take a call, else the portable
ones."""

from __future__ import annotations

from typing import Literal

import torch

from anyflex.plugin import Call, GradInputs, Grads, Outputs, Saved, TensorSpec
from anyflex_cuda.backward_call import (
    BackwardFit,
    backward_fit_of,
    backward_programs,
    hopper_launches,
    is_wide,
    makes_dq,
    portable_gradients,
    refused_backward,
)
from anyflex_cuda.decode_call import (
    DecodeFit,
    decode_fit_of,
    decode_tiles,
    launch_decode,
    refused_decode,
    refused_decode_spec,
)
from anyflex_cuda.forward_call import (
    Fit,
    Tiles,
    boxes_for,
    fit_of,
    launch_forward,
    refusal,
    refused_spec,
    small_tiles_for,
    tiles_at_once,
    tiles_for,
)
from anyflex_cuda.gluon_kernels import (
    BACKWARD_FIT,
    BACKWARD_OPTIONS,
    FORWARD_FIT,
    FORWARD_OPTIONS,
    GluonPrograms,
    refused_options,
)
from anyflex_cuda.gluon_launch import is_boxed
from anyflex_cuda.packed_call import PackedCalls
from anyflex_triton.building import (
    KernelInputs,
    Program,
    TritonKernel,
    backward_values,
    integer_specs,
    launch_all,
)

__all__ = ["CudaKernel"]


class CudaKernel(TritonKernel):
    """Chooses and launches the kernels of one spec."""

    def __init__(self, given: KernelInputs) -> None:
        super().__init__(given)
        spec, overrides = given.spec, given.overrides
        self._tiles = tiles_for(spec)
        self._small_tiles = small_tiles_for(spec)
        self._decode_tiles = decode_tiles(spec)
        of_portable = self._refused_options = refused_options(overrides, FORWARD_OPTIONS)
        self._refused = of_portable or refused_spec(spec, self._tiles)
        self._refused_decode = of_portable or refused_decode_spec(spec)
        self._refused_backward = refused_options(overrides, BACKWARD_OPTIONS) or refused_backward(
            spec
        )
        self._portable_gradients = portable_gradients(spec, makes_dq(spec))
        # Backward must recompute the weights that forward had. So where portable kernels do part
        # of a training call, its tanh is exact throughout.
        whole = not spec.needs_backward or (
            (self._refused or self._refused_decode or self._refused_backward) is None
            and not self._portable_gradients
        )
        self._fast_tanh = bool(overrides.get("fast_tanh")) and whole
        self._hopper = GluonPrograms(spec, given.source, self._fast_tanh, given.files)
        self._packed = PackedCalls(self._made, self._hopper)

    def describe(self, call: Call) -> str:
        """Return ``hopper 128x128``, ``hopper decode programs=264``, or the portable kernels'
        description and why they are taken. Where gradients are wanted, backward's follows:
        ``backward hopper``, or ``backward hopper wide`` above head dim 128."""
        forward = self._describe_forward(call)
        if not self.spec.needs_backward:
            return forward
        reason = self._refused_backward_of(call)
        if reason is not None:
            return f"{forward}, backward portable (not Hopper's kernel: {reason})"
        rest = " and ".join(self._portable_gradients)
        wide = " wide" if is_wide(self.spec) else ""
        return f"{forward}, backward hopper{wide}" + (f", {rest} portable" if rest else "")

    def _describe_forward(self, call: Call) -> str:
        if call.packed is not None and self._refused_forward(call) is None:
            return self._packed.describe(call)
        fit = self._fit(call)
        if fit is None:
            reason = self._refused_forward(call)
            return f"{super().describe(call)} (not Hopper's kernel: {reason})"
        fast = " fast tanh" if self._fast_tanh and self._hopper.is_coarse(call) else ""
        if isinstance(fit, DecodeFit):
            return f"hopper decode programs={fit.programs}{fast}"
        return f"hopper {fit.block_m}x{self._tiles_of(fit).block_n}{fast}"

    def _refused_forward(self, call: Call) -> str | None:
        """Return why forward takes the portable kernels, or None."""
        if call.packed is not None:
            return self._refused_options or self._packed.refusal(call)
        if self._decodes(call):
            return (
                self._refused_decode
                or refusal(call)
                or refused_decode(self.spec, self._decode_tiles, call)
            )
        return self._refused or refusal(call)

    def _fit(self, call: Call) -> Fit | DecodeFit | None:
        """Return the call's fit for Hopper's forward or its decoding, or None where neither takes
        the call."""
        if call.packed is not None:
            return None
        if self._refused is not None and self._refused_decode is not None:
            return None
        return self._hopper.kept_fit(call, FORWARD_FIT, self._fit_of)

    def _fit_of(self, call: Call) -> Fit | DecodeFit | None:
        if self._decodes(call):
            if self._refused_decode is not None:
                return None
            return decode_fit_of(self._hopper, self._decode_tiles, call)
        if self._refused is not None:
            return None
        tiles = self._small_tiles if tiles_at_once(call) else self._tiles
        boxes = boxes_for(tiles, self.spec)
        return fit_of(self._hopper, tiles.block_m, tiles.block_n, boxes, call)

    def _tiles_of(self, fit: Fit) -> Tiles:
        small = self._small_tiles
        return small if fit.block_m == small.block_m else self._tiles

    def _refused_backward_of(self, call: Call) -> str | None:
        """Return why backward takes the portable kernels, or None."""
        reason = self._refused_backward or refusal(call)
        if reason is None and self._fast_tanh and self._refused_forward(call) is not None:
            reason = "forward is portable, and its tanh exact"
        return reason

    def _backward_fit(self, call: Call) -> BackwardFit | None:
        """Return the call's fit for Hopper's backward, or None where the portable kernels do it;
        `_refused_backward_of` tells why."""
        if self._refused_backward is not None:
            return None
        return self._hopper.kept_fit(call, BACKWARD_FIT, self._backward_fit_of)

    def _backward_fit_of(self, call: Call) -> BackwardFit | None:
        refused = self._refused_backward_of(call)
        return None if refused is not None else backward_fit_of(self.spec, call)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Return the workspace of the kernels that the call takes. Hopper's forward needs a
        counter or nothing, its decoding what `DecodeFit` says, its backward what `BackwardFit`
        says and, where the portable pass over query rows makes some gradient, that pass's."""
        if direction == "forward":
            if call.packed is not None and self._refused_forward(call) is None:
                return self._packed.workspace(call)
            fit = self._fit(call)
            return super().workspace(call, direction) if fit is None else fit.workspace
        ours = self._backward_fit(call)
        if ours is None:
            return super().workspace(call, direction)
        if not self._portable_gradients:
            return ours.workspace
        finer, integers = self._finer_specs(call, "queries"), integer_specs(self._made, call)
        return (*ours.workspace, *finer, *integers)

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""
        if call.packed is not None and self._refused_forward(call) is None:
            self._packed.launch(call, out)
            return
        fit = self._fit(call)
        if fit is None:
            super().forward(call, out)
        elif isinstance(fit, DecodeFit):
            launch_decode(self._made, self._hopper, self._decode_tiles, fit, call, out)
        else:
            launch_forward(self._hopper, self._tiles_of(fit), fit, call, out, self._of_backward)

    def _of_backward(self, call: Call, out: Outputs) -> list[Program]:
        fit = self._backward_fit(call)
        if fit is None:
            return super()._of_backward(call, out)
        return backward_programs(self._made, self._hopper, fit, call, out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`."""
        fit = self._backward_fit(call)
        if fit is None:
            super().backward(call, saved, grad, grads)
            return
        if not is_boxed(grad.dout):
            # dout is often the expanded gradient of a sum. `contiguous` wouldn't copy a contiguous
            # one that begins at an unaligned address. The copy isn't part of the workspace, which
            # is requested before dout exists.
            dout = grad.dout.clone(memory_format=torch.contiguous_format)
            grad = GradInputs(dout, grad.dlse, grad.delta)
        launches = hopper_launches(self._made, self._hopper, fit, call, saved, grad, grads)
        if self._portable_gradients:
            memory, *rest = grads.workspace
            row_values = fit.parts["row_values"].within(memory)
            values = backward_values(self._made, call, saved, grad, grads, row_values)
            count = len(self._finer_specs(call, "queries"))
            before, queries = self.query_launches(
                call, values, grads, rest[:count], rest[count:], launches[:1],
                self.fixed_parts(call, saved, grad),
            )  # fmt: skip
            launches = [*before, *launches, *queries]
        launch_all(launches, call.query.device)
