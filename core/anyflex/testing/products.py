"""To what torch allows products of float32 to be rounded, while something runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["products_in"]


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Allow it as `torch.set_float32_matmul_precision` does; afterwards it is as before."""
    before = torch.get_float32_matmul_precision()
    try:
        _set(precision)
        yield
    finally:
        _set(before)


def _set(precision: str) -> None:
    # To set it to what it is would change what `torch.backends` say.
    if torch.get_float32_matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)
