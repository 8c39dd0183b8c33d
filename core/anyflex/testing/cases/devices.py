"""Streams, devices and synchronisation: on an accelerator, and by a recording layer elsewhere."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anyflex
from anyflex.testing import recording
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, plain
from anyflex.testing.comparison import by_backend, mask_of
from anyflex.testing.guarded_tensors import same_bytes
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("devices")

_NO_ACCELERATOR = "the CPU has no streams"
_LAUNCHES = 5
"""Number of launches of a `_keep_busy`."""
_MOST_LAUNCHES = 100
"""Maximum number of launches. Once about a thousand are queued on CUDA, the host waits before it
can add one: most of that number is left to the backend."""


def _call(session: Session, seed: int = 0) -> AttentionCase:
    return plain(session, "devices", q_length=128, kv_length=128, seed=seed)


@CASES.behaviour()
def recorded(session: Session) -> None:
    """A kernel selects no device and no stream, and waits for no device."""
    session.needs(
        session.device.type == "cpu",
        "core itself selects the device there: devices/* try it for real",
    )
    case = _call(session)
    drawn = case.draw(session.device)
    with recording.recorded() as calls:
        by_backend(case, drawn, session.name, session.device)
    session.require(not calls, f"the kernel calls {'; '.join(dict.fromkeys(calls))}")


def _busy_during(device: torch.device, call: Callable[[], object]) -> Callable[[int], None]:
    """Return a function that queues, a given number of times, far more device time than the call's
    host time.

    The call is made twice here: once to compile, once to be timed. If other programs use the
    device meanwhile, the measured time is longer than needed.
    """
    call()
    _keep_busy(device)
    torch.accelerator.synchronize()
    units = []
    for _ in range(3):
        began = time.perf_counter()
        _keep_busy(device)
        torch.accelerator.synchronize()
        units.append(time.perf_counter() - began)
    began = time.perf_counter()
    call()
    of_host = time.perf_counter() - began
    torch.accelerator.synchronize()
    # A minimum also for a busy host, which may be interrupted for a tenth of a second.
    repeats = 1 + int(max(20 * of_host, 0.3) / min(units))

    def queue(times: int) -> None:
        for _ in range(min(repeats * times, _MOST_LAUNCHES // _LAUNCHES)):
            _keep_busy(device)

    return queue


def _keep_busy(device: torch.device) -> None:
    """Give the current stream work of some milliseconds, so that what follows has to wait."""
    same = torch.eye(6144, device=device)
    for _ in range(_LAUNCHES):
        same = same @ same


@CASES.behaviour(alone=True)
def two_streams(session: Session) -> None:
    """Calls on two streams that overlap share no scratch memory."""
    session.needs(session.device.type != "cpu", _NO_ACCELERATOR)
    # All of one size, because scratch memory may be shared by size.
    cases = [
        plain(session, "devices", q_length=256, kv_length=256, seed=seed) for seed in range(2)
    ]
    inputs = [case.draw(session.device) for case in cases]

    def both() -> list[dict[str, Tensor]]:
        return [
            by_backend(case, drawn, session.name, session.device)
            for case, drawn in zip(cases, inputs, strict=True)
        ]

    wanted = both()
    with session.unwatched():
        keep_busy = _busy_during(session.device, both)
    streams = [torch.Stream(device=session.device) for _ in cases]
    for _ in range(8):
        found = []
        with torch.Stream(device=session.device) as other:
            # Both begin at once, and not before the host has queued all of them.
            keep_busy(1)
            begin = other.record_event()
        for stream in streams:
            stream.wait_event(begin)
        for case, drawn, stream in zip(cases, inputs, streams, strict=True):
            with stream, session.unwatched():
                found.append(by_backend(case, drawn, session.name, session.device))
        torch.accelerator.synchronize()
        for one, right in zip(found, wanted, strict=True):
            for name, tensor in right.items():
                session.require(
                    same_bytes(one[name], tensor), f"overlapping calls give another {name}"
                )


@CASES.behaviour(alone=True)
def side_stream(session: Session) -> None:
    """A kernel runs on the current stream, behind what was put there."""
    session.needs(session.device.type != "cpu", _NO_ACCELERATOR)
    case = _call(session)
    drawn = case.draw(session.device)
    late = {name: torch.zeros_like(tensor) for name, tensor in drawn.tensors.items()}
    with session.unwatched():
        keep_busy = _busy_during(
            session.device, lambda: by_backend(case, drawn, session.name, session.device)
        )
    stream = torch.Stream(device=session.device)
    with stream:
        keep_busy(1)
        for name, tensor in drawn.tensors.items():
            late[name].copy_(tensor)
        with session.unwatched():
            compare(session, case, dataclasses.replace(drawn, tensors=late))
    torch.accelerator.synchronize()


@CASES.behaviour()
def second_device(session: Session) -> None:
    """Tensors on another device than the current one are computed there."""
    session.needs(session.device.type != "cpu", _NO_ACCELERATOR)
    session.needs(torch.accelerator.device_count() >= 2, "there is one device only")
    other = dataclasses.replace(session, device=torch.device(session.device.type, 1))
    compare(other, _call(other))


@CASES.behaviour(alone=True)
def no_synchronisation(session: Session) -> None:
    """Neither forward nor backward makes the host wait for the device."""
    session.needs(session.device.type != "cpu", _NO_ACCELERATOR)
    sizes = [128, 1] if session.backend.capabilities.decode else [128]
    for q_length in sizes:
        for mask in (None, "causal"):
            _require_no_wait(
                session,
                # Blocks of 64: a backend made of torch's operations launches kernels for each,
                # which must not fill the device's queue.
                plain(
                    session,
                    "devices",
                    q_length=q_length,
                    kv_length=128,
                    mask_mod=mask,
                    block_size=(64, 64),
                ),
            )


def _require_no_wait(session: Session, case: AttentionCase) -> None:
    """Call it while the device is busy with what was queued before. What a mask's first call
    derives from it, once, is there by then. A host that is busy may let the device catch up, so
    one call of three is enough, the later ones behind as much work as can be queued: what waits
    now and then alone isn't found."""
    drawn = case.draw(session.device)
    tensors: dict[str, Any] = {
        name: tensor.requires_grad_() for name, tensor in drawn.tensors.items()
    }
    dout = drawn.weights["dout"]
    mask = mask_of(case, drawn, session.device)
    called = f"{case.q_length} queries, {'no mask' if mask is None else 'a mask'}"

    def forward() -> Any:
        return anyflex.flex_attention(**tensors, block_mask=mask, backend=session.name)

    def whole() -> None:
        out = forward()
        if case.gradients:
            out.backward(dout)

    def waits(times: int) -> str | None:
        """Return the direction that waits, behind this many units of work."""
        keep_busy(times)
        behind = torch.accelerator.current_stream(session.device).record_event()
        out = forward()
        if behind.query():
            return "forward"
        if case.gradients:
            out.backward(dout)
            if behind.query():
                return "backward"
        return None

    waiting = None
    with session.unwatched():
        keep_busy = _busy_during(session.device, whole)
        for times in (1, 4, 16):
            waiting = waits(times)
            torch.accelerator.synchronize()
            if waiting is None:
                break
        where = "" if waiting is None else _waits_of(session.device, whole)
    session.require(
        waiting is None, f"{waiting} waits for what was queued before it: {called}{where}"
    )


def _waits_of(device: torch.device, call: Callable[[], object]) -> str:
    """Lines of the call that wait, as far as torch knows: on CUDA, and none that synchronize."""
    if device.type != "cuda":
        return ""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    lines = [
        f"{Path(told.filename).name}:{told.lineno}"
        for told in caught
        if "called a synchronizing" in str(told.message)
    ]
    waits = ", ".join(dict.fromkeys(lines)) or (
        "no line; that knows neither of torch.cuda.synchronize nor of a full queue, at which the "
        "host waits where a call launches a thousand kernels"
    )
    return f"; by torch's sync debug mode, in {waits}"
