"""Precision of float32 products that torch allows while something runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from anyflex.tensors.tensor_facts import fp32_precision

__all__ = ["products_in"]

_SAID = {"highest": ("highest",) * 2, "high": ("high",) * 2, "medium": ("high", "medium")}
"""Settings of CUDA's products and of others, by the function's word."""


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Allow as much as `torch.set_float32_matmul_precision` does with this word; afterwards
    restore all settings. Settings that hold already aren't touched, because they belong to the
    process and other threads may run."""
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
    """The function's word, then the backends' settings."""
    try:
        word = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The backends' settings allow more than the function's word; most likely nobody set that
        # word.
        word = "highest"
    return (word, *(str(backend.fp32_precision) for backend in _backends()))
