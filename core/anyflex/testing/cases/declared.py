"""Declarations: declared calls are accepted, at the ends of each range; and the contract's
handshake."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import anyflex
from anyflex.plugin import CONTRACT, CONTRACT_MIN, Backend, Spec
from anyflex.registry import backend_table
from anyflex.testing.attention_case import AttentionCase, declared_head_dim
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, differentiable, plain, with_mod
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("declared")

_LARGEST = 1024
"""Head dims above this are tried in the whole kit only, up to `_HUGE`."""
_HUGE = 1 << 14
_USUAL = (8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 512, _LARGEST)


def _dims(session: Session) -> list[int]:
    can = session.backend.capabilities
    return sorted({declared_head_dim(can, dim) for dim in (1, *_USUAL, can.head_dim_max)})


def _accepted(session: Session, case: AttentionCase) -> None:
    cases = [case]
    if case.aux != (aux := session.backend.capabilities.aux):
        # An lse that takes no gradient is in a call without gradients.
        cases.append(dataclasses.replace(case, gradients=frozenset(), aux=aux))
    try:
        for each in cases:
            compare(session, each)
    except anyflex.BackendRefused as error:
        session.require(False, f"what is declared is refused: {error}")


@CASES.behaviour()
def head_dims(session: Session) -> None:
    """Each end of the declared head dims, and those between, are accepted and right."""
    for dim in _dims(session):
        if dim <= _LARGEST:
            rows = {"kv_length": 4, "q_length": 4 if session.backend.capabilities.decode else 65}
            _accepted(session, plain(session, "dims", head_dim=dim, value_head_dim=dim, **rows))


@CASES.behaviour(quick=False)
def largest_head_dim(session: Session) -> None:
    """The largest declared head dim (up to 16384) is accepted and right."""
    can = session.backend.capabilities
    dim = min(max(_dims(session)), _HUGE // can.head_dim_multiple * can.head_dim_multiple)
    session.needs(dim > _LARGEST, f"it is {dim}, which declared/head_dims has tried")
    _accepted(
        session,
        plain(session, "largest", head_dim=dim, value_head_dim=dim, heads=1, kv_heads=1),
    )


@CASES.behaviour()
def value_head_dims(session: Session) -> None:
    """Any declared head dim may be Ev whatever E is, where that is declared."""
    session.needs(session.backend.capabilities.different_value_head_dim, "Ev != E isn't declared")
    dims = [dim for dim in _dims(session) if dim <= 256]
    for head_dim, value_head_dim in ((dims[0], dims[-1]), (dims[-1], dims[0])):
        _accepted(
            session,
            plain(session, "value_dims", head_dim=head_dim, value_head_dim=value_head_dim),
        )


@CASES.behaviour()
def dtypes(session: Session) -> None:
    """Each declared type is accepted and right, with every declared gradient and output."""
    for dtype in sorted(session.backend.capabilities.dtypes, key=str):
        _accepted(session, plain(session, "dtypes", dtype=dtype))


def _table(table_: Any) -> Any:
    return lambda s, b, h, q, k: s + table_[k]


@CASES.behaviour()
def captured_dtypes(session: Session) -> None:
    """Captured tensors of each declared type are read."""
    can = session.backend.capabilities
    session.needs(
        {"score_graph", "captured"} <= can.known_fields,
        "mods that read captured tensors aren't declared",
    )
    case = plain(session, "captured_dtypes", score_mod="identity")
    drawn = case.draw(session.device)
    values = torch.randint(-3, 4, (case.kv_length,), generator=torch.Generator().manual_seed(5))
    for dtype in sorted(can.captured_dtypes, key=str):
        held = values if dtype.is_signed else values.abs()
        given = with_mod(drawn, "score", case, _table, table_=held.to(dtype))
        compare(session, case, given)


def _computed_in(dtype: torch.dtype) -> Any:
    """Return a builder of a mod whose integers wrap in `dtype` and in no wider type."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if dtype is torch.bool:
            return s + (k > 20).to(s.dtype)
        if dtype.is_floating_point:
            return s + ((k > 20).to(dtype) * 0.5).to(s.dtype)
        product = (k * 2000).to(dtype) * (k * 2000 + 1).to(dtype)
        return s + (product > 100).to(s.dtype)

    return lambda: mod


@CASES.behaviour()
def node_dtypes(session: Session) -> None:
    """Mods that compute in each declared type are right; integers wrap in their type."""
    can = session.backend.capabilities
    session.needs("score_graph" in can.known_fields, "score mods aren't declared")
    session.needs(
        can.operations >= {"input", "const", "number", "cast", "add", "mul", "gt"}
        and torch.int64 in can.node_dtypes,
        "arithmetic with indices isn't declared",
    )
    case = plain(session, "node_dtypes", score_mod="identity")
    drawn = case.draw(session.device)
    for dtype in sorted(can.node_dtypes, key=str):
        compare(session, case, with_mod(drawn, "score", case, _computed_in(dtype)))


@CASES.behaviour()
def gradients(session: Session) -> None:
    """Each declared gradient can be asked for alone."""
    possible = sorted(differentiable(session))
    session.needs(possible, "no gradients are declared")
    for name in possible:
        _accepted(session, plain(session, "gradients", gradients=frozenset({name})))
    can = session.backend.capabilities
    if "captured" in differentiable(session, captured=True) and "score_graph" in can.known_fields:
        alone = {"gradients": frozenset({"captured"}), "score_mod": "alibi_learned"}
        _accepted(session, plain(session, "gradients", **alone))


@CASES.behaviour()
def features(session: Session) -> None:
    """Grouped queries, key and value of batch 1, decoding: what is declared is accepted."""
    can = session.backend.capabilities
    if can.gqa:
        _accepted(session, plain(session, "gqa", heads=6, kv_heads=2))
        _accepted(session, plain(session, "mqa", heads=5, kv_heads=1))
        _accepted(session, plain(session, "many", heads=16, kv_heads=2))
    if can.kv_broadcast:
        _accepted(session, plain(session, "kv_broadcast", batch=3, kv_batch=1))
    if can.decode:
        _accepted(session, plain(session, "one_row", q_length=1, kv_length=100))
        _accepted(session, plain(session, "short", q_length=9, kv_length=100))


@CASES.behaviour()
def handshake(session: Session) -> None:
    """A backend that says it is written for another contract is refused with the cure, and its
    supports() is not asked."""
    kind: type[Backend] = type(session.backend)
    contract = getattr(kind, "contract", CONTRACT)
    session.require(
        isinstance(contract, int) and CONTRACT_MIN <= contract <= CONTRACT,
        f"the class says contract = {contract!r}; this kit is for {CONTRACT_MIN} to {CONTRACT}",
    )
    name = f"{session.device.type}.conformance-handshake"
    for other, cure in ((CONTRACT + 1, "upgrade anyflex"), (CONTRACT_MIN - 1, "upgrade the")):
        with backend_table.isolated() as registry:
            registry.register(name, type("Other", (kind,), {"contract": other}))
            entry = registry.get(name)
            assert entry is not None
            state = entry.state()
            session.require(
                state.kind == "incompatible" and cure in state.reason,
                f"written for contract {other}, it is {state.kind}: {state.reason}",
            )


@CASES.behaviour()
def spec_text(session: Session) -> None:
    """A spec read back from its text gets the same answer."""
    compare(session, plain(session, "spec_text"))
    for spec, decision in list(session.journal.decisions):
        again = session.ask(Spec.from_text(spec.to_text()))
        session.require(again == decision, f"{decision} becomes {again}")
