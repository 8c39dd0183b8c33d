"""Fixtures of the backend's tests: the backend under its name, the levels that this processor can
run, and a restored number of threads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
import torch

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
