"""Checks of `flex_attention_packed`'s arguments that a dense call's don't cover."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.frontend.arguments import check_aux
from anyflex.frontend.aux_outputs import AuxRequest
from anyflex.packed.packed import Packed, Step
from anyflex.tensors.dynamo_disabled import in_graph
from anyflex.tensors.dynamo_errors import fail

__all__ = ["check_packed"]

QUANTISED = tuple(
    getattr(torch, name) for name in ("int8", "float8_e4m3fn") if hasattr(torch, name)
)


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
) -> AuxRequest:
    """Check the arguments and return the auxiliary outputs that are asked for.

    Raises:
        ArgumentError, ArgumentTypeError, BackendRefused, GraphCaptureError: naming the argument.
    """
    if not isinstance(step, Step):
        cure = " Use step.begin()." if type(step).__name__ == "Packed" else ""
        fail("ArgumentTypeError", f"step must be a Step, got {type(step).__name__}.{cure}")
    step.check()
    paged = step.packed.page_table is not None
    form = "a pool of pages [P, Hkv, page, E]" if paged else "[S, Hkv, E]"
    for name, tensor, dims, shape in (
        ("query", query, 3, "[T, Hq, E]"),
        ("key", key, 4 if paged else 3, form),
        ("value", value, 4 if paged else 3, form.replace("E]", "Ev]")),
    ):
        if not isinstance(tensor, Tensor):
            fail("ArgumentTypeError", f"{name} must be a Tensor, got {type(tensor).__name__}.")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.dim() != dims:
            fail(
                "TensorFormError",
                f"{name} must be {shape}, a dense tensor, got shape {list(tensor.shape)} and "
                f"layout {tensor.layout}.",
            )
        if tensor.device != step.packed.device:
            fail(
                "ArgumentError",
                f"{name} is on {tensor.device} and the step's batch on {step.packed.device}: move "
                f"one of them.",
            )
    if query.shape[2] == 0:
        fail("ArgumentError", "query's head dim E must be positive, got 0.")
    if key.shape[:-1] != value.shape[:-1]:
        fail(
            "ArgumentError",
            "key and value must have one shape but for the last dimension, got "
            f"{list(key.shape)} and {list(value.shape)}.",
        )
    if paged:
        _check_pages({"query": query, "key": key, "value": value}, scales, step)
    elif step.packed.kv_offsets is step.packed.q_offsets and key.shape[0] != query.shape[0]:
        fail(
            "ArgumentError",
            "the step's batch was made without kv_offsets: key must have the rows of query, got "
            f"{key.shape[0]} for {query.shape[0]}.",
        )
    # In a program that is recorded there are no numbers to look at.
    if step.packed.device.type == "cpu" and not in_graph():
        rows = query.shape[0], -1 if paged else key.shape[0]
        step.once(("fits", *rows), lambda: _check_offsets(step.packed, *rows))
    for name, mod, indices in (
        ("score_mod", score_mod, "score, b, h, q_idx, kv_idx"),
        ("mask_mod", mask_mod, "b, h, q_idx, kv_idx"),
    ):
        if mod is not None and not callable(mod):
            fail(
                "ArgumentTypeError",
                f"{name} must be a function f({indices}), got {type(mod).__name__}.",
            )
    for name, stored, scale in (("k_scale", key, scales[0]), ("v_scale", value, scales[1])):
        _check_scale(name, stored, scale)
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != query.shape[1:2]):
        got = list(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        fail(
            "ArgumentError" if isinstance(sinks, Tensor) else "ArgumentTypeError",
            f"sinks must be a tensor [{query.shape[1]}], one number for each query head, got "
            f"{got}.",
        )
    if out is not None:
        _check_out(out, query, value)
        for name, tensor in (
            ("query", query),
            ("key", key),
            ("value", value),
            ("sinks", sinks),
            ("k_scale", scales[0]),
            ("v_scale", scales[1]),
            ("out", out),
        ):
            if _learns(tensor):
                fail(
                    "ArgumentError",
                    f"out is given and {name} requires grad: call it under torch.no_grad(), or "
                    "without out.",
                )
    return check_aux(False, return_aux)


def _check_pages(tensors: dict[str, Tensor], scales: tuple[Any, Any], step: Step) -> None:
    table = step.packed.page_table
    assert table is not None
    scaled = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    for name, tensor in (tensors | scaled).items():
        if _learns(tensor):
            fail(
                "BackendRefused",
                f"{name} requires grad, and attention over pages has no backward: call it under "
                "torch.no_grad(), or pack keys and values (kv_offsets).",
                reasons={"reference": "attention over pages has no backward"},
            )
    key = tensors["key"]
    page_size = key.shape[2]
    if page_size == 0:
        fail("ArgumentError", "key's pages must have at least one row, got 0.")
    if table.shape[1] * page_size < step.packed.max_kv:
        fail(
            "ArgumentError",
            f"page_table must be wide enough for max_kv = {step.packed.max_kv} keys in pages of "
            f"{page_size}, {-(-step.packed.max_kv // page_size)} columns, got {table.shape[1]}.",
        )


def _check_offsets(packed: Packed, q_rows: int, kv_rows: int) -> None:
    """Check that offsets stay inside of the tensors.

    Args:
        q_rows, kv_rows: rows of query and key; -1 where keys are in pages.
    """
    for name, rows, offsets in (
        ("query", q_rows, packed.q_offsets),
        ("key", kv_rows, packed.kv_offsets),
    ):
        last = int(offsets[-1])
        if 0 <= rows < last:
            fail(
                "ArgumentError",
                f"{name} must have at least the {last} rows that the step's offsets end with, got "
                f"{rows}.",
            )


def _check_scale(name: str, stored: Tensor, scale: Any) -> None:
    which = "key" if name == "k_scale" else "value"
    if scale is None:
        if stored.dtype in QUANTISED:
            fail(
                "ArgumentError",
                f"{which} has dtype {stored.dtype}: pass {name}, what its numbers are multiplied "
                "by.",
            )
        return
    if not isinstance(scale, Tensor) or scale.dtype is not torch.float32:
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        fail("ArgumentTypeError", f"{name} must be a float32 tensor, got {got}.")
    if stored.dtype not in QUANTISED:
        fail(
            "ArgumentTypeError",
            f"{name} is given, and {which} has dtype {stored.dtype}: it must be one of "
            f"{', '.join(map(str, QUANTISED))}.",
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
