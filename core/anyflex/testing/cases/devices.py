"""Streams, devices and synchronisation: on an accelerator, and by a recording layer elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import anyflex
from anyflex.testing.attention_case import AttentionCase
from anyflex.testing.case import Case, behaviour
from anyflex.testing.checking import compare, plain
from anyflex.testing.comparison import by_backend
from anyflex.testing.guarded import same_bytes
from anyflex.testing.recording import recorded
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES: dict[str, Case] = {}

_NO_ACCELERATOR = "the CPU has no streams"


def _call(session: Session, seed: int = 0) -> AttentionCase:
    return plain(session, "devices", q_length=128, kv_length=128, seed=seed)


@behaviour(
    CASES,
    "devices/recorded",
    "a kernel selects no device and no stream, and waits for no device",
    quick=True,
)
def _recorded(session: Session) -> str | None:
    if session.device.type != "cpu":
        return "core itself selects the device there: devices/* try it for real"
    case = _call(session)
    drawn = case.draw(session.device)
    with recorded() as calls:
        by_backend(case, drawn, session.name, session.device)
    session.require(not calls, f"the kernel calls {'; '.join(dict.fromkeys(calls))}")
    return None


@behaviour(
    CASES,
    "devices/two_streams",
    "calls on two streams that overlap share no scratch memory",
    quick=True,
)
def _two_streams(session: Session) -> str | None:
    if session.device.type == "cpu":
        return _NO_ACCELERATOR
    cases = [_call(session, seed) for seed in range(2)]
    inputs = [case.draw(session.device) for case in cases]
    wanted = [
        by_backend(case, drawn, session.name, session.device)
        for case, drawn in zip(cases, inputs, strict=True)
    ]
    torch.accelerator.synchronize()
    streams = [torch.Stream(device=session.device) for _ in cases]
    for _ in range(8):
        found = []
        for case, drawn, stream in zip(cases, inputs, streams, strict=True):
            with stream, session.unwatched():
                found.append(by_backend(case, drawn, session.name, session.device))
        torch.accelerator.synchronize()
        for one, right in zip(found, wanted, strict=True):
            for name, tensor in right.items():
                session.require(
                    same_bytes(one[name], tensor), f"overlapping calls give another {name}"
                )
    return None


@behaviour(
    CASES,
    "devices/side_stream",
    "a kernel runs on the current stream, behind what was put there",
    quick=True,
)
def _side_stream(session: Session) -> str | None:
    if session.device.type == "cpu":
        return _NO_ACCELERATOR
    case = _call(session)
    drawn = case.draw(session.device)
    late = {name: torch.zeros_like(tensor) for name, tensor in drawn.tensors.items()}
    busy = torch.randn(4096, 4096, device=session.device)
    torch.accelerator.synchronize()
    stream = torch.Stream(device=session.device)
    with stream:
        # Long enough that a kernel on another stream would read zeros.
        for _ in range(20):
            busy = busy @ busy * 1e-4
        for name, tensor in drawn.tensors.items():
            late[name].copy_(tensor)
        with session.unwatched():
            compare(session, case, dataclasses.replace(drawn, tensors=late))
    torch.accelerator.synchronize()
    return None


@behaviour(
    CASES,
    "devices/second_device",
    "tensors on another device than the current one are computed there",
    quick=True,
)
def _second_device(session: Session) -> str | None:
    if session.device.type == "cpu":
        return _NO_ACCELERATOR
    if torch.accelerator.device_count() < 2:
        return "there is one device only"
    other = dataclasses.replace(session, device=torch.device(session.device.type, 1))
    compare(other, _call(other))
    return None


@behaviour(
    CASES,
    "devices/no_synchronisation",
    "neither forward nor backward makes the host wait for the device",
    quick=True,
)
def _no_synchronisation(session: Session) -> str | None:
    if session.device.type != "cuda":
        return "torch detects it on CUDA devices only"
    case = _call(session)
    tensors: dict[str, Any] = {
        name: tensor.requires_grad_() for name, tensor in case.draw(session.device).tensors.items()
    }
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with session.unwatched():
                out = anyflex.flex_attention(**tensors, backend=session.name)
                if case.gradients:
                    out.backward(torch.ones_like(out))
        except RuntimeError as error:
            session.require("synchroniz" not in str(error), f"the kernel waits: {error}")
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return None
