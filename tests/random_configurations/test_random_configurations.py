"""anyflex agrees with both oracles, in float64, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

import anyflex
from anyflex.testing.oracle import dense_mask
from anyflex.testing.results import Forward, Results
from tests.oracles.differences import differences
from tests.oracles.runs import dense_to_runs
from tests.oracles.torch_flex import NotTaken
from tests.random_configurations.case import (
    Case,
    dense_results,
    make_case,
    torch_results,
    with_gradients,
)
from tests.random_configurations.configuration import Configuration

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("float64_numbers")


def test_random_configuration(configuration: Configuration, oracle_counts: Counter[str]) -> None:
    case = make_case(configuration)
    found = anyflex_results(case)

    wanted = dense_results(case)
    asked = ("out", *configuration.aux)
    expected = Results(
        Forward(**{name: getattr(wanted.forward, name) for name in asked}), wanted.grads
    )
    smooth = case.score is None or case.score.entry.smooth
    loose = () if smooth else tuple(wanted.grads)
    assert differences(found, expected, may_be_nan=loose) == []
    oracle_counts["(a) dense formula"] += 1

    try:
        by_torch, reason = torch_results(case)
    except NotTaken as not_taken:
        oracle_counts[f"(b) not taken: {not_taken}"] += 1
        return
    grads = {} if reason else by_torch.grads
    expected = Results(Forward(**{name: getattr(by_torch.forward, name) for name in asked}), grads)
    # torch sums NaN weights of dead pairs into the gradients; anyflex may leave them out.
    found = found if smooth else _nan_where(found, expected)
    assert differences(found, expected) == []
    oracle_counts[f"(b) torch, outputs only: {reason}" if reason else "(b) torch"] += 1


def anyflex_results(case: Case) -> Results:
    """The call as a user makes it."""
    c = case.configuration
    query, key, value = (tensor for tensor in (case.query, case.key, case.value))
    score_mod = case.score.function(c.score_form) if case.score is not None else None
    arguments: dict[str, Any] = {
        "block_mask": make_block_mask(case),
        "scale": c.scale,
        "enable_gqa": c.sizes.group > 1,
    }
    if c.aux:
        request = dict.fromkeys(c.aux, True)
        arguments["return_aux"] = anyflex.AuxRequest(**request)
    with poisoned() if c.poisoned else nothing():
        result = anyflex.flex_attention(query, key, value, score_mod, **arguments)
        if c.aux:
            out, aux = result
            forward = Forward(out, aux.lse, aux.max_scores)
            assert (aux.lse is not None) == ("lse" in c.aux)
            assert (aux.max_scores is not None) == ("max_scores" in c.aux)
        else:
            forward = Forward(result)
        return with_gradients(case, forward, case.score, missing_is_zero=False)


def make_block_mask(case: Case) -> Any:
    """The block mask by the configuration's way of making one."""
    c = case.configuration
    if case.mask is None:
        return None
    mask_mod = case.mask.function(c.mask_form)
    sizes = (c.mask_batch, c.mask_heads, c.sizes.q_length, c.sizes.kv_length)
    if c.origin == "from_runs":
        offsets, runs = dense_to_runs(dense_mask(case.mask.function(), *sizes), c.block_size)
        return anyflex.BlockMask.from_runs(
            offsets, runs, seq_lengths=sizes[2:], block_size=c.block_size, mask_mod=mask_mod
        )
    if c.origin == "built" or not c.sizes.q_length or not c.sizes.kv_length:
        return anyflex.create_block_mask(mask_mod, *sizes, BLOCK_SIZE=c.block_size)
    mask = torch_flex.create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=c.block_size)
    return mask if c.origin == "torch_mask" else anyflex.BlockMask.from_torch(mask)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN, which reveals reads of unwritten memory."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def _nan_where(found: Results, expected: Results) -> Results:
    grads = {
        name: torch.where(expected.grads[name].isnan(), expected.grads[name], grad)
        if name in expected.grads
        else grad
        for name, grad in found.grads.items()
    }
    return Results(found.forward, grads)
