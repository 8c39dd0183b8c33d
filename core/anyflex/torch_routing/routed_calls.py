"""Calls of torch's functions while they are re-routed: to anyflex, or on to torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput

from anyflex.block_mask import create
from anyflex.frontend import attention
from anyflex.torch_routing import originals

__all__ = ["attend", "make_block_mask"]


def attend(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """Call anyflex's flex_attention for a query on a re-routed device, else torch's own. Part of
    the traced half: Dynamo inlines it."""
    arguments = (
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
    )
    if query.device.type not in originals.rerouted:
        return originals.flex_attention(*arguments, return_aux=return_aux)
    found = attention.flex_attention(*arguments, return_aux=return_aux)
    if return_aux is None:
        return found
    out, aux = found
    return out, AuxOutput(aux.lse, aux.max_scores)


def make_block_mask(
    mask_mod: Any, sizes: tuple[Any, Any, Any, Any], device: Any, options: Any
) -> Any:
    """Build torch's BlockMask by anyflex for a re-routed device, without the Q x KV tensor.

    torch's own function makes it where only that can: as part of a compiled graph, and where the
    order of FLASH's deterministic writes is asked for.

    Args:
        sizes: B, H, Q_LEN, KV_LEN.
        device: as torch takes it; None is the current accelerator, or the CPU.
        options: the other arguments, by name.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    if (
        torch.compiler.is_dynamo_compiling()
        or torch.device(device).type not in originals.rerouted
        or options.get("compute_dq_write_order", False)
    ):
        return originals.create_block_mask(mask_mod, *sizes, device, **options)
    mask = create.create_block_mask(mask_mod, *sizes, device, **options).to_torch()
    # A move to another device makes a new function of the mask mod.
    mask.mask_mod = mask_mod
    return mask
