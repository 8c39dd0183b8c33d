"""The eager way of a call: cached trace, plan, and the kernel without an op in between."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anyflex.contract.call import Call
from anyflex.contract.dropout import Dropout
from anyflex.contract.packed_rows import PackedRows
from anyflex.errors import (
    AnyflexError,
    ArgumentError,
    BackendRefused,
    ModIndexError,
    ModTraceError,
)
from anyflex.frontend.arguments import check_captured_devices
from anyflex.frontend.autograd import FlexAttention
from anyflex.frontend.checked_call import CheckedCall
from anyflex.frontend.dropout_seed import draw_seed
from anyflex.frontend.transforms import refuse_forward_mode
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mod_graph.dtypes import DTYPE_NAMES
from anyflex.registry.forced_backends import names_in_force
from anyflex.runtime.launch import launch_forward
from anyflex.runtime.op_request import Request
from anyflex.runtime.plan import Inputs, plan_for
from anyflex.runtime.saved_for_backward import NOTHING
from anyflex.tensors import stand_in
from anyflex.tensors.tensor_facts import fp32_precision
from anyflex.tensors.torch_versions import apply_of, dual_level
from anyflex.tracing.trace import TracedMod, captured_name, trace_mod
from anyflex.tracing.trace_cache import traced
from anyflex.tracing.trace_errors import CUSTOM_FUNCTION

__all__ = ["NO_MOD", "gather", "inputs_of", "named", "run", "traced_score"]

STRIDED = torch.strided
_REQUIRES_GRAD = attrgetter("requires_grad")
# `flex_attention` has refused functorch transforms already.
_apply = apply_of(FlexAttention)
NO_MOD = TracedMod("", [], [], [], [])


def run(checked: CheckedCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute a checked call and return out, lse and max_scores, None for what isn't asked for."""
    seed = 0.0 if checked.dropout_p == 0 else draw_seed().item()
    inputs = gather(checked, seed)
    call, request = inputs.call, inputs.request
    if dual_level(forward_ad) >= 0:
        _refuse_tangents(call)
    try:
        plan = plan_for(inputs)
        if True not in request.gradients and True not in request.sinks:
            outputs = launch_forward(plan, call)
            return outputs.out, outputs.lse if request.lse else None, outputs.max_scores
        read = call.captured if call.sinks is None else (*call.captured, call.sinks)
        results = _apply(plan, inputs, call.query, call.key, call.value, *read)
    except ModIndexError as error:
        raise named(error, [*inputs.names[0], *inputs.names[1]]) from error.__cause__
    except RuntimeError as error:
        if not str(error).startswith("Inference tensors"):
            raise
        raise ArgumentError(
            "a tensor that this call reads was made under torch.inference_mode, and gradients are "
            "recorded: make query, key, value and what score_mod and mask_mod capture outside of "
            "it, or .clone() them first."
        ) from error
    if isinstance(results, Tensor):
        return results, None, None
    out, *others = results
    lse = others[0] if request.lse else None
    return out, lse, others[-1] if request.max_scores else None


def _refuse_tangents(call: Call) -> None:
    sinks = () if call.sinks is None else (call.sinks,)
    for tensor in (call.query, call.key, call.value, *call.captured, *sinks):
        dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            refuse_forward_mode()


def named(error: ModIndexError, names: list[str]) -> ModIndexError:
    """Return the error with captured tensors by their names: kernels know them by position."""
    text = str(error.args[0])
    for position, name in enumerate(names):
        if name:
            text = re.sub(rf"captured tensor {position}\b", f"captured tensor '{name}'", text)
    return ModIndexError(text, operation=error.operation)


def gather(checked: CheckedCall, seed: float = 0.0) -> Inputs:
    """Trace the mods and put the call together.

    Args:
        seed: of dropout; any number does where nothing is computed.

    A tensor with torch's negative bit, whose memory holds the negatives of its elements, is copied
    here, before the call is planned; the copy is differentiable.
    """
    mask, mask_function, views = NO_MOD, None, None
    block_mask, device = checked.block_mask, checked.query.device
    if block_mask is not None:
        # A mask elsewhere is moved with its captured tensors at its first call, and kept.
        views = block_mask.known_views
        found = block_mask.traced
        if (
            views is None
            or views.offsets.device != device
            or (found is not None and found.captured)
        ):
            block_mask = block_mask.on(device)
            views = block_mask.views()
            found = block_mask.traced
        if found is not None:
            mask = found
        else:
            mask_function = block_mask.opaque
            if mask_function is not None:
                _allow_opaque("mask_mod", *_refusal(mask_function, device), checked.backend)
    return inputs_of(checked, mask, views, mask_function, seed)


def inputs_of(
    checked: CheckedCall,
    mask: TracedMod,
    views: MaskViews | None,
    mask_function: Callable[..., Tensor] | None = None,
    seed: float = 0.0,
    packed: PackedRows | None = None,
    score: TracedMod | None = None,
) -> Inputs:
    """Trace the score mod and put the call together.

    Args:
        checked: its block mask is `mask` and `views` here.
        mask: the traced mask mod, or `NO_MOD`.
        mask_function: one that could not be traced.
        seed: as for `gather`.
        packed: the sequences of a packed call.
        score: the score mod, if it was traced already.
    """
    query, key, value, score_mod, _, scale, aux, options, backend, dropout_p, sinks, same = checked
    if query.is_neg() or key.is_neg() or value.is_neg():
        query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
    score_function = None
    device = query.device
    if score is None and score_mod is not None:
        try:
            score = traced_score(score_mod, query)
        except ModTraceError as error:
            if not error.pure:
                raise
            score, score_function = _opaque(score_mod, error, backend, query), score_mod
    score = score or NO_MOD
    captured = (*score.captured, *mask.captured)
    read = captured
    for tensor in read:
        if tensor.device != device or tensor.layout is not STRIDED:
            check_captured_devices(device, list(captured), [*score.names, *mask.names])
        # An untraced mod reads its own tensors, and gradients find these.
        if tensor.is_neg() and score_function is None and mask_function is None:
            captured = tuple([each.resolve_neg() for each in captured])
    gradients: tuple[bool, ...]
    if torch.is_grad_enabled():
        gradients = query.requires_grad, key.requires_grad, value.requires_grad
        if captured:
            gradients += tuple(map(_REQUIRES_GRAD, score.captured))
            gradients += (False,) * len(mask.captured)
    else:
        gradients = (False,) * (3 + len(captured))
    call = Call(
        query,
        key,
        value,
        views,
        captured,
        (*score.ints, *mask.ints),
        (*score.floats, *mask.floats),
        scale,
        score_function,
        mask_function,
        dropout=None if dropout_p == 0 else Dropout(dropout_p, seed),
        packed=packed,
        sinks=sinks,
    )
    sink_gradient = () if sinks is None else (torch.is_grad_enabled() and sinks.requires_grad,)
    posed = None if stand_in.current is None else stand_in.posed_as(device)
    request = Request(
        score.text,
        mask.text,
        (len(score.captured), len(score.ints), len(score.floats)),
        aux.lse,
        aux.max_scores,
        aux.lse or True in gradients or True in sink_gradient,
        gradients,
        backend,
        options,
        posed,
        NOTHING,
        fp32_precision(query.dtype, device.type if posed is None else posed[0]),
        dropout_p != 0,
        "dense" if packed is None else "packed" if packed.page_table is None else "paged",
        sink_gradient,
        same,
    )
    names = mask.names if sinks is None else [*mask.names, "sinks"]
    return Inputs(call, request, read, (score.names, names))


def traced_score(score_mod: Callable[..., Tensor], query: Tensor) -> TracedMod:
    """Trace a score mod, from the cache where it was traced before."""
    try:
        return traced(score_mod, "score", _score_dtype(query), query.device)
    except AnyflexError:
        raise
    except Exception as error:
        _add_note(error, score_mod)
        raise


def _score_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


def _add_note(error: Exception, score_mod: Callable[..., Tensor]) -> None:
    if hasattr(error, "add_note"):
        error.add_note(f"raised by score_mod {score_mod!r} while anyflex traced it")


def _opaque(
    score_mod: Callable[..., Tensor],
    error: ModTraceError,
    backend: str | None,
    query: Tensor,
) -> TracedMod:
    """A pure mod that no graph can hold runs on the reference, through vmap: say so once."""
    from anyflex.tracing.vmapped_mods import read_tensors

    try:
        read = read_tensors(score_mod, query.device, _score_dtype(query))
    except AnyflexError:
        raise
    except Exception as raised:
        if error.operation == CUSTOM_FUNCTION[1] and "autograd.Function" in str(raised):
            raise error from raised  # one that vmap can't call
        _add_note(raised, score_mod)
        raise
    _allow_opaque("score_mod", str(error), error.operation, backend)
    # The mod reads all of them itself. Those that a spec can tell of are checked with the call.
    captured = [
        tensor
        for tensor in read
        if tensor.requires_grad or (tensor.dtype in DTYPE_NAMES and tensor.device == query.device)
    ]
    names = [captured_name(score_mod, tensor) for tensor in captured]
    return TracedMod("", captured, [], [], names)


def _refusal(mask_mod: Callable[..., Tensor], device: torch.device) -> tuple[str, str]:
    """Why a mask mod that a block mask holds as a function is none that a graph can hold, and the
    operation: a mask isn't made with what the tracer said."""
    try:
        trace_mod(mask_mod, "mask", device=device)
    except ModTraceError as error:
        return str(error), error.operation
    return "it could not be traced when the block mask was made", "mask_mod"


def _allow_opaque(mod: str, problem: str, operation: str, backend: str | None) -> None:
    names = names_in_force(backend)
    if names and "reference" not in names:
        raise BackendRefused(
            f"backend {names[0]!r} is forced, and {mod} can't be traced: {problem}",
            {names[0]: f"operation {operation} can't be traced"},
        )
    if not names:
        from anyflex.registry.fallback import warn_about_opaque_mod

        warn_about_opaque_mod(mod, problem)
