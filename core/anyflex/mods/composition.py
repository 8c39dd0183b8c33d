"""Score mods one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anyflex.mods.factory_arguments import check_mods
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["compose"]


def compose(*score_mods: ScoreMod) -> ScoreMod:
    """Return the score mod that applies `score_mods` in order, each to the result of the one
    before.

    Without any, scores are unchanged.

    Raises:
        ArgumentTypeError: an argument that is not callable; names its position.
        ModTraceError: one that takes other arguments; names its position.
    """
    check_mods("compose", score_mods, "score")

    def composed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return composed
