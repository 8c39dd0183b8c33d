"""Masks of a forward, as transformers asks for them: once for all layers of a kind."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

import anyflex
from anyflex_transformers.carrier import Carrier
from anyflex_transformers.packed import keeps_documents_apart, without_positions

__all__ = ["MASKS_TAKE_POSITIONS", "causal_mask", "mask", "mask_at_positions"]

MASKS_TAKE_POSITIONS = "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters
"""Whether this transformers calls mask functions with cache_position, as before 5.4."""
MaskFunction = Callable[..., Any]
"""transformers' mask function, ``f(b, h, q_idx, kv_idx)`` of positions in the whole sequence."""


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    dtype: torch.dtype | None = None,
    config: object = None,
    device: torch.device | str = "cpu",
) -> Carrier | Tensor | None:
    """Return what `attention` gets as attention_mask; arguments are those of transformers.

    One query row needs no blocks: its mask is None where every key is live, the number of live
    keys where those are the first of a static cache, else the dense row. More rows have a block
    mask; while torch.compile or torch.export traces the model, it is an operation of the graph.
    """
    tracing = torch.compiler.is_compiling()
    length = kv_length + kv_offset
    padding = _padding(attention_mask, length, q_offset + q_length, mask_function, tracing)
    local = local_size is not None and kv_length >= local_size
    if padding is None and allow_is_bidirectional_skip and not local:
        return None
    row = q_length == 1
    causal = mask_function is masking_utils.causal_mask_function
    plain = row and padding is None and not local
    if plain and allow_is_causal_skip and not tracing and int(q_offset) + 1 == length:
        return None
    shape = batch_size, 1, q_length, kv_length
    if plain and causal and isinstance(q_offset, Tensor):
        # A tensor of its own: the cache increments its one in place, before attention is called.
        seen = (q_offset + (1 - kv_offset)).view(())
        # Only a device that was waited for just now, for `_padding`, is waited for again.
        waited = attention_mask is not None or seen.device.type == "cpu"
        count = int(seen) if waited and not tracing else None
        return Carrier(None, shape, seen, count)
    positions = _Positions(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    if row:
        return positions.dense(mask_function, padding, vmap=use_vmap)
    if tracing:
        # A cache increments its tensor in place, before the function is called.
        q_offset = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset
        function = _of_rows(mask_function, padding, q_offset, kv_offset)
        in_graph = anyflex.create_block_mask(
            function, batch_size, None, q_length, kv_length, device
        )
        # Dynamo reads no closure of a function that was made in the graph: it isn't looked for.
        return Carrier(in_graph, shape, documents=True)
    first = int(q_offset)
    if padding is None and causal:
        return causal_mask(batch_size, q_length, kv_length, first - kv_offset, device)
    function = _of_rows(without_positions(mask_function), padding, first, kv_offset)
    sizes = (batch_size, None, q_length, kv_length, device)
    try:
        built = anyflex.create_block_mask(function, *sizes)
    except anyflex.ModTraceError as error:
        built = None
        problem = str(error)
    if built is None or built.opaque is not None:
        problem = problem if built is None else "it holds operations that mod graphs don't know"
        warnings.warn(
            "a mask function can't be traced, so that its mask is made densely, "
            f"{q_length} x {kv_length}: {problem}",
            anyflex.PerformanceWarning,
            stacklevel=2,
        )
        function = _of_tensor(positions.dense(mask_function, padding, vmap=True))
        built = anyflex.create_block_mask(function, *sizes)
    return Carrier(built, shape, documents=keeps_documents_apart(mask_function))


def mask_at_positions(
    batch_size: int,
    cache_position: Tensor,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Carrier | Tensor | None:
    """Return the same as `mask`, for versions of transformers that give the rows' positions."""
    return mask(
        batch_size,
        cache_position.shape[0],
        kv_length,
        cache_position[0],
        kv_offset,
        mask_function,
        attention_mask,
        device=cache_position.device,
        **options,
    )


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> Carrier:
    """Return the causal mask whose first row sees `offset` keys and the one of its own place."""
    shape = (batch_size, 1, q_length, kv_length)
    if torch.compiler.is_compiling():
        return Carrier(_causal_blocks(q_length, kv_length, offset, device), shape)
    with torch.inference_mode(False):
        return Carrier(_kept_causal_blocks(q_length, kv_length, offset, str(device)), shape)


def _causal_blocks(
    q_length: int, kv_length: int, offset: int, device: torch.device | str
) -> anyflex.BlockMask:
    causal = anyflex.masks.causal(offset)
    return anyflex.create_block_mask(causal, None, None, q_length, kv_length, device)


# A model whose layers get no mask asks once a layer, and training once a step.
_kept_causal_blocks = functools.lru_cache(maxsize=16)(_causal_blocks)


def _padding(
    attention_mask: Tensor | None,
    length: int,
    end: int | Tensor,
    function: MaskFunction,
    tracing: bool,
) -> Tensor | None:
    """Return the mask of tokens, bool [B, at least `length`], or None if it excludes nothing.

    Args:
        attention_mask: a shorter one excludes the keys that it lacks.
        length: number of keys. end: position after the last row.
    """
    if attention_mask is None:
        return None
    given = attention_mask.shape[-1]
    short = length - given
    if short <= 0:
        if not tracing and bool(attention_mask.all()):
            return None
        return attention_mask
    # Rows that see no key past their own see none of a static cache that nothing fills yet.
    if not tracing and function is masking_utils.causal_mask_function:
        every = attention_mask.all() & (end <= given)
        if bool(every):
            return None
    return torch.nn.functional.pad(attention_mask, (0, short))


def _of_rows(
    function: MaskFunction, padding: Tensor | None, q_offset: int | Tensor, kv_offset: int
) -> MaskFunction:
    """Return the mask mod of a forward's rows and keys, which count from 0."""

    def of_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        key = kv_idx + kv_offset
        live = function(b, h, q_idx + q_offset, key)
        return live if padding is None else live & padding[b, key]

    return of_rows


def _of_tensor(dense: Tensor) -> MaskFunction:
    def of_tensor(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return dense[b, 0, q_idx, kv_idx]

    return of_tensor


class _Positions:
    """Sizes and positions of a forward, for transformers' dense masks."""

    def __init__(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor,
        kv_offset: int,
        device: torch.device | str,
    ) -> None:
        self.arguments: dict[str, Any] = {
            "batch_size": batch_size,
            "kv_length": kv_length,
            "kv_offset": kv_offset,
            "allow_is_causal_skip": False,
        }
        if MASKS_TAKE_POSITIONS:
            self.arguments["cache_position"] = q_offset + torch.arange(q_length, device=device)
        else:
            rows = {"q_length": q_length, "q_offset": q_offset, "device": device}
            self.arguments |= rows

    def dense(self, function: MaskFunction, padding: Tensor | None, *, vmap: bool) -> Tensor:
        """Return the mask as bool [B, 1, Q_LEN, KV_LEN]."""
        options = {} if MASKS_TAKE_POSITIONS else {"use_vmap": vmap}
        made: Tensor = masking_utils.sdpa_mask(
            mask_function=function, attention_mask=padding, **self.arguments, **options
        )
        return made
