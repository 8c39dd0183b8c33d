"""Scores whose size leaves a softmax little room; they are exact, so that the results are known.

Queries and keys are small whole numbers and the scale is a multiple of 1/8: float32 holds each
score, and each modified score, exactly, and equal scores are equal. So the dense formula has the
right results. The general budgets, which allow what rounding does to scores of this size, don't.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.testing.attention_case import LSE, AttentionCase, Drawn
from anyflex.testing.budgets import Budgets
from anyflex.testing.case_types import Group
from anyflex.testing.checking import plain, with_mod
from anyflex.testing.comparison import by_backend, by_oracle, mismatches
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("large_scores")
LOWEST = torch.finfo(torch.float32).min
KEYS = 150
LSE_THAT_TELLS = 2.0**17
"""Largest lse whose rounding changes weights by less than a hundredth."""

Builder = Callable[..., Callable[..., Any]]


def _whole_numbers(tensors: dict[str, Tensor]) -> None:
    for name in ("query", "key"):
        tensors[name].mul_(1.5).round_().clamp_(-3, 3)


def _equal_products(tensors: dict[str, Tensor]) -> None:
    for name in ("query", "key"):
        tensors[name].fill_(4e4)


def _lowest_tables(case: AttentionCase) -> dict[str, Tensor]:
    rows, keys = torch.zeros(case.q_length), torch.zeros(case.kv_length)
    rows[::3] = LOWEST
    keys[1::4] = LOWEST
    return {"rows": rows, "keys": keys}


def _cases(session: Session, name: str, **changes: Any) -> list[AttentionCase]:
    """Cases with many rows and, where that is declared, few."""
    lengths = [80, 3] if session.backend.capabilities.decode else [80]
    given = {"kv_length": KEYS, "scale": 0.125, **changes}
    return [plain(session, name, q_length=length, **given) for length in lengths]


def _compare(session: Session, case: AttentionCase, drawn: Drawn) -> None:
    """Fail where a result is further from the dense formula than a few roundings of its own and of
    lse, from which a backward may compute weights. Where lse is too coarse for that, gradients
    must be finite; better ones need more than a kernel's inputs."""
    found = by_backend(case, drawn, session.name, session.device)
    session.check_journal()
    # The allowed rounding depends on lse, whether or not the backend returns it.
    exact = by_oracle(dataclasses.replace(case, aux=case.aux | LSE), drawn).exact
    steps = 64 if case.dtype.itemsize >= 4 else 8
    size = float(exact["lse"].abs().amax())
    of_lse = torch.finfo(torch.float32).eps * size
    grads = [name for name in found if name.startswith("d")]
    if size > LSE_THAT_TELLS:
        for name in grads:
            session.require(bool(found[name].isfinite().all()), f"{name} isn't finite")
        exact = {name: wanted for name, wanted in exact.items() if name not in grads}
    allowed = {}
    for name, wanted in exact.items():
        width = torch.float32 if name in ("lse", "max_scores") else case.dtype
        share = steps * torch.finfo(width).eps + (of_lse if name in grads else 0.0)
        allowed[name] = (share * wanted.abs().amax().clamp_min(1.0)).expand_as(wanted)
    kept = {name: wanted for name, wanted in exact.items() if name in found}
    lines = mismatches(found, Budgets(kept, allowed), case, drawn)
    session.require(not lines, f"with {case.q_length} rows " + "; ".join(lines))


def _check(session: Session, builder: Builder, **changes: Any) -> None:
    """Compare calls with a score mod, which may read the tables of `_lowest_tables`."""
    for case in _cases(session, "large_scores", values=_whole_numbers, **changes):
        drawn = case.draw(session.device)
        tables = _lowest_tables(case)
        _compare(session, case, with_mod(drawn, "score", case, builder, **tables))


@CASES.behaviour()
def lowered_to_lowest(session: Session) -> None:
    """A row whose scores are all the lowest float weighs its keys alike."""
    # Whole rows, whole columns and others, as padding masks are written as biases.
    _check(
        session,
        lambda rows, keys: lambda s, b, h, q, k: s + torch.minimum(rows[q], keys[k]),
    )


@CASES.behaviour()
def lowest_instead(session: Session) -> None:
    """The same where the lowest float stands instead of scores."""
    _check(
        session,
        lambda rows, keys: (
            lambda s, b, h, q, k: torch.where(torch.minimum(rows[q], keys[k]) < 0, LOWEST, s)
        ),
    )


def _raised(rows: Tensor, keys: Tensor) -> Callable[..., Any]:
    """Raises scores by as much as leaves them their last bit."""
    return lambda s, b, h, q, k: s + 2.0**20


@CASES.behaviour()
def raised(session: Session) -> None:
    """Scores near a million keep their differences."""
    _check(session, _raised)


@CASES.behaviour()
def lowered(session: Session) -> None:
    """Scores near minus a million keep their differences."""
    _check(session, lambda rows, keys: lambda s, b, h, q, k: s - 2.0**20)


@CASES.behaviour()
def raised_in_groups(session: Session) -> None:
    """And so do those of causal rows of grouped heads, at a scale below 0."""
    _check(session, _raised, heads=4, kv_heads=2, mask_mod="causal", scale=-0.25)


@CASES.behaviour()
def in_steps(session: Session) -> None:
    """Sums are rescaled from small scores to large ones."""
    # Each step of keys exceeds all before it.
    _check(session, lambda rows, keys: lambda s, b, h, q, k: s + (k // 30) * 3000.0)


@CASES.behaviour()
def magnified(session: Session) -> None:
    """Equal scores of 2^24 and more share the weight."""
    # All scores but the largest, of which there are several, vanish.
    _check(
        session,
        lambda rows, keys: lambda s, b, h, q, k: s * 2.0**24,
        gradients=frozenset(),
    )


@CASES.behaviour()
def products(session: Session) -> None:
    """And so do equal products of 10^10."""
    for case in _cases(session, "products", values=_equal_products, gradients=frozenset()):
        _compare(session, case, case.draw(session.device))
