"""Fixtures and hooks for tests of several folders, and the random numbers that all of them
draw."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
import torch

__all__: list[str] = []


def pytest_configure() -> None:
    """Use one thread, here and in processes that tests start: their tensors are small, and threads
    would only wait for each other. Idle threads of numpy's products spin: they double the time of
    simulated and interpreted kernels. Processes of Inductor's pool would each import torch, and so
    would the one that tries whether the processor runs what g++ compiles for it."""
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    torch.manual_seed(0)  # for numbers that test modules draw while they are imported


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed each test, so that it draws the same numbers alone or among others: a failure is
    reproducible."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture
def float64_numbers() -> Iterator[None]:
    """Promote Python numbers to float64, so that formulas in float64 are exact to the end."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
