"""Memory: no kernel touches memory outside of tensors, or keeps any after a call."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.testing.attention_case import Layout, laid_out
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, differentiable, modded, plain, with_mod
from anyflex.testing.child_process import forked, forks_autograd, needs_fork
from anyflex.testing.comparison import by_backend
from anyflex.testing.guard_pages import at_guard_page
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("memory")

_REPEATS = 50


class _Owner(bytearray):
    """Memory that can be watched: it is freed with the last tensor over it."""


def _owned(like: Tensor) -> tuple[Tensor, weakref.ref[_Owner]]:
    owner = _Owner(max(1, like.numel() * like.element_size()))
    tensor = torch.frombuffer(owner, dtype=like.dtype, count=like.numel()).reshape(like.shape)
    return tensor.copy_(like), weakref.ref(owner)


def _biased(bias: Any) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + bias[q, k]


@CASES.behaviour()
def tensors(session: Session) -> None:
    """A call fills the outputs that it is given, all of each and nothing beside, changes no input,
    and results lie in memory as their inputs do."""
    can = session.backend.capabilities
    changes: dict[str, Any] = {"q_length": 17 if can.decode else 81, "kv_length": 17}
    if can.different_value_head_dim and can.head_dim_min <= 24 <= can.head_dim_max:
        changes["value_head_dim"] = -(-24 // can.head_dim_multiple) * can.head_dim_multiple
    layouts: tuple[Layout, ...] = ("dense", "heads_last")
    for layout in layouts:
        case = modded(session, "tensors", layout=layout, batch=2, **changes)
        compare(session, case)
        found = by_backend(case, case.draw(session.device), session.name, session.device)
        for name in ("out", "dq", "dk", "dv"):
            if name in found:
                wanted = laid_out(torch.empty(found[name].shape), layout).stride()
                session.require(
                    found[name].stride() == wanted,
                    f"{name} has strides {found[name].stride()}, wanted {wanted} ({layout})",
                )


@CASES.behaviour()
def inputs_released(session: Session) -> None:
    """After a call nothing keeps its inputs alive."""
    session.needs(
        session.device.type == "cpu", "the memory of a tensor can be watched on the CPU only"
    )
    modded = {"score_graph", "captured"} <= session.backend.capabilities.known_fields
    mod = "identity" if modded else None
    case = plain(session, "released", score_mod=mod)
    watched: dict[str, weakref.ref[_Owner]] = {}

    def call() -> None:
        drawn = case.draw(session.device)
        tensors = {}
        for name, tensor in drawn.tensors.items():
            tensors[name], watched[name] = _owned(tensor)
        drawn = dataclasses.replace(drawn, tensors=tensors)
        if mod is not None:
            bias, watched["a captured tensor"] = _owned(torch.randn(case.q_length, case.kv_length))
            drawn = with_mod(drawn, "score", case, _biased, bias=bias)
        by_backend(case, drawn, session.name, session.device)

    call()
    gc.collect()
    kept = [name for name, reference in watched.items() if reference() is not None]
    session.require(not kept, f"after the call something keeps {', '.join(kept)} alive")


@CASES.behaviour()
def growth(session: Session) -> None:
    """Equal calls, with their backward, leave no more objects than a few."""
    case = plain(session, "growth")
    drawn = case.draw(session.device)

    def run(count: int) -> tuple[int, int]:
        for _ in range(count):
            by_backend(case, drawn, session.name, session.device)
        gc.collect()
        session.journal.clear()
        allocated = 0
        if session.device.type not in ("cpu", "mps"):
            torch.accelerator.synchronize()
            allocated = torch.accelerator.memory_allocated()
        return len(gc.get_objects()), allocated

    run(10)
    objects, allocated = run(1)
    more_objects, more_allocated = run(_REPEATS)
    session.require(
        more_objects - objects < _REPEATS,
        f"{_REPEATS} calls left {more_objects - objects} more Python objects",
    )
    session.require(
        more_allocated <= allocated,
        f"{_REPEATS} calls left {more_allocated - allocated} more bytes allocated on the device",
    )


@CASES.behaviour()
def unneeded_gradients(session: Session) -> None:
    """No room is asked for a gradient that nobody needs."""
    possible = differentiable(session)
    can = session.backend.capabilities
    session.needs(possible, "no gradients are declared")
    for name in sorted(possible):
        case = plain(session, "unneeded")
        dims = {"head_dim": case.head_dim, "value_head_dim": case.head_dim}
        if can.different_value_head_dim and case.head_dim + can.head_dim_multiple <= (
            can.head_dim_max
        ):
            dims["value_head_dim"] = case.head_dim + can.head_dim_multiple
        case = plain(
            session,
            "unneeded",
            batch=2,
            q_length=83,
            kv_length=71,
            gradients=frozenset({name}),
            **dims,
        )
        session.journal.workspaces.clear()
        compare(session, case)
        shapes = {
            "q": (2, case.heads, 83, case.head_dim),
            "k": (2, case.kv_heads, 71, case.head_dim),
            "v": (2, case.kv_heads, 71, case.value_head_dim),
        }
        for direction, specs in session.journal.workspaces:
            for other, shape in shapes.items():
                session.require(
                    direction == "forward"
                    or shape == shapes[name]
                    or all(tuple(spec.shape) != shape for spec in specs),
                    f"only {name} needs a gradient, and backward asks for a workspace of "
                    f"{other}'s shape {list(shape)}",
                )


def _counted_down(table: Any, last: Any) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + table[last - q + k]


def _counted_up(table: Any) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + table[q - k]


@CASES.behaviour()
def guard_page(session: Session) -> None:
    """A captured tensor is not read outside of its memory, at dead pairs neither."""
    needs_fork(session)
    length = 40 if session.backend.capabilities.decode else 80
    gradients = differentiable(session) if forks_autograd() else frozenset[str]()
    case = plain(
        session,
        "guard_page",
        q_length=length,
        kv_length=length,
        score_mod="identity",
        mask_mod="causal",
        gradients=gradients,
    )
    values = torch.randn(length, generator=torch.Generator().manual_seed(4))
    # Compiled here, because a forked child is no place for a compiler.
    for builder, numbers in ((_counted_down, (length - 1,)), (_counted_up, ())):
        drawn = case.draw(session.device)
        compare(session, case, with_mod(drawn, "score", case, builder, *numbers, table=values))
    for side, builder, numbers in (
        ("after", _counted_down, (length - 1,)),
        ("before", _counted_up, ()),
    ):

        def work(
            side: Any = side, builder: Any = builder, numbers: tuple[int, ...] = numbers
        ) -> None:
            table = at_guard_page(values, side)
            drawn = with_mod(
                case.draw(session.device), "score", case, builder, *numbers, table=table
            )
            compare(session, case, drawn)

        failure = forked(work)
        session.require(
            failure is None,
            f"with a captured tensor whose memory ends at a guard page ({side}): {failure}",
        )
