"""Refusals: undeclared calls are refused with a reason, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import anyflex
from anyflex.errors import BackendRefused
from anyflex.plugin import DTYPES, CapturedFacts, Rejected, Spec, parse_graph
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, plain
from anyflex.testing.session import NotApplicable, Session

__all__ = ["CASES"]

CASES = Group("refusals")

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_RESERVED: tuple[dict[str, Any], ...] = (
    {"q_layout": "packed"},
    {"kv_layout": "packed"},
    {"kv_layout": "paged", "page_size": 16},
    {"page_size": 64},
    {"index_map": "offset"},
    {"index_map": "per_row"},
    {"kv_storage": "fp8"},
    {"dropout": True},
    {"sinks": True},
    {"batch_invariant": True},
)


def _plainest(session: Session) -> Spec:
    """The spec of the plainest declared call, put together by hand."""
    case = plain(session, "refusals")
    return Spec(
        device_type=session.device_type,
        arch="",
        dtype=case.dtype,
        head_dim=case.head_dim,
        value_head_dim=case.value_head_dim,
        fp32_precision="highest" if case.dtype is torch.float32 else "",
    )


def _undeclared(session: Session) -> Iterator[tuple[str, Spec]]:
    """Specs that are each one step outside of the declaration."""
    can, spec = session.backend.capabilities, _plainest(session)

    def other(**changes: Any) -> Spec:
        return dataclasses.replace(spec, **changes)

    for dtype in (*_FLOATS, torch.float8_e4m3fn, torch.int32):
        if dtype not in can.dtypes:
            yield f"dtype {dtype}", other(dtype=dtype)
    step = can.head_dim_multiple
    dims = [can.head_dim_max + step, can.head_dim_max + 1]
    if can.head_dim_min > 1:
        dims.append(can.head_dim_min - 1)
    if step > 1:
        dims.append(spec.head_dim + 1)
    for dim in dims:
        yield f"head dim {dim}", other(head_dim=dim, value_head_dim=dim)
    if not can.different_value_head_dim and spec.head_dim + step <= can.head_dim_max:
        yield "Ev != E", other(value_head_dim=spec.head_dim + step)
    if not can.gqa:
        yield "grouped query attention", other(gqa_ratio=4)
    if not can.kv_broadcast:
        yield "kv batch 1", other(kv_broadcast=True)
    if not can.scattered:
        yield "scattered query", other(alignment=("scattered", "aligned", "aligned"))
    if not can.decode:
        yield "decoding", other(q_class="one")
    for name in sorted({"lse", "max_scores"} - can.aux):
        yield f"aux {name}", other(aux=(name,), needs_lse=name == "lse")
    if not can.core_backward:
        for name in sorted({"q", "k", "v"} - can.gradients):
            yield f"gradient of {name}", other(gradients=(name,), needs_lse=True)
        if not can.deterministic and can.gradients & {"q", "k", "v"}:
            wanted = tuple(sorted(can.gradients & {"q", "k", "v"}))
            yield "determinism", other(gradients=wanted, needs_lse=True, determinism="on")
    for dtype in (torch.uint8, torch.float64, torch.bool, torch.complex64):
        if dtype not in can.captured_dtypes:
            facts = CapturedFacts(dtype, 1, needs_grad=False)
            yield f"captured {dtype}", other(captured=(facts,))
    for name, dtype in DTYPES.items():
        if dtype not in can.node_dtypes and "score_graph" in can.known_fields:
            nodes = ("input i64 - kv_idx", f"cast {name} 1 -", "cast f32 2 -", "add f32 0,3 -")
            text = ";".join(("input f32 - score", *nodes, "=4"))
            yield f"mods in {dtype}", other(score_graph=parse_graph(text))


@CASES.behaviour()
def reserved(session: Session) -> None:
    """A spec field that the backend doesn't know must have its default: else supports() refuses
    with a reason, and doesn't raise."""
    known = session.backend.capabilities.known_fields
    spec = _plainest(session)
    for changes in (*_RESERVED, {"opaque": True}):
        decision = session.ask(dataclasses.replace(spec, **changes))
        session.require(
            isinstance(decision, Rejected) or changes.keys() <= known,
            f"supports() accepts {changes}, which is no known field of the backend",
        )


@CASES.behaviour()
def undeclared(session: Session) -> None:
    """Each spec one step outside of the declaration is refused with a reason."""
    for what, spec in _undeclared(session):
        decision = session.ask(spec)
        session.require(
            isinstance(decision, Rejected),
            f"supports() accepts {what}, which the capabilities don't declare: {decision}",
        )


@CASES.behaviour()
def asked_again(session: Session) -> None:
    """Supports() gives the same answer whenever it is asked, and whatever came between."""
    specs = [_plainest(session), *(spec for _, spec in _undeclared(session))]
    first = [session.ask(spec) for spec in specs]
    for order in (reversed(range(len(specs))), range(len(specs))):
        for index in order:
            again = session.ask(specs[index])
            session.require(
                again == first[index],
                f"supports() answered {first[index]} and, asked later, {again}",
            )


@CASES.behaviour()
def plainest(session: Session) -> None:
    """The plainest declared call is accepted."""
    decision = session.ask(_plainest(session))
    session.require(not isinstance(decision, Rejected), f"the plainest call: {decision}")


@CASES.behaviour()
def forced_call(session: Session) -> None:
    """A forced call that isn't declared raises BackendRefused with the reason, and nothing
    runs."""
    can = session.backend.capabilities
    case = plain(session, "forced_call", gradients=frozenset(), aux=frozenset(), batch=1)
    undeclared = [dtype for dtype in _FLOATS if dtype not in can.dtypes]
    if undeclared:
        case = dataclasses.replace(case, dtype=undeclared[0])
    elif can.head_dim_max < 1 << 14:
        dim = can.head_dim_max + can.head_dim_multiple
        case = dataclasses.replace(case, head_dim=dim, value_head_dim=dim)
    else:
        raise NotApplicable("no call of a reasonable size is undeclared")
    tensors: Mapping[str, Any] = case.draw(session.device).tensors
    session.journal.clear()
    try:
        anyflex.flex_attention(**tensors, backend=session.name)
    except BackendRefused as error:
        reasons = error.reasons.get(session.name, "")
        session.require(bool(reasons), f"the refusal has no reason of {session.name}: {error}")
    else:
        session.require(False, f"a call that isn't declared was accepted: {case.dtype}, "
                               f"head dim {case.head_dim}")  # fmt: skip
    session.require(not session.journal.launches, "the call was refused and a kernel ran")


@CASES.behaviour()
def who_ran(session: Session) -> None:
    """A forced call is computed by the backend alone, forward and backward."""
    empty: dict[str, Any] = {}
    for changes in (empty, {"batch": 2, "q_length": 100, "kv_length": 70}):
        session.journal.clear()
        case = plain(session, "who_ran", **changes)
        compare(session, case)
        ran = {name for name, _ in session.journal.launches}
        session.require(ran == {session.name}, f"launched: {', '.join(sorted(ran)) or 'nobody'}")
        own = session.backend.capabilities.gradients >= case.gradients and case.gradients
        session.require(
            bool(session.journal.backwards) or not own,
            "gradients are declared, and the backend's own backward did not run",
        )
