"""torch.compile, and torch's own checks of the two operations, with this backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anyflex
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, differentiable, modded
from anyflex.testing.comparison import by_backend
from anyflex.testing.inspector import promised_bytes
from anyflex.testing.session import ConformanceFailure, NotApplicable, Session

__all__ = ["CASES"]

CASES = Group("compiled")


def _modded(session: Session, name: str, **changes: Any) -> AttentionCase:
    """A call with mods, and with another layout, as far as they are declared."""
    if session.backend.capabilities.scattered:
        changes["layout"] = "heads_last"
    return modded(session, name, **changes)


def _compiled(compiler: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(
        anyflex.flex_attention, fullgraph=True, backend=compiler
    )
    return compiled


@CASES.behaviour()
def fullgraph(session: Session) -> None:
    """A call under torch.compile(fullgraph=True), forward and backward, computes the same."""
    torch.compiler.reset()
    attention = _compiled("aot_eager")
    compare(session, _modded(session, "fullgraph"), attention=attention)
    compare(session, _modded(session, "fullgraph", q_length=90, kv_length=70), attention=attention)
    if torch.bfloat16 in session.backend.capabilities.dtypes:
        # Kernels save tensors beside out and lse mostly for narrow types.
        compare(session, _modded(session, "fullgraph", dtype=torch.bfloat16), attention=attention)


@CASES.behaviour(quick=False)
def inductor(session: Session) -> None:
    """A call under torch.compile with its own code generator computes the same."""
    torch.compiler.reset()
    try:
        compare(session, _modded(session, "inductor"), attention=_compiled("inductor"))
    except ConformanceFailure:
        raise
    except Exception as error:
        if "compiler" in str(error).lower() and "not found" in str(error).lower():
            raise NotApplicable(f"torch finds no compiler: {error}".splitlines()[0]) from error
        raise


@CASES.behaviour()
def forward_once(session: Session) -> None:
    """Backward of a compiled call has what forward left, where the backend says how much that
    is."""
    backend = session.backend
    own = differentiable(session) and "q" in backend.capabilities.gradients
    session.needs(own, "no gradients of its own are declared")
    dtypes = [
        dtype
        for dtype in sorted(backend.capabilities.dtypes, key=str)
        if any(promised_bytes(backend, dtype, session.journal))
    ]
    session.needs(dtypes, "saved_bytes() promises nothing: what forward leaves is computed again")
    for dtype in dtypes:
        torch.compiler.reset()
        before = len(session.journal.forwards)
        case = _modded(session, "forward_once", dtype=dtype, q_length=96, kv_length=70)
        compare(session, case, attention=_compiled("aot_eager"))
        runs = len(session.journal.forwards) - before
        session.require(runs == 1, f"forward ran {runs} times for one compiled call of {dtype}")


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


@CASES.behaviour()
def opcheck(session: Session) -> None:
    """Both operations pass torch.library.opcheck: shapes, types and strides are as announced."""
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


def _leaves(value: Any, *, learn: bool) -> Any:
    """Copies of all tensors. Nothing is differentiable twice, so backward gets no tensor that
    learns."""
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves(item, learn=learn) for item in value)
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad and learn)
