"""Test setup: kernels run in the emulator, whose compiler has to be there. Tests for owners of a
Mac are skipped elsewhere."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch

from anyflex.plugin import register
from anyflex_mps.backend import MpsBackend

REAL = torch.backends.mps.is_available()


def pytest_configure() -> None:
    if not any(point.name == "mps" for point in entry_points(group="anyflex.backends.v1")):
        register("mps", MpsBackend)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
