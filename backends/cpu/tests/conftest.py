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
    """Leave two thirds of a test's cases out at levels below the highest, drawn by name, unless it
    has only one or two at each level. `make soak` runs all."""
    if SOAK:
        return
    below = library.load().available()[:-1]
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        level = item.callspec.params.get("level") if hasattr(item, "callspec") else None
        if level in below:
            cases[item.nodeid.partition("[")[0], level].append(item)
    left_out = {
        item
        for of_level in cases.values()
        for item in of_level
        if len(of_level) >= 3 and zlib.crc32(item.nodeid.encode()) % 3
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
