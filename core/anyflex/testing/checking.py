"""Comparison of one call of the backend under test with the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

import anyflex
from anyflex.errors import BackendRefused
from anyflex.testing.attention_case import LSE, AttentionCase, Drawn, declared_head_dim
from anyflex.testing.comparison import by_backend, by_oracle, mismatches
from anyflex.testing.mods import Entry, Mod
from anyflex.testing.session import Session

__all__ = ["compare", "differentiable", "modded", "plain", "with_mod", "with_options"]

_PREFERRED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def compare(
    session: Session,
    case: AttentionCase,
    drawn: Drawn | None = None,
    attention: Callable[..., Any] = anyflex.flex_attention,
) -> None:
    """Run a case by the backend and fail unless it computed the call itself, with right results.

    Where the call is refused, the same call without undeclared gradients and auxiliary outputs
    must still be right; the refusal is raised then.

    Args:
        drawn: the inputs, if not those that the case draws.
        attention: see `by_backend`.
    """
    can = session.backend.capabilities
    if drawn is None:
        case = case.fitted(can)
        drawn = case.draw(session.device)
    try:
        _compare(session, case, drawn, attention)
    except BackendRefused:
        for reduced in case.reduced(can):
            if reduced != case:
                # A refused backward doesn't hide the forward's results.
                with contextlib.suppress(BackendRefused):
                    _compare(session, reduced, drawn, attention)
        raise


def _compare(
    session: Session, case: AttentionCase, drawn: Drawn, attention: Callable[..., Any]
) -> None:
    before = len(session.journal.forwards)
    found = by_backend(case, drawn, session.name, session.device, attention)
    session.check_journal()
    empty = 0 in (case.batch, case.heads, case.q_length)
    session.require(
        len(session.journal.forwards) > before or empty,
        "the call was accepted and another backend ran it",
    )
    lines = mismatches(found, by_oracle(case, drawn), case, drawn)
    session.require(not lines, "; ".join(lines))


def plain(session: Session, name: str, **changes: Any) -> AttentionCase:
    """Return a case of the plainest call that the backend declares, with changes.

    The type is float32 or the nearest declared one, the head dim the declared one next to 16, and
    the gradients are those of query, key and value as far as they are declared. The auxiliary
    outputs are the declared ones, without an lse at which no gradient may arrive where there are
    gradients.
    """
    can = session.backend.capabilities
    dtype = next((dtype for dtype in _PREFERRED if dtype in can.dtypes), torch.float32)
    head_dim = declared_head_dim(can, 16)
    given: dict[str, Any] = {
        "heads": 2,
        "kv_heads": 2,
        "q_length": 40 if can.decode else 80,
        "kv_length": 40,
        "head_dim": head_dim,
        "value_head_dim": head_dim,
        "dtype": dtype,
        "gradients": differentiable(session),
        **changes,
    }
    learns_lse = can.core_backward or "lse" in can.gradients
    aux = can.aux if learns_lse or not given["gradients"] else can.aux - LSE
    return AttentionCase(name, "", **{"aux": aux, **given})


def modded(session: Session, name: str, **changes: Any) -> AttentionCase:
    """Return `plain` with a score mod, a captured tensor that learns, and a mask, as far as they
    are declared."""
    known = session.backend.capabilities.known_fields
    if {"score_graph", "captured"} <= known:
        changes["score_mod"] = "alibi_learned"
        changes["gradients"] = differentiable(session, captured=True)
    if {"mask_graph", "mask_kind"} <= known:
        changes["mask_mod"] = "causal"
    return plain(session, name, **changes)


def differentiable(session: Session, *, captured: bool = False) -> frozenset[str]:
    """Return which of "q", "k", "v" and, if asked for, "captured" can have gradients."""
    can = session.backend.capabilities
    wanted = {"q", "k", "v", "captured"} if captured else {"q", "k", "v"}
    return frozenset(wanted if can.core_backward else wanted & can.gradients)


def with_mod(
    drawn: Drawn,
    kind: Literal["score", "mask"],
    case: AttentionCase,
    builder: Callable[..., Callable[..., Any]],
    *numbers: int | float,
    **leaves: Tensor,
) -> Drawn:
    """Return the inputs with a mod that isn't in the list.

    Args:
        builder: takes the leaves and then the numbers, returns the mod.
        leaves: captured tensors on the CPU; those that require a gradient learn.
    """
    number = "S0" if kind == "score" else "M0"
    entry = Entry(number, "mod", builder, numbers=lambda sizes: numbers)
    return dataclasses.replace(
        drawn, mods={**drawn.mods, kind: Mod(entry, case.sizes, dict(leaves))}
    )


def with_options(options: Mapping[str, object]) -> Callable[..., Any]:
    """Return `flex_attention` with kernel options."""
    return functools.partial(anyflex.flex_attention, kernel_options=dict(options))
