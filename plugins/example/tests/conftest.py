"""Device of the tests' tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from anyflex.testing import posing

BACKEND = "cpu.example"
DEVICE_TYPE = BACKEND.partition(".")[0]


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
