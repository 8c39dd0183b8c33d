"""Fixtures of the backend's tests: the backend under its name, the levels that this processor can
run, and a restored number of threads."""

from __future__ import annotations

import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
import torch
from soak import SOAK

from anyflex.plugin import register
from anyflex_cpu import library
from anyflex_cpu.backend import CpuBackend

MANY = 16
"""Number of a test's cases above which a part runs at the highest level too."""
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def pytest_configure() -> None:
    if library.find() is None:
        raise pytest.UsageError(
            "anyflex-cpu has no native library here: `pip install -e backends/cpu` with a C++ "
            f"compiler on the path (found: {COMPILER})"
        )
    if not any(point.name == "cpu" for point in entry_points(group="anyflex.backends.v1")):
        register("cpu", CpuBackend)
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `level` run at each one of this processor's."""
    if "level" in metafunc.fixturenames:
        metafunc.parametrize("level", library.load().available(), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave two thirds of a test's cases but the first out, drawn by name, at levels below the
    highest if it has at least three at the level, otherwise if it has more than `MANY`. The kit's
    cases count by their groups. `make soak` runs all."""
    if SOAK:
        return
    below = library.load().available()[:-1]
    cases: dict[tuple[str, str | None], list[pytest.Item]] = defaultdict(list)
    for item in items:
        level = item.callspec.params.get("level") if hasattr(item, "callspec") else None
        test, _, case = item.nodeid.partition("[")
        group = case.partition("/")[0] if "::test_case[" in item.nodeid else ""
        cases[test + group, level].append(item)
    left_out = {
        item
        for (_, level), alike in cases.items()
        if len(alike) > (2 if level in below else MANY)
        for item in alike[0 if level in below else 1 :]
        if zlib.crc32(item.nodeid.encode()) % 3
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    loaded = library.load()
    before = loaded.level
    loaded.set_isa(request.param)
    yield request.param
    loaded.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """A test may set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
