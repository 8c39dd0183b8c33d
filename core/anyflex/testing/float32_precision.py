"""To what torch allows products of float32 to be rounded, while something runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from anyflex.tensors.tensor_facts import fp32_precision

__all__ = ["products_in"]

_SAID = {"highest": ("highest",) * 2, "high": ("high",) * 2, "medium": ("high", "medium")}
"""What CUDA's products and others may be rounded to, by the function's word."""


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Allow what `torch.set_float32_matmul_precision` does with this word; afterwards all that
    torch was told before holds again. What is so already isn't touched: the settings are the
    process's, and other threads may run."""
    before = _settings()
    try:
        if tuple(fp32_precision(torch.float32, of) for of in ("cuda", "cpu")) != _SAID[precision]:
            torch.set_float32_matmul_precision(precision)
        yield
    finally:
        if _settings() != before:
            word, *own = before
            torch.set_float32_matmul_precision(word)
            for backend, said in zip(_backends(), own, strict=True):
                backend.fp32_precision = said


def _backends() -> tuple[Any, ...]:
    onednn: Any = torch.backends.mkldnn
    return torch.backends.cuda.matmul, onednn.matmul


def _settings() -> tuple[str, ...]:
    """The function's word, then what the backends were told."""
    try:
        word = torch.get_float32_matmul_precision()
    except RuntimeError:
        # They allow more than the function was told, in all likelihood nothing.
        word = "highest"
    return (word, *(str(backend.fp32_precision) for backend in _backends()))
