"""State between forward and backward, and state of the process that a call must restore."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import anyflex
from anyflex.errors import BackendRefused, ModIndexError
from anyflex.testing.attention_case import AttentionCase, Drawn
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, differentiable, plain, with_mod
from anyflex.testing.comparison import Budgets, by_backend, by_oracle, mismatches
from anyflex.testing.float32_precision import products_in
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("state")

_attention: Callable[..., Any] = anyflex.flex_attention
_NO_GRADIENTS = "the gradients of query, key and value are not all declared"


def _differentiable(session: Session) -> bool:
    return differentiable(session) >= {"q", "k", "v"}


def _leaves(drawn: Drawn) -> list[Tensor]:
    return [drawn.tensors[name].detach().requires_grad_() for name in ("query", "key", "value")]


def _check_gradients(
    session: Session, case: AttentionCase, drawn: Drawn, grads: tuple[Tensor, ...], slack: float
) -> None:
    """Compare dq, dk and dv with the oracle's, within a multiple of its budget."""
    right = by_oracle(case, drawn)
    names = ("dq", "dk", "dv")
    budgets = Budgets(
        {name: right.exact[name] for name in names},
        {name: slack * right.allowed[name] for name in names},
    )
    lines = mismatches(dict(zip(names, grads, strict=True)), budgets, case, drawn)
    session.require(not lines, "; ".join(lines))


@CASES.behaviour()
def interleaved(session: Session) -> None:
    """Two forwards and then their backwards: a kernel keeps nothing of a call for its backward."""
    session.needs(_differentiable(session), _NO_GRADIENTS)
    cases = [plain(session, "interleaved", seed=seed) for seed in range(2)]
    inputs = [case.draw(session.device) for case in cases]
    leaves = [_leaves(drawn) for drawn in inputs]
    outs = [_attention(*tensors, backend=session.name) for tensors in leaves]
    for index in range(2):
        grads = torch.autograd.grad(outs[index], leaves[index], inputs[index].weights["dout"])
        _check_gradients(session, cases[index], inputs[index], grads, 1.0)


@CASES.behaviour()
def backward_twice(session: Session) -> None:
    """Backward may run again for the same forward, and gives the same."""
    session.needs(_differentiable(session), _NO_GRADIENTS)
    case = plain(session, "backward_twice")
    drawn = case.draw(session.device)
    leaves = _leaves(drawn)
    out = _attention(*leaves, backend=session.name)
    for _ in range(2):
        grads = torch.autograd.grad(out, leaves, drawn.weights["dout"], retain_graph=True)
        _check_gradients(session, case, drawn, grads, 1.0)


@CASES.behaviour()
def dout_strides(session: Session) -> None:
    """The gradient that arrives at out may have any strides, 0 included."""
    session.needs(_differentiable(session), _NO_GRADIENTS)
    case = plain(session, "dout_strides", batch=2)
    drawn = case.draw(session.device)
    dout = drawn.weights["dout"]
    wide = torch.cat([dout, dout.flip(-1)], -1)
    for given in (
        dout.transpose(1, 2).contiguous().transpose(1, 2),
        dout.mT.contiguous().mT,
        wide[..., ::2],
        dout[:, :1, :1, :1].expand(dout.shape),
    ):
        weights = {**drawn.weights, "dout": given}
        compare(session, case, dataclasses.replace(drawn, weights=weights))


@CASES.behaviour()
def split_keys(session: Session) -> None:
    """Lse and delta that come from outside, of a softmax over more keys, are used by backward."""
    _split(session, dlse=False)


@CASES.behaviour()
def split_keys_lse(session: Session) -> None:
    """The same where a gradient arrives at lse as well: delta from outside doesn't hold it."""
    can = session.backend.capabilities
    learns_lse = can.core_backward or "lse" in can.gradients
    session.needs(learns_lse, "the gradient of lse is not declared")
    _split(session, dlse=True)


def _split(session: Session, *, dlse: bool) -> None:
    declared = _differentiable(session) and "lse" in session.backend.capabilities.aux
    session.needs(declared, f"{_NO_GRADIENTS}, or lse is not")
    case = plain(session, "split_keys", kv_length=60, dlse=dlse)
    drawn = case.draw(session.device)
    query, key, value = (drawn.tensors[name] for name in ("query", "key", "value"))
    dout = drawn.weights["dout"]
    arriving = drawn.weights["dlse"] if dlse else None
    parts = [(key[:, :, part], value[:, :, part]) for part in (slice(0, 23), slice(23, 60))]
    outs, lses = [], []
    for k, v in parts:
        out, lse = _attention(query, k, v, return_lse=True, backend=session.name)
        outs.append(out)
        lses.append(lse)
    lse = torch.logaddexp(*lses)
    wide = lse.dtype
    out = sum(
        part.to(wide) * (own - lse).exp().unsqueeze(-1)
        for part, own in zip(outs, lses, strict=True)
    )
    assert isinstance(out, Tensor)
    delta = (dout.to(wide) * out).sum(-1)
    unread = torch.full_like(dout, torch.nan)
    grads = [
        anyflex.flex_attention_backward(
            dout, query, k, v, unread, lse, dlse=arriving, delta=delta, backend=session.name
        )
        for k, v in parts
    ]
    joined = (
        grads[0].query + grads[1].query,
        torch.cat([part.key for part in grads], 2),
        torch.cat([part.value for part in grads], 2),
    )
    # Each part is rounded by itself, and so are the parts' outputs that lse and delta are made of.
    _check_gradients(session, case, drawn, joined, 4.0)


@CASES.behaviour()
def modes(session: Session) -> None:
    """Calls under torch.no_grad and torch.inference_mode compute the same."""
    case = plain(session, "modes", gradients=frozenset())
    modes: tuple[Callable[[], Any], ...] = (torch.no_grad, torch.inference_mode)
    for mode in modes:

        def attention(*given: Any, mode: Any = mode, **named: Any) -> Any:
            with mode():
                # Made in inference mode: its tensors carry less information.
                made = [t.clone() if isinstance(t, Tensor) else t for t in given]
                return _attention(*made, **named)

        compare(session, case, attention=attention)


def _global_state() -> dict[str, Any]:
    return {
        "the random number generator's state": torch.get_rng_state().tolist(),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "CPU autocast": torch.is_autocast_enabled("cpu"),
        "the filters of warnings": list(warnings.filters),
    }


@contextlib.contextmanager
def _fresh_state() -> Iterator[None]:
    """State that no earlier call has left, so that a call which changes it to the same each time
    shows."""
    numbers = torch.get_rng_state()
    with products_in("highest"), warnings.catch_warnings():
        warnings.resetwarnings()
        torch.manual_seed(20260)
        try:
            yield
        finally:
            torch.set_rng_state(numbers)


def _raised(by: float) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + by * s + by


@CASES.behaviour()
def matmul_precision(session: Session) -> None:
    """Where torch asks for whole float32 products, a call gives them, whatever calls that might
    round more have come before."""
    case = plain(session, "matmul_precision", score_mod="identity")
    session.needs(case.dtype is torch.float32, "float32 isn't declared")
    drawn = with_mod(case.draw(session.device), "score", case, _raised, 0.125)
    for rounded in (dataclasses.replace(case, products=p) for p in ("medium", "high")):
        with contextlib.suppress(BackendRefused):
            by_backend(rounded, drawn, session.name, session.device)
    compare(session, case, drawn)


@CASES.behaviour()
def global_state(session: Session) -> None:
    """A call leaves random numbers, modes, threads, precisions and warning filters of the process
    as they were."""
    case = plain(session, "global_state")
    drawn = case.draw(session.device)
    leaves = [t.requires_grad_(_differentiable(session)) for t in _leaves(drawn)]
    # Imports at a first call may change filters.
    _attention(*leaves, backend=session.name)
    with _fresh_state():
        before = _global_state()
        out = _attention(*leaves, backend=session.name)
        if out.requires_grad:
            out.backward(drawn.weights["dout"])
        changed = [name for name, value in _global_state().items() if value != before[name]]
    session.require(not changed, f"a call changes {', '.join(changed)}")


def _too_far(table: Any) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + table[k]


@CASES.behaviour()
def index_error(session: Session) -> None:
    """A live pair that reads outside of a captured tensor raises ModIndexError on the CPU; a dead
    one reads nothing and raises nothing."""
    session.needs(session.device_type == "cpu", "elsewhere it would have to wait for the device")
    gradients = frozenset[str]()
    case = plain(session, "index_error", score_mod="identity", gradients=gradients)
    short = torch.randn(case.kv_length - 3, generator=torch.Generator().manual_seed(6))
    drawn = with_mod(case.draw(session.device), "score", case, _too_far, table=short)
    tensors = [drawn.tensors[name] for name in ("query", "key", "value")]
    with contextlib.suppress(ModIndexError):
        _attention(*tensors, drawn.mods["score"].function(), backend=session.name)
        session.require(
            False, "a live pair reads outside of a captured tensor, and nobody says so"
        )
    # The oracle reads live pairs only.
    masked = with_mod(drawn, "mask", case, _but_three, case.kv_length - 3)
    compare(session, case, masked)


@CASES.behaviour()
def index_error_of_a_mask(session: Session) -> None:
    """A mask function that reads outside of a captured tensor raises ModIndexError on the CPU
    where it says True; where it says False, or in a FULL block, nothing is raised."""
    session.needs(session.device_type == "cpu", "elsewhere it would have to wait for the device")
    case = plain(
        session,
        "index_error",
        mask_mod="causal",
        runs=((2, 2, 1), (2, 2, 0), (2, 2, 0)),
        gradients=frozenset(),
    )
    short = torch.ones(20, dtype=torch.bool)
    short[::3] = False
    drawn = case.draw(session.device)
    reads = with_mod(drawn, "mask", case, _false_outside, len(short), table=short)
    found = by_backend(case, reads, session.name, session.device)
    # The oracle's function reads within.
    within = with_mod(drawn, "mask", case, _within, len(short), table=short)
    lines = mismatches(found, by_oracle(case, within), case, within)
    session.require(not lines, "; ".join(lines))
    reads = with_mod(drawn, "mask", case, _true_outside, len(short), table=short)
    with contextlib.suppress(ModIndexError):
        by_backend(case, reads, session.name, session.device)
        session.require(False, "a mask function says True of a read outside, and nobody says so")


def _false_outside(table: Any, end: int) -> Callable[..., Any]:
    return lambda b, h, q, k: table[k] & (k < end)


def _within(table: Any, end: int) -> Callable[..., Any]:
    return lambda b, h, q, k: table[k.clamp(max=end - 1)] & (k < end)


def _true_outside(table: Any, end: int) -> Callable[..., Any]:
    return lambda b, h, q, k: table[k] | (k >= end)


def _but_three(end: int) -> Callable[..., Any]:
    return lambda b, h, q, k: k < end
