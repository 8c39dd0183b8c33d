"""Matrix products on simdgroup matrices, in every schedule and both builds."""

from __future__ import annotations

import pytest
from emulator import SCHEDULES
from emulator.requirement import require_emulator
from matmul_kernel import largest_error

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module")
def compiler() -> None:
    require_emulator()


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tiled_product_is_right(schedule: str, race: bool) -> None:
    assert largest_error(schedule=schedule, race=race) < 2e-5
