"""Attention over sequences that are packed into one row, as offsets say."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import anyflex

__all__ = ["Offsets", "packed_attention"]

KEPT = 4
"""Number of steps that are kept. A forward has one for each kind of layer, full and sliding, and
another thread may run one too."""


class Offsets(NamedTuple):
    """Where each sequence's rows and keys are.

    Args:
        q, kv: int [N + 1], where the rows and keys of each sequence begin, and the end of the
            last; kv None: keys are those of the rows.
        max_q, max_kv: no sequence has more; None: they are read from the offsets.
    """

    q: Tensor
    kv: Tensor | None = None
    max_q: int | None = None
    max_kv: int | None = None


def packed_attention(
    module: torch.nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: Offsets,
    score_mod: Any,
    sees: tuple[bool, int | None],
    scaling: float | None,
    sinks: Tensor | None,
    kernel_options: Mapping[str, Any] | None,
) -> Tensor:
    """Return out [1, T, Hq, Ev] of a packed call.

    Args:
        module: the attention layer.
        tensors: query [1, Hq, T, E], key [1, Hkv, S, E], value [1, Hkv, S, Ev]. Rows past the last
            sequence are padding, and have out 0.
        offsets: of the sequences.
        score_mod: of positions in a sequence, or None.
        sees: (causal, window). A sequence's last row is that of its last key; causal, a row sees
            no later keys, and with a window only its last `window` keys. Not causal, a window has
            as many on either side, the row's own included in both.
        scaling, kernel_options: as for `anyflex.flex_attention`.
        sinks: [Hq] or None.

    Raises:
        ArgumentError: more than one row of sequences.
    """
    if tensors[0].shape[0] != 1:
        raise anyflex.ArgumentError(
            "cu_seq_lens_q says whose the rows of one packed row are: query must have batch size "
            f"1, got {tensors[0].shape[0]}; pass an attention_mask for padded batches"
        )
    causal, window = sees
    query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors)
    out = anyflex.flex_attention_packed(
        query,
        key,
        value,
        _step(module, offsets),
        score_mod,
        _mask_mod(causal, window),
        scale=scaling,
        enable_gqa=True,
        sinks=sinks,
        kernel_options=kernel_options,
    )
    return out.contiguous()[None]  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=16)
def _mask_mod(causal: bool, window: int | None) -> Any:
    if window is None:
        return anyflex.masks.causal() if causal else None
    if causal:
        return anyflex.masks.causal_window(window)
    return anyflex.masks.sliding_window(window - 1, window - 1)


class _Begun(NamedTuple):
    """A step, the offsets that it began with, their numbers on a CPU, and the layers that have
    used it."""

    offsets: Offsets
    numbers: list[list[int]]
    layers: set[int]
    step: anyflex.Step


_latest: tuple[_Begun, ...] = ()


def _step(module: torch.nn.Module, offsets: Offsets) -> anyflex.Step:
    """Return the step of this forward, which its layers share.

    All layers of a forward get the same offsets, the same objects. A layer that comes again is in
    another forward, whose offsets may have been written in place since, or be another captured
    graph's: a step begins again. On a CPU other numbers begin one too; reading them elsewhere
    would wait for the device.
    """
    global _latest
    if torch.compiler.is_compiling():
        return _packed(offsets).begin()
    numbers = [
        each.tolist() for each in offsets[:2] if each is not None and each.device.type == "cpu"
    ]
    layer = id(module)
    for begun in _latest:
        same = begun.offsets.q is offsets.q and begun.offsets.kv is offsets.kv
        if not same or (begun.offsets[2:], begun.numbers) != (offsets[2:], numbers):
            continue
        if layer in begun.layers:
            break
        begun.layers.add(layer)
        return begun.step
    step = _packed(offsets).begin()
    _latest = (_Begun(offsets, numbers, {layer}, step), *_latest[: KEPT - 1])
    return step


def _packed(offsets: Offsets) -> anyflex.Packed:
    kv = None if offsets.kv is None else offsets.kv.to(torch.int32)
    max_q, max_kv = offsets[2:]
    return anyflex.Packed(
        offsets.q.to(torch.int32),
        kv_offsets=kv,
        max_q=max_q,
        max_kv=max_q if kv is None else max_kv,
    )
