"""Device of the tests' tensors, and what becomes of tests that the declaration excludes."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch

import anyflex
from anyflex.testing import posing

BACKEND = "cpu.example"
DEVICE_TYPE = BACKEND.partition(".")[0]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test whose call isn't declared. That declared calls are taken, the kit holds."""
    try:
        return (yield)
    except anyflex.BackendRefused as refusal:
        pytest.skip(str(refusal))


@pytest.fixture
def backend() -> str:
    return BACKEND


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The backend's device; where it is absent CPU tensors stand in for it."""
    try:
        torch.empty(1, device=DEVICE_TYPE)
    # torch reports a missing device with a different exception per device type.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        with posing(DEVICE_TYPE):
            yield torch.device("cpu")
    else:
        yield torch.device(DEVICE_TYPE)
