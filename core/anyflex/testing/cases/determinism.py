"""Determinism: equal calls give equal bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anyflex.testing.attention_case import AttentionCase, Drawn
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, differentiable, plain
from anyflex.testing.comparison import by_backend
from anyflex.testing.guarded_tensors import same_bytes
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("determinism")

_RUNS = 20


def _require_same(
    session: Session, found: Mapping[str, Tensor], again: Mapping[str, Tensor], who: str
) -> None:
    for name, tensor in found.items():
        session.require(same_bytes(tensor, again[name]), f"{who} gives another {name}")


def _repeat(session: Session, case: AttentionCase, runs: int) -> None:
    """Fail unless this many runs give the same bits."""
    drawn: Drawn = case.draw(session.device)
    first = by_backend(case, drawn, session.name, session.device)
    for run in range(1, runs):
        again = by_backend(case, drawn, session.name, session.device)
        _require_same(session, first, again, f"run {run + 1} of equal calls")


@CASES.behaviour()
def forward(session: Session) -> None:
    """Equal calls of forward give equal bits, 20 times."""
    case = plain(session, "forward", kv_length=300, gradients=frozenset())
    _repeat(session, case, _RUNS)


@contextmanager
def _deterministic(*, warn_only: bool = False) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def _mode_case(session: Session, length: int) -> AttentionCase:
    gradients = differentiable(session, captured=True)
    name = "scatter_collide" if "captured" in gradients else "identity"
    return plain(
        session, "mode", score_mod=name, q_length=length, kv_length=length, gradients=gradients
    )


@CASES.behaviour()
def mode(session: Session) -> None:
    """Under torch.use_deterministic_algorithms every gradient repeats bit for bit, or is refused;
    where torch only warns, it is right."""
    with _deterministic(warn_only=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(session, _mode_case(session, 80))
    with _deterministic():
        # Many additions into two addresses: another order gives another sum.
        _repeat(session, _mode_case(session, 512), 4)
        compare(session, _mode_case(session, 80))


def _require_scratch_unread(session: Session, case: AttentionCase) -> None:
    drawn: Drawn = case.draw(session.device)
    found = by_backend(case, drawn, session.name, session.device)
    with session.inspecting("poisons", False):
        again = by_backend(case, drawn, session.name, session.device)
    _require_same(session, found, again, "a call whose scratch memory held zeros, not NaN,")


@CASES.behaviour()
def scratch(session: Session) -> None:
    """No bit of a result depends on what workspaces and saved outputs held before a launch."""
    can = session.backend.capabilities
    gradients = differentiable(session, captured=True)
    # Rows that fill tiles, that fill 16 bytes, and that fill neither.
    cases: list[dict[str, Any]] = [{"q_length": length} for length in (80, 84, 85)]
    if can.decode:
        # Few rows and many keys, so that their sums may be split.
        cases += ({"q_length": length, "kv_length": 1200, "batch": 1} for length in (1, 5))
    if {"mask_graph", "mask_kind", "captured"} <= can.known_fields:
        cases.append({"mask_mod": "doc_sorted"})
    if {"score_graph", "captured"} <= can.known_fields and "captured" in gradients:
        cases.append({"score_mod": "scatter_collide", "gradients": gradients})
    cases = [{"q_length": 85, "kv_length": 159, "batch": 2, **changes} for changes in cases]
    for changes in cases:
        forward = {**changes, "gradients": frozenset()}
        _require_scratch_unread(session, plain(session, "forward", **forward))
    # After forward, because a backend that can't repeat a backward refuses these.
    with _deterministic():
        for changes in cases:
            _require_scratch_unread(session, plain(session, "backward", **changes))
