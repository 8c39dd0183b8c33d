"""Weights of a step recomputed in backward, in any layout."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_triton.device_functions import LOG2E

__all__ = ["weights_of"]

# Argument lists would be a line an argument.
# fmt: off


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
