"""Fixtures that tests of several folders use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

__all__: list[str] = []


def pytest_configure() -> None:
    """The tests' tensors are small: on a busy machine threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def float64_numbers() -> Iterator[None]:
    """Python numbers promote to float64, so that formulas in float64 are exact to the end."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
