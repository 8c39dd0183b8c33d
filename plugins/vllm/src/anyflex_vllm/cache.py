"""Writes of new keys and values to vLLM's paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["write_cache"]


def write_cache(kv_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write tokens to their slots.

    Args:
        kv_cache: [blocks, Hkv, block, E + Ev], any strides; keys lie before values.
        key, value: [at least T, Hkv, E], [at least T, Hkv, Ev].
        slot_mapping: int64 [T]; slot s is row ``s % block`` of block ``s // block``. Padding has
            slot -1.
    """
    tokens, block = slot_mapping.shape[0], kv_cache.shape[2]
    rows = torch.cat([key[:tokens], value[:tokens]], -1)
    # Padding writes zeros to block 0, which vLLM gives to no request: asking which tokens are
    # padding would wait for the device.
    rows = rows.masked_fill((slot_mapping < 0)[:, None, None], 0)
    slots = slot_mapping.clamp(min=0)
    kv_cache.transpose(1, 2)[slots // block, slots % block] = rows
