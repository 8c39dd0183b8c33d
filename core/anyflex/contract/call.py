"""Run-time side of a call: a kernel's inputs, and the outputs that it fills.

All are created by core. A kernel reads the inputs, writes the outputs in place, and keeps neither.
Outputs and gradients are tuples: a kernel that assigns to a field, instead of filling its tensor,
raises. None is a frozen dataclass, whose creation takes twice as long at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from anyflex.contract.dropout import Dropout
from anyflex.contract.packed_rows import PackedRows

if TYPE_CHECKING:
    from anyflex.mask_structure.device_views import MaskViews

__all__ = ["Call", "GradInputs", "Grads", "Outputs", "Saved", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that core shall allocate: dense, on the call's device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False


@dataclass(eq=False)
class Call:
    """One call's tensors and numbers.

    Args:
        query: [B, Hq, L, E], any strides, stride 0 included.
        key: [Bkv, Hkv, S, E], Bkv is B or 1.
        value: [Bkv, Hkv, S, Ev].
        mask: views of the block mask on the call's device, or None.
        captured: tensors that the graphs' loads count into, the score mod's first.
        ints, floats: values of the graphs' number slots.
        scale: multiplied into q k^T before the score mod.
        index_offsets: added to b, h, q_idx, kv_idx before a mod sees them.

    Advanced: most kernels read none of these.
        score_function, mask_function: the user's mods where they could not be traced
            (``Spec.opaque``), to be run through vmap; else None.
        kept: one dict for all calls of a spec on one device whose query, key and value have the
            same shapes and strides (of a dimension of one element the stride may differ), and
            whose block masks' offsets have the same shape, of packed calls also ``blocks``, max_q
            and max_kv: a kernel may put there what follows from these. None for a call that no
            plan was made for.
        dropout: numbers that say which pairs are dropped, where ``Spec.dropout``; else None.
        packed: whose rows are whose, where ``Spec.q_layout`` is ``"packed"``; else None.
        k_scale, v_scale: float32, shaped as key and value without their last dimension, any
            strides (0 too): what stored numbers are multiplied by, where ``Spec.kv_storage`` isn't
            ``"plain"``; else None.
        sinks: [Hq], in lse's dtype, contiguous, where ``Spec.sinks``; else None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: MaskViews | None
    captured: tuple[Tensor, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    scale: float
    score_function: Callable[..., Tensor] | None = None
    mask_function: Callable[..., Tensor] | None = None
    kept: dict[object, Any] | None = field(default=None, repr=False)
    dropout: Dropout | None = None
    packed: PackedRows | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    sinks: Tensor | None = None
    # A reserved field costs a call nothing: it is a class attribute until a contract sets it.
    index_offsets: ClassVar[tuple[int, int, int, int]] = (0, 0, 0, 0)


class Outputs(NamedTuple):
    """Outputs that `Kernel.forward` fills.

    Args:
        out: [B, Hq, L, Ev], q's dtype, dense in q's dimension order, last stride 1.
        lse: [B, Hq, L], contiguous, float32 (float64 for float64), natural log; or None.
        max_scores: row maximum after the mods, shaped and typed like lse; or None.
        saved: the tensors of ``Kernel.saved_outputs``.
        workspace: the tensors of ``Kernel.workspace(call, "forward")``.
    """

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None
    saved: tuple[Tensor, ...] = ()
    workspace: tuple[Tensor, ...] = ()


class Saved(NamedTuple):
    """Tensors that forward left for backward: q, k, v are in the call.

    Where ``Spec.sinks``, core has added the sinks to lse: ``exp(score - lse)`` is a pair's weight.
    """

    out: Tensor
    lse: Tensor
    extras: tuple[Tensor, ...] = ()


class GradInputs(NamedTuple):
    """Gradients that arrive at backward.

    Args:
        dout: [B, Hq, L, Ev], any strides.
        dlse: [B, Hq, L] or None.
        delta: [B, Hq, L], sum of dout * out over Ev in lse's dtype, where lse and delta come from
            outside and the row has more keys than the call; else None: the row is whole. It never
            includes dlse.
    """

    dout: Tensor
    dlse: Tensor | None = None
    delta: Tensor | None = None


class Grads(NamedTuple):
    """Gradients that `Kernel.backward` fills; None where no gradient is asked for.

    Args:
        dq, dk, dv: shaped and typed like query, key, value; overwritten. For inputs that are
            broadcast (batch 1, expanded strides) they are complete sums.
        captured: one entry a captured tensor: an accumulator of its shape, dense, float32
            (float64 for float64 calls or tables), zeroed by core, to whose elements the kernel
            adds in place; or None.
        workspace: the tensors of ``Kernel.workspace(call, "backward")``.
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    captured: tuple[Tensor | None, ...] = ()
    workspace: tuple[Tensor, ...] = ()
