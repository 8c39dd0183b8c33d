"""torch.compile, and torch's own checks of the two operations, with this backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import anyflex
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case import Case, behaviour
from anyflex.testing.checking import compare, differentiable, plain
from anyflex.testing.comparison import by_backend
from anyflex.testing.session import ConformanceFailure, Session

__all__ = ["CASES"]

CASES: dict[str, Case] = {}


def _modded(session: Session, name: str, **changes: Any) -> AttentionCase:
    """A call with a mod, a captured tensor and a mask, as far as they are declared."""
    known = session.backend.capabilities.known_fields
    if {"score_graph", "captured"} <= known:
        changes["score_mod"] = "alibi_learned"
        changes["gradients"] = differentiable(session, captured=True)
    if {"mask_graph", "mask_kind"} <= known:
        changes["mask_mod"] = "causal"
    if session.backend.capabilities.scattered:
        changes["layout"] = "heads_last"
    return plain(session, name, **changes)


def _compiled(compiler: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(
        anyflex.flex_attention, fullgraph=True, backend=compiler
    )
    return compiled


@behaviour(
    CASES,
    "compiled/fullgraph",
    "torch.compile(fullgraph=True), forward and backward, computes the same",
    quick=True,
)
def _fullgraph(session: Session) -> str | None:
    torch.compiler.reset()
    attention = _compiled("aot_eager")
    compare(session, _modded(session, "fullgraph"), attention=attention)
    compare(session, _modded(session, "fullgraph", q_length=90, kv_length=70), attention=attention)
    if torch.bfloat16 in session.backend.capabilities.dtypes:
        # What a kernel saves beside out and lse is mostly for narrow types.
        compare(session, _modded(session, "fullgraph", dtype=torch.bfloat16), attention=attention)
    return None


@behaviour(
    CASES,
    "compiled/inductor",
    "torch.compile with its own code generator computes the same",
)
def _inductor(session: Session) -> str | None:
    torch.compiler.reset()
    try:
        compare(session, _modded(session, "inductor"), attention=_compiled("inductor"))
    except ConformanceFailure:
        raise
    except Exception as error:
        if "compiler" in str(error).lower() and "not found" in str(error).lower():
            return f"torch finds no compiler: {error}".splitlines()[0]
        raise
    return None


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """An active dispatch mode sends calls through the operations; it keeps their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function.namespace == "anyflex":
            self.calls[function] = (arguments, options or {})
        return function(*arguments, **(options or {}))


@behaviour(
    CASES,
    "compiled/opcheck",
    "torch.library.opcheck passes on both operations: shapes, types and strides are as announced",
    quick=True,
)
def _opcheck(session: Session) -> str | None:
    case = _modded(session, "opcheck")
    drawn = case.draw(session.device)
    with _Recording() as recording:
        by_backend(case, drawn, session.name, session.device)
    session.require(bool(recording.calls), "the call did not go through the operations")
    for function, (arguments, options) in recording.calls.items():
        # Nothing is differentiable twice: the backward operation gets no leaf that wants it.
        learns = "backward" not in str(function)
        leaf = functools.partial(_leaf, learns=learns)
        given, named = pytree.tree_map(leaf, (arguments, options))
        torch.library.opcheck(function, given, named)
    return None


def _leaf(value: Any, *, learns: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad and learns)
