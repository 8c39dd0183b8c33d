"""Mods of a layer against numbers written out by hand, element by element."""

from __future__ import annotations

import math

import pytest
import torch
from anyflex_vllm.mods import mask_mod, score_mod

import anyflex

LENGTH = 9
PAIRS = [(q, kv) for q in range(LENGTH) for kv in range(LENGTH)]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("causal", "both_sides"), [(True, False), (False, False), (False, True)])
def test_masks(causal: bool, both_sides: bool, window: int | None) -> None:
    mod = mask_mod(causal, window, both_sides)
    if mod is None:
        assert window is None and not causal
        return
    reach = LENGTH if window is None else window
    live = anyflex.create_mask(mod, None, None, LENGTH, LENGTH)[0, 0]
    for q, kv in PAIRS:
        ahead = 0 if causal or not both_sides else reach - 1
        assert bool(live[q, kv]) == (-reach < kv - q <= ahead), (q, kv)


@pytest.mark.parametrize("slopes", [None, [0.5, 0.25]])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("both_sides", [False, True])
def test_scores(slopes: list[float] | None, cap: float | None, both_sides: bool) -> None:
    mod = score_mod(slopes, cap, both_sides)
    if mod is None:
        assert slopes is None and cap is None
        return
    for q, kv in PAIRS:
        for h in range(2):
            indices = (torch.tensor(number) for number in (0, h, q, kv))
            found = float(mod(torch.tensor(3.0), *indices))
            score = 3.0 if cap is None else cap * math.tanh(3.0 / cap)
            distance = -abs(kv - q) if both_sides else kv - q
            score += 0.0 if slopes is None else slopes[h] * distance
            assert found == pytest.approx(score, rel=1e-6)
