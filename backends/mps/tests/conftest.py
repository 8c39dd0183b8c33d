"""Test setup: kernels run in the emulator, whose compiler has to be there. Tests for owners of a
Mac are skipped elsewhere."""

from __future__ import annotations

import zlib
from collections import Counter
from importlib.metadata import entry_points

import pytest
import torch
from soak import SOAK

from anyflex.plugin import register
from anyflex_mps.backend import MpsBackend

KEPT = {
    f"test_case[{case}]"
    for case in (
        "declared/dtypes", "determinism/mode", "gradients/many_additions_float16",
        "precision/scores_of_a_mod_bfloat16", "precision/scores_of_a_mod_float16",
        "ragged/paged_half", "sinks/half_row",
    )
}  # fmt: skip
"""Cases of the kit by which kernels run in each dtype, and captured gradients by floats and by
exact sums: every draw has them."""

REAL = torch.backends.mps.is_available()


def pytest_configure() -> None:
    if not any(point.name == "mps" for point in entry_points(group="anyflex.backends.v1")):
        register("mps", MpsBackend)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave four fifths of a test's cases but the first and `KEPT` out, drawn by name, unless it
    has at most three, or is the kit's quick subset. `make soak` runs all."""
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    left_out, begun = set(), set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        drawn = test not in begun or item.name in KEPT or zlib.crc32(item.name.encode()) % 5 == 0
        whole = item.path.name == "test_conformance.py"
        if not SOAK and cases[test] > 3 and not drawn and not whole:
            left_out.add(item)
        begun.add(test)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    reason = "no Apple GPU: torch.backends.mps.is_available() is False"
    for item in items:
        if not REAL and item.get_closest_marker("mps"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def compiler(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("mps"):
        return
    # Imported here: the emulator needs Linux, and these tests a Mac.
    from emulator.requirement import require_emulator

    require_emulator()
