"""Checks of `flex_attention_packed`'s arguments that a dense call's don't cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.contract.spec import STORED
from anyflex.frontend.arguments import check_aux
from anyflex.frontend.attention_sinks import check_sinks
from anyflex.frontend.aux_outputs import AuxRequest
from anyflex.packed.packed import Packed, Step
from anyflex.runtime.plan import refuse_tracing
from anyflex.tensors.dynamo_disabled import in_graph
from anyflex.tensors.dynamo_errors import fail

__all__ = ["check_packed", "check_shapes"]

STRIDED = torch.strided


def check_packed(
    query: Any,
    key: Any,
    value: Any,
    step: Any,
    score_mod: Any,
    mask_mod: Any,
    sinks: Any,
    scales: tuple[Any, Any],
    out: Any,
    return_aux: Any,
    batch_invariant: Any,
) -> AuxRequest:
    """Check the arguments and return the auxiliary outputs that are asked for.

    Raises:
        ArgumentError, ArgumentTypeError, BackendRefused, GraphCaptureError: naming the argument.
    """
    if not isinstance(step, Step):
        cure = " Use step.begin()." if isinstance(step, Packed) else ""
        fail("ArgumentTypeError", f"step must be a Step, got {type(step).__name__}.{cure}")
    step.check()
    packed = step.packed
    dims = 3 if packed.page_table is None else 4
    if not (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and query.layout is STRIDED
        and key.layout is STRIDED
        and value.layout is STRIDED
        and not (query.is_nested or key.is_nested or value.is_nested)
        and query.dim() == 3
        and key.dim() == value.dim() == dims
        and query.device == key.device == value.device == packed.device
    ):
        _refuse_tensors({"query": query, "key": key, "value": value}, packed)
    shapes = query.shape, key.shape, value.shape
    step.keep(("fits", shapes), check_shapes, packed, *shapes)
    k_scale, v_scale = scales
    if dims == 4 and torch.is_grad_enabled():
        for name, tensor in _named(query, key, value, k_scale, v_scale):
            if _learns(tensor):
                fail(
                    "BackendRefused",
                    f"{name} requires grad, and attention over pages has no backward: call it "
                    "under torch.no_grad(), or pack keys and values (kv_offsets).",
                    reasons={"reference": "attention over pages has no backward"},
                )
    if not (score_mod is None or callable(score_mod)):
        _refuse_mod("score_mod", "score, b, h, q_idx, kv_idx", score_mod)
    if not (mask_mod is None or callable(mask_mod)):
        _refuse_mod("mask_mod", "b, h, q_idx, kv_idx", mask_mod)
    if key.dtype in STORED or value.dtype in STORED or not k_scale is v_scale is None:
        _check_scale("k_scale", key, k_scale)
        _check_scale("v_scale", value, v_scale)
    if sinks is not None:
        check_sinks(sinks, query, query.shape[1])
    if out is not None:
        _check_out(out, query, value)
        for name, tensor in _named(query, key, value, k_scale, v_scale, sinks, out):
            if _learns(tensor):
                fail(
                    "ArgumentError",
                    f"out is given and {name} requires grad: call it under torch.no_grad(), or "
                    "without out.",
                )
    if not isinstance(batch_invariant, bool):
        fail(
            "ArgumentTypeError",
            f"batch_invariant must be a bool, got {type(batch_invariant).__name__}.",
        )
    return check_aux(False, return_aux)


def _refuse_tensors(tensors: dict[str, Any], packed: Packed) -> NoReturn:
    """Refuse the first of query, key and value that is no dense tensor of its form."""
    paged = packed.page_table is not None
    form = "a pool of pages [P, Hkv, page, E]" if paged else "[S, Hkv, E]"
    forms = "[T, Hq, E]", form, form.replace("E]", "Ev]")
    for (name, tensor), shape in zip(tensors.items(), forms, strict=True):
        if not isinstance(tensor, Tensor):
            fail("ArgumentTypeError", f"{name} must be a Tensor, got {type(tensor).__name__}.")
        dims = 4 if paged and name != "query" else 3
        if tensor.layout is not STRIDED or tensor.is_nested or tensor.dim() != dims:
            fail(
                "TensorFormError",
                f"{name} must be {shape}, a dense tensor, got shape {list(tensor.shape)} and "
                f"layout {tensor.layout}.",
            )
        if tensor.device != packed.device:
            fail(
                "ArgumentError",
                f"{name} is on {tensor.device} and the step's batch on {packed.device}: move one "
                "of them.",
            )
    raise AssertionError("query, key and value are dense tensors of their forms")


def _refuse_mod(name: str, indices: str, mod: Any) -> NoReturn:
    fail(
        "ArgumentTypeError",
        f"{name} must be a function f({indices}), got {type(mod).__name__}.",
    )


def _named(*tensors: Any) -> list[tuple[str, Any]]:
    """Return arguments with their names."""
    names = "query", "key", "value", "k_scale", "v_scale", "sinks", "out"
    return list(zip(names, tensors, strict=False))


def check_shapes(
    packed: Packed, query: Sequence[int], key: Sequence[int], value: Sequence[int]
) -> None:
    """Check shapes against each other and the batch."""
    refuse_tracing()  # inside of which each shape is another one
    if query[2] == 0:
        fail("ArgumentError", "query's head dim E must be positive, got 0.")
    if key[:-1] != value[:-1]:
        fail(
            "ArgumentError",
            "key and value must have one shape but for the last dimension, got "
            f"{list(key)} and {list(value)}.",
        )
    table = packed.page_table
    if table is not None:
        page_size = key[2]
        if page_size == 0:
            fail("ArgumentError", "key's pages must have at least one row, got 0.")
        if table.shape[1] * page_size < packed.max_kv:
            fail(
                "ArgumentError",
                f"page_table must be wide enough for max_kv = {packed.max_kv} keys in pages of "
                f"{page_size}, {-(-packed.max_kv // page_size)} columns, got {table.shape[1]}.",
            )
    elif packed.kv_offsets is packed.q_offsets and key[0] != query[0]:
        fail(
            "ArgumentError",
            "the step's batch was made without kv_offsets: key must have the rows of query, got "
            f"{key[0]} for {query[0]}.",
        )
    # In a program that is recorded there are no numbers to look at.
    if packed.device.type == "cpu" and not in_graph():
        _check_offsets("query", packed.q_offsets, query[0])
        if table is None:
            _check_offsets("key", packed.kv_offsets, key[0])


def _check_offsets(name: str, offsets: Tensor, rows: int) -> None:
    """Check that offsets stay inside of a tensor's rows."""
    last = int(offsets[-1])
    if rows < last:
        fail(
            "ArgumentError",
            f"{name} must have at least the {last} rows that the step's offsets end with, got "
            f"{rows}.",
        )


def _check_scale(name: str, stored: Tensor, scale: Any) -> None:
    which = "key" if name == "k_scale" else "value"
    if scale is None:
        if stored.dtype in STORED:
            fail(
                "ArgumentError",
                f"{which} has dtype {stored.dtype}: pass {name}, what its numbers are multiplied "
                "by.",
            )
        return
    if not isinstance(scale, Tensor) or scale.dtype is not torch.float32:
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        fail("ArgumentTypeError", f"{name} must be a float32 tensor, got {got}.")
    if stored.dtype not in STORED:
        fail(
            "ArgumentTypeError",
            f"{name} is given, and {which} has dtype {stored.dtype}: it must be one of "
            f"{', '.join(map(str, STORED))}.",
        )
    if scale.device != stored.device:
        fail("ArgumentError", f"{name} must be on {stored.device}, got {scale.device}.")
    if scale.shape not in ((), stored.shape[1:2], stored.shape[:-1]):
        fail(
            "ArgumentError",
            f"{name} must be one number, [{stored.shape[1]}] or {list(stored.shape[:-1])}, got "
            f"{list(scale.shape)}.",
        )


def _check_out(out: Any, query: Tensor, value: Tensor) -> None:
    if not isinstance(out, Tensor):
        fail("ArgumentTypeError", f"out must be a Tensor, got {type(out).__name__}.")
    shape = [query.shape[0], query.shape[1], value.shape[-1]]
    if list(out.shape) != shape or out.dtype is not query.dtype or out.device != query.device:
        fail(
            "ArgumentError",
            f"out must be {shape} in {query.dtype} on {query.device}, got {list(out.shape)} in "
            f"{out.dtype} on {out.device}.",
        )


def _learns(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()
