"""Compiling a spec ahead of its first call, by small calls that have it.

Some backends compile when a kernel is launched, for a class of calls that the spec doesn't name
(whether tiles divide the lengths, whether there are more tiles than multiprocessors), so a spec is
warmed by calls; on an accelerator, by calls of several lengths.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from anyflex.contract.call import Call, GradInputs, Saved
from anyflex.contract.dropout import Dropout
from anyflex.contract.spec import Spec
from anyflex.errors import BackendRefused, ModIndexError
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.runs import FULL, PARTIAL
from anyflex.registry.forced_backends import names_in_force
from anyflex.registry.freeze_options import freeze_options
from anyflex.runtime.kernel_cache import kernel_for
from anyflex.runtime.launch import launch_backward, launch_forward
from anyflex.runtime.plan import Plan
from anyflex.tensors.tensor_facts import Alignment, architecture

__all__ = ["warm_spec"]

_QUERIES = {"one": (1,), "short": (16,), "long": (256, 250, 4096, 4090)}
_ON_CPU = {"one": (1,), "short": (16,), "long": (256,)}
"""Query rows of the calls by `Spec.q_class`."""
_KEYS = 256
"""Minimum number of keys of a call; 250 where queries aren't whole tiles either."""
_CAPTURED = 2**20
"""Maximum number of elements of a captured tensor."""


def warm_spec(spec: Spec, backend: str) -> None:
    """Compile a spec's kernels, forward and, where it has gradients, backward, for the current
    device, and run them once for each length.

    Args:
        spec: with the backend's own options, as `anyflex cache specs` prints it.
        backend: its name.

    Raises:
        BackendRefused: the device isn't here or is of another architecture, or the spec can't be
            called without its own mods or without huge tensors.
        Everything that a call raises.
    """
    if spec.opaque or spec.index_width == 64:
        reason = (
            "its mods could not be traced"
            if spec.opaque
            else "it is for tensors beyond 2^31 bytes"
        )
        raise BackendRefused(f"no small call has this spec: {reason}", {backend: reason})
    device = _device_of(spec, backend)
    options = freeze_options({backend: dict(spec.options)} if spec.options else None)
    compiled = kernel_for(replace(spec, options=()), names_in_force(backend), backend, options)
    plan = Plan(compiled, device, request="")  # no backward is traced here
    lengths = _ON_CPU if device.type == "cpu" else _QUERIES
    for queries in lengths[spec.q_class]:
        call = _call_of(spec, queries, device)
        try:
            outputs = launch_forward(plan, call, save=spec.needs_backward)
            if spec.needs_backward:
                assert outputs.lse is not None
                saved = Saved(outputs.out, outputs.lse, outputs.saved)
                dlse = torch.zeros_like(outputs.lse) if spec.dlse else None
                launch_backward(plan, call, saved, GradInputs(torch.zeros_like(outputs.out), dlse))
        except ModIndexError:
            # The sample's captured tensors are too small, which the compiled kernel has reported.
            continue
        if device.type != "cpu":
            torch.accelerator.synchronize()


def _device_of(spec: Spec, backend: str) -> torch.device:
    module = getattr(torch, spec.device_type, None)
    if spec.device_type != "cpu" and not (module is not None and module.is_available()):
        reason = f"torch sees no device of type {spec.device_type!r} here"
        raise BackendRefused(f"the spec can't be warmed: {reason}", {backend: reason})
    device = torch.device(spec.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    here = architecture(device)
    if here != spec.arch:
        reason = f"it is for {spec.device_type} {spec.arch}, here is {here}"
        raise BackendRefused(f"the spec can't be warmed: {reason}", {backend: reason})
    return device


def _call_of(spec: Spec, queries: int, device: torch.device) -> Call:
    keys = max(queries, _KEYS) if queries % 16 == 0 or queries == 1 else max(queries, 250)
    batch, key_batch = (2, 1) if spec.kv_broadcast else (1, 1)
    query_memory, key_memory, value_memory = spec.alignment

    def zeros(batch: int, heads: int, length: int, dim: int, memory: Alignment) -> Tensor:
        # Columns of a larger tensor have the layout of a call's tensors of that class.
        first, step, more = {"aligned": (0, 1, 0), "strided": (1, 1, 1), "scattered": (0, 2, dim)}[
            memory
        ]
        shape = batch, heads, length, dim + more
        return torch.zeros(shape, dtype=spec.dtype, device=device)[..., first::step]

    heads = 2
    graphs = (spec.score_graph, spec.mask_graph)
    slots = [graph.number_slots() for graph in graphs if graph is not None]
    mask = None
    if spec.mask_kind == "runs":
        mask = _mask_of(spec, queries, keys, device)
    sinks = None
    if spec.sinks:
        wide = torch.float64 if spec.dtype is torch.float64 else torch.float32
        sinks = torch.zeros(heads * spec.gqa_ratio, dtype=wide, device=device)
    return Call(
        zeros(batch, heads * spec.gqa_ratio, queries, spec.head_dim, query_memory),
        zeros(key_batch, heads, keys, spec.head_dim, key_memory),
        zeros(key_batch, heads, keys, spec.value_head_dim, value_memory),
        mask,
        tuple(
            torch.zeros(
                (math.floor(_CAPTURED ** (1 / max(facts.rank, 2))),) * facts.rank,
                dtype=facts.dtype,
                device=device,
            )
            for facts in spec.captured
        ),
        (1,) * max([ints for ints, _ in slots], default=0),
        (1.0,) * max([floats for _, floats in slots], default=0),
        1 / math.sqrt(spec.head_dim),
        dropout=Dropout(0.5, 0) if spec.dropout else None,
        sinks=sinks,
    )


def _mask_of(spec: Spec, queries: int, keys: int, device: torch.device) -> MaskViews:
    """All blocks in one run a row: PARTIAL where the spec has a mask mod."""
    rows, columns = (
        -(-length // size) for length, size in zip((queries, keys), spec.block_size, strict=True)
    )
    kind = FULL if spec.mask_graph is None else PARTIAL
    offsets = torch.arange(rows + 1, dtype=torch.int32)[None, None]
    runs = torch.tensor([[0, columns, kind]], dtype=torch.int32).expand(rows, 3).contiguous()
    return MaskViews(offsets, runs, queries, keys, spec.block_size).on(device)
