"""Every test begins with an empty torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

__all__: list[str] = []


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget all graphs and guards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
