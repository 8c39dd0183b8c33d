"""What tests of several folders use, and the numbers that all of them draw."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

__all__: list[str] = []


def pytest_configure() -> None:
    """The tests' tensors are small: on a busy machine threads would only wait for each other."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # for what test modules draw while they are imported


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers in each run, alone or among others: a failure comes again."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture
def float64_numbers() -> Iterator[None]:
    """Python numbers promote to float64, so that formulas in float64 are exact to the end."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
