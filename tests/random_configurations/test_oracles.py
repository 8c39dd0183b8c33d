"""The list of configurations has its documented properties, and the two oracles agree on it."""

from __future__ import annotations

from collections import Counter

import pytest

from anyflex.testing.mods import MASK_MODS, SCORE_MODS
from tests.oracles.differences import differences
from tests.oracles.torch_flex import NotTaken
from tests.random_configurations.case import dense_results, make_case, torch_results
from tests.random_configurations.configuration import (
    COUNT,
    TRAITS,
    Configuration,
    configurations,
)

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("float64_numbers")


@pytest.mark.parametrize("count", [60, COUNT])
def test_a_fifth_of_the_configurations_has_each_trait(count: int) -> None:
    traits = Counter(trait for c in configurations(count) for trait in c.traits)
    print(f"{count} configurations: {dict(traits)}")
    assert {trait: traits[trait] for trait in TRAITS if traits[trait] < count * 0.2} == {}


@pytest.mark.parametrize("count", [60, COUNT])
def test_every_mod_of_the_list_is_among_them(count: int) -> None:
    drawn = configurations(count)
    assert {c.score for c in drawn} - {None} == set(SCORE_MODS)
    assert {c.mask for c in drawn} - {None} == set(MASK_MODS)


def test_the_configurations_are_the_same_in_every_process() -> None:
    assert configurations() == configurations()
    first = configurations(1)[0]
    assert make_case(first).query.equal(make_case(first).query)


def test_the_oracles_agree(configuration: Configuration, oracle_counts: Counter[str]) -> None:
    case = make_case(configuration)
    try:
        by_torch, reason = torch_results(case)
    except NotTaken as not_taken:
        oracle_counts[f"(b) not taken: {not_taken}"] += 1
        return
    oracle_counts[f"(b) outputs only: {reason}" if reason else "(b) with gradients"] += 1
    wanted = dense_results(case)
    if reason:
        wanted = type(wanted)(wanted.forward)
    smooth = case.score is None or case.score.entry.smooth
    # torch sums NaN weights of dead pairs into dk, dv and tables; the dense formula doesn't.
    loose = () if smooth else tuple(wanted.grads)
    assert differences(by_torch, wanted, may_be_nan=loose) == []
