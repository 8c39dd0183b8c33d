"""flex_attention_packed: attention over packed sequences, each in coordinates of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from anyflex.frontend.arguments import check_scale
from anyflex.frontend.attention_sinks import as_kernels_read, with_sinks
from anyflex.frontend.aux_outputs import AuxOutput, AuxRequest
from anyflex.frontend.calls_with_sinks import in_kernels
from anyflex.frontend.checked_call import CheckedCall
from anyflex.packed.arguments import check_packed
from anyflex.packed.core_layout import as_batch, in_core_layout
from anyflex.packed.own_layout import in_own_layout
from anyflex.packed.packed import Step
from anyflex.packed.recorded_call import recorded
from anyflex.registry.freeze_options import freeze_options
from anyflex.tensors.dynamo_disabled import in_graph
from anyflex.tracing.mod_types import MaskMod, ScoreMod

__all__ = ["flex_attention_packed"]


def flex_attention_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Step,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    return_aux: AuxRequest | None = None,
    batch_invariant: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> Any:
    """Attention of many sequences of any lengths in one call, packed or with keys in pages.

    Each sequence attends to its own keys, with mods that see its own indices: b is its slot,
    q_idx and kv_idx are positions in it (`Packed`). `mask_mod` needs no block mask: which blocks
    are visited is found from it, once a step for all layers that share it. No key beyond a
    sequence's length reaches a result, whatever its bits.

    Args:
        query: [T, Hq, E]; float32, bfloat16, float16 or float64.
        key: [S, Hkv, E], or a pool of pages [P, Hkv, page, E] where the batch has a page table;
            any strides. A pool whose page comes before its heads is ``.transpose(1, 2)``.
        value: [S, Hkv, Ev] or [P, Hkv, page, Ev].
        step: from `Packed.begin`, or a cache's.
        score_mod, mask_mod: as for `flex_attention` and `create_block_mask`.
        scale: multiplied into q k^T; None is E ** -0.5.
        enable_gqa: allow Hq to be a multiple of Hkv.
        sinks: [Hq], as for `flex_attention`.
        k_scale, v_scale: float32, what stored numbers are multiplied by: one number, [Hkv], or
            one for each token and head, shaped as key without its last dimension. Key and value
            are then int8 or float8_e4m3fn, and mods see scores after it.
        out: [T, Hq, Ev], is written and returned; no gradient is recorded.
        return_aux: which auxiliary outputs to return, lse and max_scores [T, Hq]. lse is that of
            the keys, without sinks.
        batch_invariant: a sequence's results have the same bits whatever other sequences, bounds
            and padding rows the call has, and wherever its pages lie. It takes time where
            sequences are few and long.
        kernel_options, backend: as for `flex_attention`.

    Returns:
        out, [T, Hq, Ev] in query's dtype; with `return_aux` (out, AuxOutput). A row without a live
        key, and a padding row, has out 0 and lse -inf. Packed keys and values are
        differentiable; with pages what requires grad is refused.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is wrong; the message names it.
        BackendRefused: nobody takes the call, or keeps `batch_invariant` for it, or a gradient is
            asked for through pages.
        ModIndexError: a page id outside of the pool, on a CPU and where ANYFLEX_CHECK_INDICES is
            set; elsewhere it is clamped into the pool.
        GraphCaptureError: the step was begun on the other side of a capture's border, or a device
            graph is being captured and no backend takes the call as it is.
        ModTraceError, PluginError, AllocationError: as `flex_attention` raises them.

    Source: page tables: Kwon et al. 2023, PagedAttention, arXiv:2309.06180.
    """
    aux = check_packed(
        query, key, value, step, score_mod, mask_mod, sinks, (k_scale, v_scale), out, return_aux,
        batch_invariant,
    )  # fmt: skip
    paged = step.packed.page_table is not None
    # Where one of them is stored in 8 bits and one is not, core multiplies.
    if key.dtype is value.dtype and (key.dtype is query.dtype or k_scale is not None):
        asked = CheckedCall(
            as_batch(query),
            key if paged else as_batch(key),
            value if paged else as_batch(value),
            score_mod,
            None,
            query.shape[-1] ** -0.5 if scale is None else check_scale(scale, query.dtype),
            aux,
            () if kernel_options is None else freeze_options(kernel_options),
            backend,
            0.0,
            sinks,
            batch_invariant,
        )
        after = None
        if sinks is not None:
            if in_kernels(asked, packed=True):
                asked = asked._replace(sinks=as_kernels_read(sinks, query))
            else:
                after = sinks
                asked = asked._replace(sinks=None, aux=aux._replace(lse=True))
        given = asked, step, mask_mod, enable_gqa, (k_scale, v_scale)
        if in_graph():
            own = recorded(*given)
        else:
            own = in_own_layout(*given, out if after is None else None)
        if own is not None:
            found = own.out
            if after is not None and own.lse is not None:
                found = with_sinks(found, own.lse, after)
            return _results(found, own.lse, own.max_scores, out, return_aux, aux)
    found, more = in_core_layout(
        query,
        key,
        value,
        step,
        score_mod,
        mask_mod,
        (k_scale, v_scale),
        aux=aux,
        scale=scale,
        enable_gqa=enable_gqa,
        sinks=sinks,
        kernel_options=kernel_options,
        backend=backend,
        batch_invariant=batch_invariant,
    )
    return _results(found, more.lse, more.max_scores, out, return_aux, aux)


def _results(
    found: Tensor,
    lse: Tensor | None,
    max_scores: Tensor | None,
    out: Tensor | None,
    return_aux: AuxRequest | None,
    aux: AuxRequest,
) -> Any:
    """Return what a dense call of one batch gave as the packed call's results."""
    found = found.squeeze(0).transpose(0, 1)
    if out is not None:
        if not in_graph() and found.data_ptr() == out.data_ptr() != 0:
            # The kernel has written it; autograd shall know, as after a copy.
            increment_version(out)
            found = out
        else:
            found = out.copy_(found)
    if return_aux is None:
        return found
    return found, AuxOutput(
        lse[0].T if aux.lse and lse is not None else None,
        max_scores[0].T if aux.max_scores and max_scores is not None else None,
    )
