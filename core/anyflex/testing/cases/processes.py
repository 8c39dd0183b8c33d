"""Threads, forked children and fresh processes."""

from __future__ import annotations

import base64
import dataclasses
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from anyflex.plugin import Spec
from anyflex.registry import backend_table
from anyflex.testing import child_process
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case_types import Group, row
from anyflex.testing.checking import compare, plain
from anyflex.testing.child_process import forked, forks_autograd, needs_fork
from anyflex.testing.comparison import by_backend, by_oracle, mismatches
from anyflex.testing.guarded_tensors import same_bytes
from anyflex.testing.inspector import KeptArtifacts, inspected
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("processes")

_THREADS = 8
_ROUNDS = 6
_SWITCH_SECONDS = 1e-6
_MODULES = 150
_HANGING = 120
_STOPPED_SECONDS = 0.5
_HEAVY = frozenset(
    "triton cutlass cupy numba llvmlite pycuda jax tensorflow torch._inductor torch._dynamo "
    "torch.utils.cpp_extension setuptools distutils Cython pybind11 cffi scipy sympy".split()
)


def _run_threads(session: Session, work: Callable[[int], None], count: int = _THREADS) -> None:
    """Run ``work(0)``, ``work(1)`` ... in threads that are switched often."""
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_HANGING)
    finally:
        sys.setswitchinterval(before)
    session.require(not any(thread.is_alive() for thread in threads), "a thread hangs")


@CASES.behaviour()
def threads(session: Session) -> None:
    """Threads that compute at once give the bits of one after the other."""
    cases = [
        # Two lengths: scratch memory may be shared by size.
        plain(session, "threads", seed=seed, q_length=256 + 32 * (seed % 2), kv_length=300)
        for seed in range(_THREADS)
    ]
    _same_in_threads(session, cases, _ROUNDS)


@CASES.behaviour()
def threads_of_long_calls(session: Session) -> None:
    """The same for calls that take much longer than their launch."""
    cases = [
        plain(session, "threads", seed=seed, heads=4, kv_heads=4, q_length=length, kv_length=900)
        for seed, length in enumerate((1100, 300, 700, 900))
    ]
    _same_in_threads(session, cases, 3)


def _same_in_threads(session: Session, cases: list[AttentionCase], rounds: int) -> None:
    """Compare the bits of the cases one after the other with those of a thread for each."""
    inputs = [case.draw(session.device) for case in cases]

    def run(index: int) -> dict[str, Tensor]:
        return by_backend(cases[index], inputs[index], session.name, session.device)

    serial = [run(index) for index in range(len(cases))]
    wrong: list[str] = []
    begin = threading.Barrier(len(cases))

    def work(index: int) -> None:
        begin.wait()
        try:
            for _ in range(rounds):
                if wrong:
                    return
                for name, tensor in run(index).items():
                    if not same_bytes(tensor, serial[index][name]):
                        wrong.append(f"thread {index} gets another {name}")
        except Exception as error:  # noqa: BLE001  told to the main thread
            wrong.append(f"thread {index}: {type(error).__name__}: {error.__cause__ or error}")

    # Unwatched: the inspector's work would keep the threads apart.
    with session.unwatched():
        _run_threads(session, work, len(cases))
    session.require(not wrong, "; ".join(dict.fromkeys(wrong)))


@CASES.behaviour()
def compiling_threads(session: Session) -> None:
    """Threads that compile different kernels at once get what each asked for."""
    modded = {"score_graph", "captured"} <= session.backend.capabilities.known_fields
    mods = ("softcap", "alibi_abs", "clamped", "sq_relu", "alibi_learned", "piecewise", None, None)
    cases = [
        plain(session, "compiling", seed=seed, score_mod=mod if modded else None, scale=0.25)
        for seed, mod in enumerate(mods)
    ]
    inputs = [case.draw(session.device) for case in cases]
    found: dict[int, dict[str, Tensor] | Exception] = {}
    begin = threading.Barrier(_THREADS)

    def work(index: int) -> None:
        begin.wait()
        try:
            found[index] = by_backend(cases[index], inputs[index], session.name, session.device)
        except Exception as error:  # noqa: BLE001  raised again in the main thread
            found[index] = error

    # A registry without kernels.
    watched = inspected(session.backend, session.journal)
    own = session.name == backend_table.REFERENCE
    with backend_table.isolated(reference=watched) if own else backend_table.isolated():
        if not own:
            backend_table.register(session.name, watched)
        _run_threads(session, work)
    for index, result in sorted(found.items()):
        if isinstance(result, Exception):
            raise result
        right = by_oracle(cases[index], inputs[index])
        lines = mismatches(result, right, cases[index], inputs[index])
        session.require(not lines, f"thread {index}: {'; '.join(lines)}")


@CASES.behaviour()
def many_threads_in_one_call(session: Session) -> None:
    """A call of a larger size is right where torch's operations have several threads."""
    torch.set_num_threads(max(4, session.threads))
    try:
        case = plain(session, "many_threads", batch=2, q_length=300, kv_length=280)
        compare(session, case)
    finally:
        torch.set_num_threads(1)


@CASES.behaviour()
def fork(session: Session) -> None:
    """A forked child of a process that has called can call."""
    needs_fork(session)
    case = plain(session, "fork", q_length=80, kv_length=70)
    compare(session, case)
    if not forks_autograd():
        case = dataclasses.replace(case, gradients=frozenset())
    failure = forked(lambda: compare(session, case))
    session.require(failure is None, f"{failure}")


@CASES.behaviour()
def fork_while_compiling(session: Session) -> None:
    """A child that is forked while another thread compiles can compile and call."""
    needs_fork(session)
    modded = {"score_graph", "captured"} <= session.backend.capabilities.known_fields
    cases = [
        plain(session, "compiling", score_mod=mod if modded else None, gradients=frozenset())
        for mod in ("softcap", *_COMPILED_MODS, "piecewise")
    ]
    specs = []
    for case in cases[:-1]:
        compare(session, case)
        specs.append(session.journal.forwards[-1])
    # Each compile is stopped at another point, a fraction of the first one's number of steps.
    steps = _Stopped(session, specs[0], sys.maxsize).steps
    for place, spec in enumerate(specs[1:]):
        stopped = _Stopped(session, spec, steps * (2 * place + 1) // (2 * len(_COMPILED_MODS)))
        try:
            failure = forked(lambda: compare(session, cases[-1])) if stopped.waits else None
        finally:
            stopped.go_on()
        session.require(failure is None, f"forked while another thread compiles: {failure}")


_COMPILED_MODS = ("alibi_abs", "clamped", "sq_relu", "trunc_negative")


class _Stopped:
    """A thread that compiles a spec and stops for a while at a Python function call of it. It goes
    on by itself, because a fork may wait for the end of a compile.

    Args:
        step: the number of calls and returns after which it stops.

    Attributes:
        steps: how many there were.
        waits: it has not ended before.
    """

    def __init__(self, session: Session, spec: Spec, step: int) -> None:
        self.steps = 0
        self.waits = False
        self._step = step
        self._arrived, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._compile, args=(session, spec), daemon=True)
        self._thread.start()
        session.require(self._arrived.wait(_HANGING), "a compile hangs")

    def go_on(self) -> None:
        """Let the compile end."""
        self._leave.set()
        self._thread.join(_HANGING)

    def _compile(self, session: Session, spec: Spec) -> None:
        sys.setprofile(self._count)
        try:
            session.backend.compile(spec, KeptArtifacts())
        finally:
            sys.setprofile(None)
            self._arrived.set()

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.steps += 1
        if self.steps == self._step:
            self.waits = True
            self._arrived.set()
            self._leave.wait(_STOPPED_SECONDS)


CASES.compare(
    {},
    plain=row(
        "what a fresh process computes",
        (70, 80),
        aux=frozenset(),
        score_mod="softcap",
        mask_mod="causal",
    ),
    bare=row("what a fresh process computes, without mods and mask", (70, 80), aux=frozenset()),
)


@CASES.behaviour()
def fresh(session: Session) -> None:
    """A fresh process computes the same, with artifacts that were kept and without, and the
    fingerprint that tells whose they are is the same there."""
    can = session.backend.capabilities
    name = "processes/bare"
    if {"score_graph", "mask_graph", "mask_kind"} <= can.known_fields:
        name = "processes/plain"
    case = CASES[name]
    assert isinstance(case, AttentionCase)
    compare(session, case)
    kept = KeptArtifacts()
    session.backend.compile(session.journal.forwards[-1], kept)
    fingerprint = session.backend.fingerprint()
    session.require(
        isinstance(fingerprint, str), f"fingerprint() returns {fingerprint!r}, which is no str"
    )
    session.require(
        bool(fingerprint.strip()) or not kept.stored,
        f"compile() keeps artifacts ({', '.join(kept.stored)}) and fingerprint() is empty: those "
        "of another toolchain, driver or device would be taken for its own",
    )
    told = child_process.fresh(
        session,
        "compute",
        case=name,
        artifacts={name: base64.b64encode(data).decode() for name, data in kept.stored.items()},
    )
    session.require(
        told["fingerprint"] == fingerprint,
        f"fingerprint() is {fingerprint!r} here and {told['fingerprint']!r} in a fresh process",
    )
    for what, outcome in zip(("with", "without"), told["outcomes"], strict=True):
        session.require(
            outcome["status"] == "passed",
            f"a fresh process {what} kept artifacts: {outcome['status']}: {outcome['detail']}",
        )


@CASES.behaviour()
def probe(session: Session) -> None:
    """Importing and probing the backend loads no compiler, starts no program and no device."""
    told = child_process.fresh(session, "probe")
    loaded = {*told["modules"], *(module.partition(".")[0] for module in told["modules"])}
    heavy = sorted(loaded & _HEAVY)
    session.require(not heavy, f"importing and probing loads {', '.join(heavy)}")
    own = session.target.partition(".")[0].partition(":")[0]
    others = [m for m in told["modules"] if m.partition(".")[0] != own]
    session.require(
        len(others) <= _MODULES,
        f"importing and probing loads {len(others)} modules of others, {_MODULES} are allowed: "
        f"{', '.join(others[:5])} ...",
    )
    session.require(
        not told["programs"], f"importing or probing runs {', '.join(told['programs'])}"
    )
    session.require(
        not told["started"], f"importing or probing starts {', '.join(told['started'])}"
    )
