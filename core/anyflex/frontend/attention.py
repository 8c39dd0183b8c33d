"""flex_attention: checks a call and chooses its way to a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anyflex.frontend.arguments import is_plain
from anyflex.frontend.aux_outputs import AuxOutput, AuxRequest
from anyflex.frontend.checked_call import CheckedCall, check
from anyflex.frontend.op_call import run_op
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["flex_attention"]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Attention with a score function and a mask of your own, forward and backward, on any device.

    ``softmax(score_mod(q k^T * scale), over the keys that block_mask keeps) v``, with scores in
    float32 (float64 for float64 inputs). Signature and meaning are those of
    ``torch.nn.attention.flex_attention.flex_attention``, plus `dropout_p`, `sinks` and
    `backend`.

    Args:
        query: [B, Hq, L, E]; float32, bfloat16, float16 or float64; any strides.
        key: [Bkv, Hkv, S, E], Bkv is B or 1.
        value: [Bkv, Hkv, S, Ev].
        score_mod: ``f(score, b, h, q_idx, kv_idx)`` on scalars, returns the new score. It may read
            any tensor and number that it closes over; tensors that require grad get a gradient.
        block_mask: from `anyflex.create_block_mask`, or torch's own BlockMask.
        scale: multiplied into q k^T; None is E ** -0.5.
        enable_gqa: allow Hq to be a multiple of Hkv: query head h reads key head
            ``h // (Hq // Hkv)``.
        return_lse: torch's older spelling of ``return_aux=AuxRequest(lse=True)``; returns
            (out, lse).
        kernel_options: torch's tuning keys, and each backend's own under its name.
        return_aux: which auxiliary outputs to return.
        dropout_p: probability with which each weight of the softmax is dropped, from 0 up to, but
            not, 1; the others are divided by ``1 - dropout_p``. Pass 0 outside of training. The
            seed is drawn from torch's generator of the CPU, on every device.
        sinks: [Hq], a floating dtype, usually learned: each row's softmax has one more score,
            whose value is 0, so that a head can attend to nothing. -inf is no sink. lse and
            max_scores leave it out.
        backend: force a backend by name, for example ``"reference"``. A forced backend never
            falls back: it computes the call, or `BackendRefused` tells why not.

    Returns:
        out, [B, Hq, L, Ev] in query's dtype and dimension order; with `return_aux` (out,
        AuxOutput). A row without a live key has out 0, lse -inf and gradients 0.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is wrong; the message names it.
        BlockMaskError: the block mask doesn't fit the tensors.
        ModTraceError: score_mod can't be traced.
        ModIndexError: score_mod reads outside of a captured tensor (where the backend checks).
        BackendRefused: nobody, or not the forced backend, takes the call; ``.reasons`` has why.
        PluginError: the forced backend is broken.
        AllocationError: there is not enough memory; an accelerator's is torch.OutOfMemoryError.

    Examples:
        >>> import torch, anyflex
        >>> q, k, v = torch.randn(3, 1, 4, 128, 32).unbind(0)
        >>> causal = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128)
        >>> slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        >>> def alibi(score, b, h, q_idx, kv_idx):
        ...     return score + slopes[h] * (kv_idx - q_idx)
        >>> anyflex.flex_attention(q, k, v, alibi, causal).shape
        torch.Size([1, 4, 128, 32])
    """
    call = check(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux,
        backend,
        dropout_p,
        sinks,
    )
    if call.sinks is None:
        out, lse, max_scores = _attend(call)
    else:
        from anyflex.frontend.calls_with_sinks import attend_with_sinks

        out, lse, max_scores = attend_with_sinks(call, _attend)
    if return_aux is not None:
        return out, AuxOutput(lse, max_scores)
    return (out, lse) if return_lse else out


def _attend(call: CheckedCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute a checked call and return out, lse and max_scores, None for what isn't asked for."""
    if torch.compiler.is_dynamo_compiling():
        return run_op(call)
    if is_plain(call.query, call.key, call.value):
        return (_run_eagerly or _load_eager_call())(call)  # type: ignore[no-any-return]
    from anyflex.frontend.tensor_subclasses import naming_subclasses

    with naming_subclasses(query=call.query, key=call.key, value=call.value):
        return run_op(call)


_run_eagerly: Any = None
"""Filled at the first eager call: `import anyflex` doesn't pay for its modules, and an import
statement would cost every call half a microsecond."""


def _load_eager_call() -> Any:
    global _run_eagerly
    from anyflex.frontend.eager_call import run

    _run_eagerly = run
    return run
