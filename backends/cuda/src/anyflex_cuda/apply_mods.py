"""Score mod and mask mod applied to a step's scores, and weights recomputed in backward, in any
layout."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_triton.device_functions import LOG2E

__all__ = ["scores_of_step", "weights_of"]

# Argument lists would be a line an argument.
# fmt: off


@gluon.jit
def one_sum(x):
    """Return x, and hide from compilers that it is a sum: they would add its terms to each column
    one by one."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def scores_of_step(
    raw, first, end, full, masked, inputs, kv_length, mods, MASKED: gl.constexpr,
    EVEN: gl.constexpr, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """Return the scores of a step whose products are `raw`, [rows, BLOCK_N] in LAYOUT, with -inf
    at dead pairs. Their unit is `unit_of_scores`.

    Args:
        first, end: range of the step's keys. full: whether the mask mod holds for all pairs, or
            None, where it is always evaluated. Used where needed.
        inputs: `ModInputs`; q_idx is [rows, 1]. mods: `StepMods`.
        masked: where MASKED, whether some pair may be dead.
    """
    scores = raw
    if MASKED or mods.SCORE_MOD is not None:
        columns = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT)), 0)
        shifted = one_sum(first + mods.shifts[3])
        if MASKED and not EVEN:
            keys = columns + first
            kv_idx = gl.minimum(keys, kv_length - 1) + mods.shifts[3]
        else:
            kv_idx = columns + shifted
    if mods.SCORE_MOD is not None:
        scores = mods.SCORE_MOD(
            scores * mods.scale, inputs.b, inputs.h, inputs.q_idx, kv_idx, inputs.tables,
            mods.ints, mods.floats,
        )
    if MASKED:  # noqa: SIM102  the other is known at run time alone
        if masked:
            if mods.MASK_SCORES is not None:
                scores = mods.MASK_SCORES(
                    scores, full, shifted, columns, inputs.b, inputs.h, inputs.q_idx, kv_idx,
                    inputs.tables, mods.ints, mods.floats,
                )
            if not EVEN:
                scores = gl.where(keys < end, scores, float("-inf"))
    return scores


@gluon.jit
def weights_of(
    raw, lse2, rows, keys, full, inputs, q_length, kv_length, mods, gradients,
    MASKED: gl.constexpr, RAGGED: gl.constexpr,
):
    """Return (weights, weights times the score mod's derivative, scores as the mod gets them) of
    raw products. The first two are 0 at dead pairs.

    The derivative is linear in the incoming gradient, so it is applied to the weights here; the
    remaining factor, dweights - delta, is multiplied later. So raw products needn't be kept until
    then, unless captured tensors' gradients depend on them.

    Args:
        lse2, rows, keys: the pairs' lse2, query rows and keys; they broadcast with raw.
        inputs, mods, gradients: `ModInputs`, `Mods`, `ModGradients` of
            `anyflex_triton.kernel_records`.
    """
    if mods.SCORE_MOD is not None:
        raw = raw * mods.scale
        scores = mods.SCORE_MOD(
            raw, inputs.b, inputs.h, inputs.q_idx, inputs.kv_idx, inputs.tables, mods.ints,
            mods.floats,
        )
        unit = LOG2E
    else:
        scores = raw
        unit = mods.scale * LOG2E
    if MASKED:
        dead = float("-inf")
        if mods.MASK_MOD is not None:
            live = mods.MASK_MOD(
                inputs.b, inputs.h, inputs.q_idx, inputs.kv_idx, inputs.tables, mods.ints,
                mods.floats,
            )
            if RAGGED:
                live = live | full
            scores = gl.where(live, scores, dead)
        if RAGGED:
            scores = gl.where(keys < kv_length, scores, dead)
            if mods.SCORE_MOD is not None:
                scores = gl.where(rows < q_length, scores, dead)
    weights = gl.exp2(scores * unit - lse2)
    factor = weights
    if gradients.SCORE_MOD_BACKWARD is not None:
        factor = gradients.SCORE_MOD_BACKWARD(
            weights, raw, inputs.b, inputs.h, inputs.q_idx, inputs.kv_idx, inputs.tables,
            mods.ints, mods.floats,
        )
        if MASKED:
            # The mod's derivative is arbitrary at dead pairs.
            factor = gl.where(scores != float("-inf"), factor, 0.0)
    return weights, factor, raw
