"""Implementation of the static op of packed calls, for when a program runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.mask_function import RebuiltMaskMod
from anyflex.frontend.aux_outputs import AuxRequest
from anyflex.frontend.checked_call import CheckedCall
from anyflex.packed.arguments import check_shapes
from anyflex.packed.core_layout import in_core_layout
from anyflex.packed.own_layout import in_own_layout
from anyflex.packed.packed import Packed, Step
from anyflex.packed.packed_request import read_packed_request
from anyflex.packed.rebuilt_score_mod import RebuiltScoreMod
from anyflex.tracing.trace import TracedMod

__all__ = ["attend"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    ints: list[int],
    text: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the static op's call as an eager one. Raises as `flex_attention_packed` does."""
    request = read_packed_request(text)
    count, max_q, max_kv, lowest, highest, *numbers = ints
    end = 7 if request.scaled else 5
    captured = tensors[end : end + count]
    scale, *floats = [number.item() for number in tensors[end + count :]]
    of_score, ints_of_score, floats_of_score = request.slots
    score_mod = mask_mod = None
    if request.score:
        score_mod = RebuiltScoreMod(
            TracedMod(
                request.score,
                captured[:of_score],
                numbers[:ints_of_score],
                floats[:floats_of_score],
                [""] * of_score,
            )
        )
    if request.mask:
        read = captured[of_score:]
        mask_mod = RebuiltMaskMod(
            TracedMod(
                request.mask,
                read,
                numbers[ints_of_score:],
                floats[floats_of_score:],
                [""] * len(read),
            )
        )
    known = None if lowest > highest else (lowest, highest)
    step = _step(tensors[:5], (max_q, max_kv, request.paged, known))
    if len(captured) > of_score:
        # A program may write other numbers into memory that the mask mod read before.
        step = Step(step.packed)
    if query.device.type == "cpu":
        # There were no numbers to look at when the program was recorded.
        held = key.shape if request.paged else _as_rows(key).shape
        shapes = _as_rows(query).shape, held, (*held[:-1], value.shape[-1])
        step.once(("fits", shapes), check_shapes, step.packed, *shapes)
    scales = (tensors[5], tensors[6]) if request.scaled else (None, None)
    aux = AuxRequest(request.lse, request.max_scores)
    checked = CheckedCall(
        query, key, value, score_mod, None, scale, aux, request.options, request.backend, 0.0,
        None, request.batch_invariant,
    )  # fmt: skip
    own = in_own_layout(checked, step, mask_mod, True, scales)
    if own is not None:
        out, lse, max_scores = own.out, own.lse, own.max_scores
    else:
        out, (lse, max_scores) = in_core_layout(
            _as_rows(query),
            key if request.paged else _as_rows(key),
            value if request.paged else _as_rows(value),
            step,
            score_mod,
            mask_mod,
            scales,
            aux=aux,
            scale=scale,
            enable_gqa=True,
            sinks=None,
            kernel_options=_thawed(request.options),
            backend=request.backend,
            batch_invariant=request.batch_invariant,
        )
    nothing = query.new_empty(0, dtype=torch.float32)
    return (
        out,
        nothing if lse is None else lse,
        nothing.clone() if max_scores is None else max_scores,
    )


def _thawed(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Return ``kernel_options`` of `freeze_options`' pairs."""
    return {
        name: dict(option) if isinstance(option, tuple) else option for name, option in options
    }


def _as_rows(batch: Tensor) -> Tensor:
    """Return a batch of one, [1, H, T, D], as rows [T, H, D]."""
    return batch.squeeze(0).transpose(0, 1)


_last: tuple[tuple[Any, ...], list[Tensor], Step] | None = None
"""Step of the last call on a CPU, with its facts and numbers, which layers share. In one tuple:
another thread may be calling."""


def _step(rows: list[Tensor], facts: tuple[Any, ...]) -> Step:
    """Return a step over these sequences."""
    global _last
    last = _last
    on_cpu = rows[0].device.type == "cpu"
    if on_cpu and last is not None and last[0] == facts and all(map(torch.equal, rows, last[1])):
        return last[2]
    if on_cpu:  # a program writes its buffers again
        rows = [each.clone() for each in rows]
    max_q, max_kv, paged, known = facts
    q_offsets, q_starts, kv_lengths, slots, keys_at = rows
    packed = Packed(
        q_offsets,
        kv_lengths,
        kv_offsets=None if paged else keys_at,
        page_table=keys_at if paged else None,
        slots=slots,
        q_starts=q_starts,
        max_q=max_q,
        max_kv=max_kv,
    )
    packed.known = known
    step = packed.begin()
    if on_cpu:
        _last = facts, rows, step
    return step
