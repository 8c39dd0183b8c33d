"""The two static ops: how a call lives under torch.compile, export and dispatch modes.

An op a spec can't work (it couldn't be made while Dynamo traces, nor found by a program loaded in
another process), so a canonical request string carries what is not a tensor or a number.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from anyflex.errors import ArgumentError, BackendRefused
from anyflex.frontend.arguments import (
    check_dropout,
    check_mask_fits,
    check_scale,
    check_tensors,
)
from anyflex.frontend.transforms import refuse_forward_mode
from anyflex.mod_graph.graph import parse_graph
from anyflex.runtime.op_request import read_request
from anyflex.runtime.saved_for_backward import NOTHING, size
from anyflex.tensors.storage_checks import PLAIN
from anyflex.tensors.tensor_facts import empty_dense
from anyflex.tensors.torch_versions import in_dual_level

if TYPE_CHECKING:
    from anyflex.runtime.op_request import Request
from anyflex.tensors.static_ops import implement

__all__ = ["flex_attention_backward_op", "flex_attention_op"]

# torch.library is not annotated.
_library: Any = torch.library.Library("anyflex", "DEF")  # type: ignore[no-untyped-call]
_TENSORS = "Tensor query, Tensor key, Tensor value"
_REST = "Tensor[] tensors, SymInt[] ints, str request"
_library.define(f"flex_attention({_TENSORS}, {_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_library.define(
    "flex_attention_backward(Tensor dout, Tensor? dlse, Tensor? delta, "
    f"{_TENSORS}, Tensor out, Tensor lse, Tensor? saved, Tensor? saved_by, {_REST}) "
    "-> Tensor[]"
)
# tensors: offsets and runs of the block mask if there is one, and its mark if it was built in the
# graph (`anyflex.mask_structure.views_registry`); captured tensors, the score mod's, then the mask
# mod's, then the sinks; then numbers as 0-d CPU float64 tensors, so that a new value makes no new
# graph: the scale, the score mod's floats, the mask mod's, and with dropout p and the seed. ints:
# how many of the tensors are the block mask's, and how many are captured, with the sinks; then the
# score mod's ints, the mask mod's and, with a mask, its block size (not in the request:
# torch.compile may hand it over as a symbol).
# Neither list is ever empty: AOTInductor's executor hands an empty list on as None. forward
# returns out, lse, max_scores, saved and saved_by: the bytes that the kernel leaves for backward
# (`anyflex.runtime.saved_for_backward`) and, on the CPU, where reading it doesn't wait, the mark
# of its plan. backward returns the gradients of query, key, value, each captured tensor and the
# sinks. Outputs that nobody asked for have no elements.


class _Parts(NamedTuple):
    """The op's two lists, taken apart."""

    mask: list[Tensor]
    captured: list[Tensor]
    ints: list[int]
    floats: list[Tensor]


def _parts(tensors: list[Tensor], ints: list[int]) -> _Parts:
    masks, captured, *numbers = ints
    end = masks + captured
    return _Parts(tensors[:masks], tensors[masks:end], numbers, tensors[end:])


def _accumulate(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    ints: list[int],
    request: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from anyflex.runtime.launch import allocate_saved_bytes, launch_forward
    from anyflex.runtime.plan import plan_for

    if in_dual_level():  # a program that was compiled outside of the level
        refuse_forward_mode()
    wanted = read_request(request)
    parts = _parts(tensors, ints)
    if parts.captured:
        _check_captured(parts.captured, wanted, query.device)
    inputs = _inputs(query, key, value, parts, wanted)
    plan = plan_for(inputs)
    saves = wanted.saved_bytes != NOTHING
    saved = allocate_saved_bytes(plan, size(query, value, wanted.saved_bytes))
    outputs = launch_forward(plan, inputs.call, save=saves, saved_bytes=saved)
    if saves and not outputs.saved:
        saved.zero_()
    nothing = query.new_empty(0, dtype=_accumulate(query))
    return (
        outputs.out,
        nothing if outputs.lse is None else outputs.lse,
        nothing.clone() if outputs.max_scores is None else outputs.max_scores,
        saved,
        torch.tensor(
            [plan.mark if outputs.saved else 0] if saves else [], dtype=torch.int64, device="cpu"
        ),
    )


def _check_captured(
    captured: list[Tensor], request: Request, device: torch.device, cure: str = ""
) -> None:
    """Check the tensors that mods read against the request: it was written for those that the
    program was traced with, and a mask rebuilt from a pytree, or a converted module, has others.

    Raises:
        BlockMaskError, ArgumentError, ArgumentTypeError: one has another dtype, rank, layout or
            device.
    """
    from anyflex.runtime.saved_tensor_checks import check_like

    scores, loads = request.score_slots[0], _loads(request)
    for position, tensor in enumerate(captured):
        name = f"captured tensor {position}"
        dtype, rank = loads.get(position, (tensor.dtype, tensor.dim()))
        if position >= scores and (tensor.dtype is not dtype or tensor.dim() != rank):
            from anyflex.block_mask.mask_function import check_captured

            check_captured(position - scores, tensor, dtype, rank)
        if tensor.dim() != rank:
            raise ArgumentError(
                f"{name} must have {rank} dimensions, got shape {list(tensor.shape)}.{cure}"
            )
        check_like(name, tensor, tensor.shape, dtype, device, cure)


def _fake_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    ints: list[int],
    request: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_fake(query)
    wanted = read_request(request)
    rows, dtype = query.shape[:3], _accumulate(query)
    return (
        empty_dense(query, value.shape[3]),
        query.new_empty(rows if wanted.needs_lse else (0,), dtype=dtype),
        query.new_empty(rows if wanted.max_scores else (0,), dtype=dtype),
        query.new_empty(size(query, value, wanted.saved_bytes), dtype=torch.uint8),
        torch.empty(1 if wanted.saved_bytes != NOTHING else 0, dtype=torch.int64, device="cpu"),
    )


def _check_fake(query: Tensor) -> None:
    """torch's dispatcher comes to a fake implementation with plain tensors too, where one of the
    call's is on meta: what it allocates would be taken for results."""
    if type(query) in PLAIN and not query.is_meta:
        raise ArgumentError(
            f"query is on {query.device}, and another tensor of the call on meta, which holds no "
            "numbers: move all of them to one device."
        )


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    delta: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Tensor | None,
    saved_by: Tensor | None,
    tensors: list[Tensor],
    ints: list[int],
    request: str,
) -> list[Tensor]:
    from anyflex.contract.call import GradInputs, Saved
    from anyflex.runtime.launch import launch_backward
    from anyflex.runtime.plan import plan_for
    from anyflex.runtime.saved_tensor_checks import CURE, check_like

    wanted = read_request(request)
    parts = _parts(tensors, ints)
    _check_unpacked(dout, query, key, value, out, {"lse": lse, "dlse": dlse, "delta": delta})
    _check_captured(parts.captured, wanted, query.device, CURE)
    for number in parts.floats:
        check_like("a number of the call", number, (), torch.float64, number.device, CURE)
    if saved is not None:
        check_like("saved", saved, (saved.numel(),), torch.uint8, query.device, CURE)
    inputs = _inputs(query, key, value, parts, wanted)
    plan = plan_for(inputs)
    if saved_by is None or saved_by.tolist() != [plan.mark]:
        saved = None  # another kernel than forward's makes what it wants itself
    dq, dk, dv, dcaptured = launch_backward(
        plan, inputs.call, Saved(out, lse), GradInputs(dout, dlse, delta), saved_bytes=saved
    )
    return [
        query.new_empty(0) if dq is None else dq,
        key.new_empty(0) if dk is None else dk,
        value.new_empty(0) if dv is None else dv,
        *[
            tensor.new_empty(0) if gradient is None else gradient.clone()
            for tensor, gradient in zip(parts.captured, dcaptured, strict=True)
        ],
    ]


def _check_unpacked(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    rows: dict[str, Tensor | None],
) -> None:
    """Check the tensors that a compiled program has saved and unpacked against dout, which no hook
    has seen, and each other: nobody knows here what the op was given in forward.

    Args:
        rows: tensors with a number for each query row.

    Raises:
        ArgumentError, ArgumentTypeError: they can't be those of one call.
    """
    from anyflex.runtime.saved_tensor_checks import CURE, check_like

    row_shape, keys, head_dim = dout.shape[:3], key.shape[:3], query.shape[-1]
    for name, tensor, shape in (
        ("query", query, (*row_shape, head_dim)),
        ("key", key, (*keys, head_dim)),
        ("value", value, (*keys, dout.shape[3])),
        ("out", out, dout.shape),
    ):
        check_like(name, tensor, shape, dout.dtype, dout.device, CURE)
    for name, row in rows.items():
        if row is not None:
            check_like(name, row, row_shape, _accumulate(dout), dout.device, CURE)


@functools.lru_cache(maxsize=1024)
def _loads(request: Request) -> dict[int, tuple[torch.dtype, int]]:
    """Dtype and rank of the captured tensors that the graphs load, by position."""
    found: dict[int, tuple[torch.dtype, int]] = {}
    for text, shift in ((request.score, 0), (request.mask, request.score_slots[0])):
        if text:
            for position, facts in parse_graph(text).loads().items():
                found[position + shift] = facts
    return found


def _fake_backward(*given: Any) -> list[Tensor]:
    _, _, _, query, key, value, *_, tensors, ints, request = given
    _check_fake(query)
    wanted = read_request(request)
    flags = (*wanted.gradients, *wanted.sinks)
    captured = _parts(tensors, ints).captured
    return [
        *[
            empty_dense(tensor) if flag else tensor.new_empty(0)
            for tensor, flag in zip((query, key, value), flags[:3], strict=True)
        ],
        *[
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if flag
            else tensor.new_empty(0)
            for tensor, flag in zip(captured, flags[3:], strict=True)
        ],
    ]


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: _Parts,
    request: Request,
) -> Any:
    from anyflex.contract.call import Call
    from anyflex.contract.dropout import Dropout
    from anyflex.runtime.plan import Inputs
    from anyflex.runtime.saved_tensor_checks import check_like

    if query.device.type == "meta":
        raise BackendRefused(
            "query is a meta tensor, which holds no numbers: trace with torch.export, "
            "torch.compile or FakeTensorMode instead",
            {"reference": "no numbers on device meta"},
        )
    # The traced half has checked the tensors that the program was traced with; a saved program and
    # hooks on saved tensors come here with others, and kernels read by address.
    batch, heads, length, kv_length, _ = check_tensors(query, key, value, enable_gqa=True)
    scale, *numbers = [number.item() for number in parts.floats]
    check_scale(scale, query.dtype)  # the traced half may have seen a symbol
    dropout = None
    if request.dropout:
        *numbers, dropout_p, seed = numbers
        dropout = Dropout(check_dropout(dropout_p), seed)
    views = None
    captured, sinks = parts.captured, None
    if request.sinks:
        *captured, sinks = captured
        check_like("sinks", sinks, (heads,), _accumulate(query), query.device)
        sinks = sinks.contiguous()  # a hook on saved tensors may have laid them out anew
    ints = parts.ints
    if parts.mask:
        *ints, q_block, kv_block = ints
        views = _views(parts.mask, query, key, (q_block, kv_block))
        lengths = length, kv_length
        check_mask_fits(parts.mask[0].shape, lengths, batch, heads, *lengths)
    call = Call(
        query,
        key,
        value,
        views,
        tuple(captured),
        tuple(ints),
        tuple(numbers),
        scale,
        dropout=dropout,
        sinks=sinks,
    )
    return Inputs(call, request)


# Derived views of masks that arrive as bare tensors and aren't a live mask's, found again by
# content. Identity would not do: a compiled program writes its own buffers again without a trace.
_VIEWS = 64
_recent_views: dict[object, tuple[Any, ...]] = {}


def _views(mask: list[Tensor], query: Tensor, key: Tensor, block_size: tuple[int, int]) -> Any:
    from anyflex.mask_structure import views_registry

    offsets, runs, *mark = mask
    lengths = query.shape[2], key.shape[2]
    if mark:
        views = views_registry.find_marked(mark[0], offsets, lengths, block_size)
    else:
        views = views_registry.find(offsets, runs, lengths, block_size)
    if views is None:
        views = _copied_views(offsets, runs, lengths, block_size)
    return views.on(query.device)


def _copied_views(
    offsets: Tensor, runs: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]
) -> Any:
    from anyflex.mask_structure.device_views import MaskViews
    from anyflex.mask_structure.run_checks import check_structure

    check_structure(offsets, runs, lengths, block_size, values=False)
    offsets, runs = offsets.contiguous(), runs.contiguous()
    if offsets.device.type != "cpu":  # comparing would synchronise
        return MaskViews(offsets, runs, *lengths, block_size)
    facts = (offsets.shape, runs.shape, lengths, block_size)
    known = _recent_views.get(facts) or ()
    for views in known:
        if torch.equal(views.offsets, offsets) and torch.equal(views.runs, runs):
            return views
    check_structure(offsets, runs, lengths, block_size)
    # Copies, since the tensors may be written again.
    made = MaskViews(offsets.clone(), runs.clone(), *lengths, block_size)
    if len(_recent_views) >= _VIEWS:
        _recent_views.clear()
    _recent_views[facts] = (made, *known[:_ALTERNATIVES])
    return made


_ALTERNATIVES = 7
"""Masks of one shape beside the newest: layers that take turns."""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, tensors, ints, request = inputs
    out, lse, max_scores, saved, saved_by = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_scores, saved, saved_by)
    ctx.save_for_backward(query, key, value, out, lse, saved, saved_by, *tensors)
    ctx.ints, ctx.request = ints, request
    ctx.wanted = read_request(request)  # Dynamo, which may trace the backward, reads none


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Tensor | None) -> Any:
    query, key, value, out, lse, saved, saved_by, *tensors = ctx.saved_tensors
    wanted: Request = ctx.wanted
    flags = (*wanted.gradients, *wanted.sinks)
    if True not in flags:
        raise ArgumentError(
            "gradients are asked for of a program that was exported or traced without: export it "
            "with inputs that require grad"
        )
    gradients = flex_attention_backward_op(
        torch.zeros_like(out) if dout is None else dout,
        dlse if wanted.lse else None,
        None,
        query,
        key,
        value,
        out,
        lse,
        saved,
        saved_by,
        tensors,
        ctx.ints,
        ctx.request,
    )
    found = [gradient if flag else None for gradient, flag in zip(gradients, flags, strict=True)]
    parts = _parts(tensors, ctx.ints)
    return (
        *found[:3],
        [*[None for _ in parts.mask], *found[3:], *[None for _ in parts.floats]],
        None,
        None,
    )


def _refuse_twice(ctx: Any, *gradients: Tensor) -> Any:
    raise BackendRefused(
        "flex_attention is not differentiable twice",
        {"reference": "second derivatives are not implemented"},
    )


implement(_library, "flex_attention", _forward, _fake_forward)
implement(_library, "flex_attention_backward", _backward, _fake_backward)
torch.library.register_autograd(
    "anyflex::flex_attention", _gradients, setup_context=_setup, lib=_library
)
torch.library.register_autograd("anyflex::flex_attention_backward", _refuse_twice, lib=_library)

flex_attention_op = torch.ops.anyflex.flex_attention.default
flex_attention_backward_op = torch.ops.anyflex.flex_attention_backward.default
