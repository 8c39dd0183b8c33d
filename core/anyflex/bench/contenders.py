"""Contenders: installed backends, through `anyflex.flex_attention`, and peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

import anyflex
from anyflex.bench.case import BenchCase, Inputs
from anyflex.bench.peers import Attend, Contender, peers
from anyflex.bench.usage_errors import NotRun, WrongUsage
from anyflex.registry import backend_table

__all__ = ["Attend", "Contender", "chosen_contenders"]

_OF_PEERS = -50
"""Backends with at most this priority are installed to be compared with. A priority little below 0
only means that the backend stands behind better ones."""


def chosen_contenders(
    device: torch.device,
    wanted: Sequence[str] = (),
    options: Sequence[tuple[str, object]] = (),
) -> list[Contender]:
    """Return the contenders on `device`.

    Args:
        wanted: names; empty for every usable backend of the device's type and every peer. The
            reference is measured only if it is named, or if there is no other backend.
        options: of a backend that is measured, kernel_options with which it is measured too, as a
            contender after it.

    Raises:
        WrongUsage: an unknown name, or one of another device type; options of somebody else, or
            none.
        NotRun: a named backend can't be used here.
    """
    backends = {}
    unusable = {}
    for entry in backend_table.current().every():
        if entry.device_type not in (device.type, "*"):
            continue
        state = entry.state()
        if state.backend is None or state.kind != "usable":
            unusable[entry.name] = state.reason
            continue
        compared_with = state.backend.priority <= _OF_PEERS and entry.device_type != "*"
        kind: Literal["backend", "peer"] = "peer" if compared_with else "backend"
        backends[entry.name] = Contender(
            entry.name, kind, entry.distribution, _nothing_refused, _through_anyflex(entry.name)
        )
    others = {peer.name: peer for peer in peers(device)}
    known = {**backends, **others}
    if not wanted:
        # The reference takes seconds for calls that others finish in milliseconds.
        left_out = {"reference"} if len(backends) > 1 else set()
        wanted = [name for name in known if name not in left_out]
    for name in wanted:
        if name in unusable:
            raise NotRun(f"--backend {name}: it can't be used here: {unusable[name]}")
        if name not in known:
            raise WrongUsage(
                f"--backend {name}: there is none on {device.type}; known: {', '.join(known)}"
            )
    chosen = {name: [known[name]] for name in wanted}
    for name, given in options:
        if name not in backends or name not in chosen:
            measured = ", ".join(each for each in chosen if each in backends)
            raise WrongUsage(
                f"--option {name}={given}: must begin with a backend that is measured: "
                f"{measured or 'none is'}"
            )
        if not isinstance(given, dict) or not given:
            raise WrongUsage(
                f"--option {name}={given}: must be BACKEND={{NAME: VALUE}}, names and values as "
                f"Python writes them, for example '{name}={{\"block_m\": 64}}'"
            )
        told = " ".join([name, *(f"{key}={value!r}" for key, value in given.items())])
        if all(told != each.name for each in chosen[name]):
            prepare = _through_anyflex(name, given)
            chosen[name].append(dataclasses.replace(backends[name], name=told, prepare=prepare))
    return [each for contenders in chosen.values() for each in contenders]


def _nothing_refused(case: BenchCase) -> str | None:
    return None


def _through_anyflex(
    name: str, options: Mapping[str, object] | None = None
) -> Callable[[Inputs], Attend]:
    def prepare(inputs: Inputs) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = anyflex.flex_attention(
                query,
                key,
                value,
                inputs.score_mod,
                inputs.block_mask,
                enable_gqa=inputs.case.gqa,
                backend=name,
                kernel_options=None if options is None else {name: options},
            )
            return out

        return attend

    return prepare
