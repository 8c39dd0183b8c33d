"""torch.compile, and torch's own checks of the two operations, with this backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anyflex
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case_types import Case, behaviour
from anyflex.testing.checking import compare, differentiable, plain
from anyflex.testing.comparison import by_backend
from anyflex.testing.inspector import promised_bytes
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
        # Kernels save tensors beside out and lse mostly for narrow types.
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


@behaviour(
    CASES,
    "compiled/forward_once",
    "backward of a compiled call has what forward left, where the backend says how much that is",
    quick=True,
)
def _forward_once(session: Session) -> str | None:
    backend = session.backend
    if not differentiable(session) or "q" not in backend.capabilities.gradients:
        return "no gradients of its own are declared"
    dtypes = [
        dtype
        for dtype in sorted(backend.capabilities.dtypes, key=str)
        if any(promised_bytes(backend, dtype, session.journal))
    ]
    if not dtypes:
        return "saved_bytes() promises nothing: what forward leaves is computed again"
    for dtype in dtypes:
        torch.compiler.reset()
        before = len(session.journal.forwards)
        case = _modded(session, "forward_once", dtype=dtype, q_length=96, kv_length=70)
        compare(session, case, attention=_compiled("aot_eager"))
        runs = len(session.journal.forwards) - before
        session.require(runs == 1, f"forward ran {runs} times for one compiled call of {dtype}")
    return None


def _arguments_of_the_operation(session: Session, case: AttentionCase) -> tuple[Any, ...]:
    """Return the arguments that a compiled call passes to the forward operation."""
    calls: list[tuple[Any, ...]] = []

    class Recording(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is torch.ops.anyflex.flex_attention.default:
                calls.append(args)
            return super().call_function(target, args, kwargs)

    def run_recorded(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return Recording(graph).run

    torch.compiler.reset()
    attention: Callable[..., Any] = torch.compile(
        anyflex.flex_attention, fullgraph=True, dynamic=False, backend=run_recorded
    )
    by_backend(case, case.draw(session.device), session.name, session.device, attention)
    session.require(len(calls) == 1, "the call did not go through the operation once")
    return calls[0]


@behaviour(
    CASES,
    "compiled/opcheck",
    "torch.library.opcheck passes on both operations: shapes, types and strides are as announced",
    quick=True,
)
def _opcheck(session: Session) -> str | None:
    case = _modded(session, "opcheck")
    arguments = _arguments_of_the_operation(session, case)
    torch.library.opcheck(torch.ops.anyflex.flex_attention.default, _leaves(arguments, learn=True))
    if case.gradients:
        query, key, value, *rest = _leaves(arguments, learn=False)
        out, lse, _, saved, saved_by = torch.ops.anyflex.flex_attention.default(
            query, key, value, *rest
        )
        outputs = (out, lse, saved, saved_by)
        given = (torch.ones_like(out), None, None, query, key, value, *outputs, *rest)
        torch.library.opcheck(torch.ops.anyflex.flex_attention_backward.default, given)
    return None


def _leaves(value: Any, *, learn: bool) -> Any:
    """Copies of all tensors. Nothing is differentiable twice, so backward gets no tensor that
    learns."""
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves(item, learn=learn) for item in value)
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad and learn)
