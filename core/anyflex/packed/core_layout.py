"""Packed calls by dense kernels: pages collected, indices relabelled, one dense call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.create import create_block_mask
from anyflex.errors import GraphCaptureError, ModTraceError
from anyflex.frontend.attention import flex_attention
from anyflex.frontend.aux_outputs import AuxOutput, AuxRequest
from anyflex.packed.packed import Step
from anyflex.packed.pages import PageRows
from anyflex.packed.row_tables import (
    RowTables,
    relabelled_mask,
    relabelled_score,
    row_tables,
)
from anyflex.runtime.kernel_cache import is_capturing
from anyflex.tensors.dynamo_disabled import in_graph
from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.tensor_facts import q_class
from anyflex.tracing.mod_types import MaskMod, ScoreMod
from anyflex.tracing.trace_cache import traced

__all__ = ["as_batch", "in_core_layout"]


def in_core_layout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Step,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scales: tuple[Tensor | None, Tensor | None],
    *,
    aux: AuxRequest,
    scale: float | None,
    enable_gqa: bool,
    sinks: Tensor | None,
    kernel_options: Mapping[str, Any] | None,
    backend: str | None,
    batch_invariant: bool,
) -> tuple[Tensor, AuxOutput]:
    """Compute a checked packed call by one dense call of batch 1, and return what that gives.

    Args:
        query, key, value, step, score_mod, mask_mod, scale, enable_gqa, sinks, kernel_options,
            backend: as for `flex_attention_packed`.
        scales: of key and value.
        aux: auxiliary outputs that are asked for.

    Raises:
        BackendRefused: batch invariance is asked for, which a dense call of all rows hasn't.
        GraphCaptureError: a device graph is being captured.
    """
    packed = step.packed
    if not in_graph() and is_capturing(packed.device.type):
        raise GraphCaptureError(
            "flex_attention_packed: a device graph is being captured, and no backend takes this "
            "call's packed sequences as they are: the blocks of a dense call's mask would be "
            "found on the host. Capture calls without gradients, outside of autocast, with "
            "sequences and keys, on a backend that declares packed sequences, or leave this call "
            "out of the graph."
        )
    if batch_invariant and 0 not in (packed.sequences, *key.shape):
        fail(
            "BackendRefused",
            "batch_invariant=True needs a kernel that takes packed sequences as they are, and "
            "none takes this call: call it under torch.no_grad(), outside of autocast, with "
            "plain tensors, mods that can be traced, and key and value stored alike.",
            reasons={"reference": "batch_invariant=True is not supported"},
        )
    k_scale, v_scale = scales
    if packed.page_table is None:
        begins, keys = packed.kv_offsets[:-1], key.shape[0]
    else:
        form = key.shape[0], key.shape[2]
        rows = step.keep(("pages", *form), PageRows, packed, *form)
        begins, keys = rows.begins, rows.keys
        key, value = rows.collect(key), rows.collect(value)
        k_scale, v_scale = (
            rows.collect(given) if given is not None and given.dim() == 3 else given
            for given in (k_scale, v_scale)
        )
    key, value = _scaled(key, k_scale, query.dtype), _scaled(value, v_scale, query.dtype)
    length = query.shape[0]
    tables = step.keep(("tables", length, keys), row_tables, packed, length, begins, keys)
    out, more = flex_attention(
        as_batch(query),
        as_batch(key),
        as_batch(value),
        None if score_mod is None else relabelled_score(score_mod, tables),
        _block_mask(step, mask_mod, tables, (query.shape[1], length, keys)),
        scale,
        enable_gqa,
        kernel_options=kernel_options,
        return_aux=aux,
        sinks=sinks,
        backend=backend,
    )
    return out, more


def as_batch(rows: Tensor) -> Tensor:
    """Return rows [T, H, D] as a batch of one, [1, H, T, D]."""
    return rows.unsqueeze(0).transpose(1, 2)


def _scaled(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return stored numbers times their scale: one rounding, from float32 to `dtype`."""
    if scale is None:
        return stored
    if scale.dim() == 1:
        scale = scale[:, None]
    elif scale.dim() == 2:
        scale = scale[..., None]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return (stored.to(wide) * scale.to(wide)).to(dtype)


def _block_mask(
    step: Step, mask_mod: MaskMod | None, tables: RowTables, sizes: tuple[int, int, int]
) -> Any:
    """Return the block mask of the dense call, built once a step for each mask.

    Args:
        sizes: Hq, T and S.
    """
    heads, rows, keys = sizes
    # A block of more rows than a sequence has would mix sequences, and be asked everywhere. Few
    # rows have small blocks anyway: kernels are compiled for a class of rows and a block size.
    most = min(step.packed.max_q, 128) if in_graph() or q_class(rows) == "long" else 16
    q_block = 16
    while q_block < most:
        q_block *= 2
    key: tuple[Any, ...] = ("mask", *sizes)
    known: Any = mask_mod
    if mask_mod is not None and not in_graph():
        # Layers whose mask mods say the same share one mask, whatever function objects they are.
        try:
            known = traced(mask_mod, "mask", torch.float32, step.packed.device)
            key += known.text, *map(id, known.captured), *known.ints, *known.floats
        except ModTraceError as error:
            if not error.pure:
                raise
            key += (id(mask_mod),)

    def build() -> tuple[Any, Any]:
        relabelled = relabelled_mask(mask_mod, tables)
        device = step.packed.device
        # The mod goes along: ids in the key are its own as long as it lives.
        return create_block_mask(
            relabelled, None, heads, rows, keys, device, (q_block, 128)
        ), known

    return step.keep(key, build)[0]
