"""Kernel of FlashAttention-4: its forward and backward, filling core's outputs."""

from __future__ import annotations

import importlib
import threading
from functools import lru_cache, partial

import torch
from torch import Tensor

from anyflex import BackendRefused
from anyflex.plugin import Call, GradInputs, Grads, Kernel, Outputs, Saved, Spec
from anyflex_flash4.bands import find_band
from anyflex_flash4.block_lists import follows_once, kinds_of, lists_of
from anyflex_flash4.cute_mods import CuteMods
from anyflex_flash4.mods import call_numbers, table_count

__all__ = ["Flash4Kernel"]

_MOST = 65535
"""Maximum size of a grid of thread blocks in one dimension."""
_NUMBERS_KEPT = 64
"""Maximum number of sets of run-time numbers that stay on the device."""


class Flash4Kernel(Kernel):
    """Calls FlashAttention-4 with the spec's mods.

    It calls ``_flash_attn_fwd`` and ``_flash_attn_bwd`` of flash_attn.cute.interface, as torch's
    flex attention does: the public ``flash_attn_func`` takes neither outputs nor an lse.

    Args:
        spec: what the backend accepted.
        mods: its mods.
        reads: whether the mods read the call's ints, and its floats.
    """

    def __init__(self, spec: Spec, mods: CuteMods, reads: tuple[bool, bool]) -> None:
        interface = importlib.import_module("flash_attn.cute.interface")
        self._forward = interface._flash_attn_fwd
        self._backward = interface._flash_attn_bwd
        self._block_sparse = importlib.import_module(
            "flash_attn.cute.block_sparsity"
        ).BlockSparseTensorsTorch
        self._spec = spec
        self._mods = mods
        self._reads = reads
        # Where heads are grouped, FlashAttention-4's backward gives a score mod other positions
        # than its forward does (seen in 4.0.0b36): each query head gets its own KV head there.
        self._repeats = spec.gqa_ratio > 1 and mods.score_mod is not None
        self._always_lists = dict(spec.options).get("masks") == "lists"
        self._band_of = lru_cache(_NUMBERS_KEPT)(partial(find_band, spec.mask_graph))
        self._asks_structure = table_count(spec) > len(spec.captured)
        self._number_tensor = lru_cache(_NUMBERS_KEPT)(_number_tensor)
        # FlashAttention-4 looks into its compile caches without a lock.
        self._lock = threading.Lock()

    def describe(self, call: Call) -> str:
        return f"flash-attn-4 {self._masks_as(call)}"

    def forward(self, call: Call, out: Outputs) -> None:
        if _is_empty(call):
            out.out.zero_()
            if out.lse is not None:
                out.lse.fill_(-torch.inf)
            return
        masks = self._mask_arguments(call, backward=False)
        tensors = self._tensors(call, masks)
        with torch.no_grad(), self._lock:
            self._forward(
                _rows_first(call.query),
                _rows_first(call.key),
                _rows_first(call.value),
                softmax_scale=call.scale,
                score_mod=self._mods.score_mod,
                aux_tensors=tensors,
                out=_rows_first(out.out),
                lse=out.lse,
                **masks,
            )

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        targets = (grads.dq, grads.dk, grads.dv)
        if _is_empty(call):
            for target in targets:
                if target is not None:
                    target.zero_()
            return
        masks = self._mask_arguments(call, backward=True)
        tensors = self._tensors(call, masks)
        dout = grad.dout
        dead = saved.lse == -torch.inf
        # Gradients that arrive at a row without a live key are dropped.
        dout = dout.masked_fill(dead.unsqueeze(-1), 0)
        dlse = None if grad.dlse is None else grad.dlse.masked_fill(dead, 0).float()
        out = saved.out
        if grad.delta is not None:
            # It computes delta from out and dout, and subtracts dlse from it: with an out of 0,
            # delta can be passed that way.
            delta = grad.delta.masked_fill(dead, 0).float()
            dlse = -delta if dlse is None else dlse - delta
            out = torch.zeros_like(dout, memory_format=torch.contiguous_format)
        key, value = call.key.detach(), call.value.detach()
        results = list(targets)
        if self._repeats:
            ratio = self._spec.gqa_ratio
            key, value = (each.repeat_interleave(ratio, 1) for each in (key, value))
            for place, like in ((1, key), (2, value)):
                if targets[place] is not None:
                    results[place] = torch.empty_like(like)
        with torch.no_grad(), self._lock:
            self._backward(
                _rows_first(call.query),
                _rows_first(key),
                _rows_first(value),
                _rows_first(out),
                _rows_first(dout),
                saved.lse.contiguous(),
                softmax_scale=call.scale,
                score_mod=self._mods.score_mod,
                score_mod_bwd=self._mods.score_mod_bwd,
                aux_tensors=tensors,
                dlse=None if dlse is None else dlse.contiguous(),
                **{
                    name: None if target is None else _rows_first(target)
                    for name, target in zip(("dq", "dk", "dv"), results, strict=True)
                },
                **masks,
            )
        for target, found in zip(targets, results, strict=True):
            if target is not None and found is not None and found is not target:
                batch, heads, length, width = target.shape
                each = found.view(batch, heads, -1, length, width)
                target.copy_(each.sum(2, dtype=torch.float32))

    def _masks_as(self, call: Call) -> str:
        if call.mask is None:
            return "full"
        return "lists" if self._band_arguments(call) is None else "band"

    def _band_arguments(self, call: Call) -> dict[str, object] | None:
        """The mask as FlashAttention-4's own arguments, or None where it isn't one of those.

        Its diagonal ends in the last corner, which is ours for as many keys as queries.
        """
        if self._always_lists or call.query.shape[2] != call.key.shape[2]:
            return None
        band = self._band_of(call.ints)
        arguments = None if band is None else band.arguments()
        if band is None or arguments is None or call.mask is None:
            return None
        return arguments if follows_once(call.mask, band) else None

    def _mask_arguments(self, call: Call, *, backward: bool) -> dict[str, object]:
        if call.mask is None:
            return {}
        band = self._band_arguments(call)
        if band is not None:
            return band
        sparse = self._block_sparse(**lists_of(call.mask, backward=backward))
        return {"mask_mod": self._mods.mask_mod, "block_sparse_tensors": sparse}

    def _tensors(self, call: Call, masks: dict[str, object]) -> list[Tensor] | None:
        """Tensors that the mods read: captured tensors flattened, the mask's own blocks where they
        are used, then ints, then floats."""
        if any(call.index_offsets):
            raise BackendRefused("cuda.flash4 takes no index offsets")
        if max(call.query.shape[:2]) > _MOST:
            raise BackendRefused(f"FlashAttention-4 takes up to {_MOST} batches, and heads")
        if self._mods.score_mod is None and "mask_mod" not in masks:
            return None
        tensors = [_flat(table) for table in call.captured]
        structure: tuple[int, ...] = ()
        if self._asks_structure:
            # A band doesn't use the blocks, but a score mod of the call counts on the same
            # positions.
            assert call.mask is not None
            kinds, structure = kinds_of(call.mask)
            tensors.append(kinds)
        ints, floats = call_numbers(call, structure)
        for read, numbers, dtype in zip(
            self._reads, (ints, floats), (torch.int32, torch.float32), strict=True
        ):
            if read:
                texts = tuple(map(repr, numbers))
                tensors.append(self._number_tensor(texts, dtype, call.query.device))
        return tensors or None


def _number_tensor(texts: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers, given as text, which tells -0.0 from 0.0."""
    numbers = torch.tensor([float(text) for text in texts], dtype=torch.float64, device="cpu")
    return numbers.to(dtype).to(device)


def _is_empty(call: Call) -> bool:
    return call.query.numel() == 0 or call.key.numel() == 0


def _rows_first(tensor: Tensor) -> Tensor:
    """[B, H, L, E] as FlashAttention-4's [B, L, H, E]."""
    return tensor.detach().transpose(1, 2)


def _flat(table: Tensor) -> Tensor:
    """Return a captured tensor in a readable form: rank 1, not empty, bools as bytes."""
    table = table.detach().contiguous().view(-1)
    if table.numel() == 0:
        table = table.new_zeros(1)
    return table.view(torch.uint8) if table.dtype is torch.bool else table
