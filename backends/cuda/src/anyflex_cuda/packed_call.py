"""Routes of packed calls: Hopper's kernels decode sequences of few query rows, forward takes the
others."""

from __future__ import annotations

from typing import NamedTuple

from anyflex.plugin import Call, Outputs, PackedRows, TensorSpec
from anyflex_cuda.decode_call import DecodeFit
from anyflex_cuda.gluon_kernels import GluonPrograms
from anyflex_cuda.gluon_launch import is_aligned
from anyflex_cuda.packed_decode_call import PackedDecode, short_rows
from anyflex_cuda.packed_forward_call import PackedForward
from anyflex_triton.building import Programs

__all__ = ["PackedCalls"]


class Route(NamedTuple):
    """Kernels of a class of calls.

    Args:
        refusal: why the portable kernels take the calls, or None.
        decode: fit of the sequences that are decoded, or None.
        forward: whether forward takes the other sequences.
        workspace: decoding's, then forward's.
    """

    refusal: str | None
    decode: DecodeFit | None = None
    forward: bool = False
    workspace: tuple[TensorSpec, ...] = ()


class PackedCalls:
    """Hopper's kernels for a spec's packed calls. Thread-safe.

    Args:
        portable: the spec's programs in plain Triton.
        made: those in Gluon.
    """

    def __init__(self, portable: Programs, made: GluonPrograms) -> None:
        self._decode = PackedDecode(portable, made)
        self._forward = PackedForward(portable, made)
        self._short_rows = short_rows(made.spec)
        self._made = made

    def refusal(self, call: Call) -> str | None:
        """Return why a packed call takes the portable kernels, or None."""
        return self._route(call).refusal

    def describe(self, call: Call) -> str:
        """Return ``hopper decode programs=264``, ``hopper packed 128x128``, or both."""
        route = self._route(call)
        names = []
        if route.decode is not None:
            names.append(f"hopper decode programs={route.decode.programs}")
        if route.forward:
            names.append(self._forward.describe())
        return " and ".join(names)

    def workspace(self, call: Call) -> tuple[TensorSpec, ...]:
        """Return the workspace of a call that isn't refused."""
        return self._route(call).workspace

    def launch(self, call: Call, out: Outputs) -> None:
        """Launch the kernels of a call that isn't refused, on the current stream."""
        route = self._route(call)
        if route.forward:
            before = 0 if route.decode is None else len(route.decode.workspace)
            counter = out.workspace[before] if len(out.workspace) > before else None
            short = 0 if route.decode is None else self._short_rows
            self._forward.launch(call, out, counter, short)
        if route.decode is not None:
            self._decode.launch(route.decode, call, out, not route.forward)

    def _route(self, call: Call) -> Route:
        packed = call.packed
        assert packed is not None
        pointers = call.query.data_ptr() | call.key.data_ptr() | call.value.data_ptr()
        facts = "anyflex_cuda.route", is_aligned(pointers), packed.slots.shape[0]
        return self._made.kept(call, facts, lambda: self._new_route(call, packed))

    def _new_route(self, call: Call, packed: PackedRows) -> Route:
        refused = self._decode.refusal(call)
        if packed.max_q <= self._short_rows:
            if refused is not None:
                return Route(refused)
            fit = self._decode.fit(call)
            return Route(None, fit, False, fit.workspace)
        reason = self._forward.refusal(call)
        if reason is not None:
            return Route(reason)
        works = self._forward.workspace(call)
        if refused is not None:
            return Route(None, None, True, works)
        fit = self._decode.fit(call)
        return Route(None, fit, True, (*fit.workspace, *works))
