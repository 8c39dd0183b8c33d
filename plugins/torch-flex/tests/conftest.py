"""torch's compiler takes seconds a kernel: its cache is kept for the session only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()
