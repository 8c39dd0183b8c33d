"""The ways to tell torch how products of float32 may be rounded."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["OWNERS", "forget", "high_but_for_cuda", "of_all", "of_cuda", "of_onednn"]

_onednn: Any = torch.backends.mkldnn
OWNERS: tuple[Any, ...] = (torch.backends.cuda.matmul, _onednn.matmul, torch.backends)
"""Owners of a setting `fp32_precision`."""


def forget() -> None:
    """Restore all settings to those of a new process."""
    torch.set_float32_matmul_precision("highest")
    for owner in OWNERS:
        owner.fp32_precision = "none"


def of_cuda(precision: str = "tf32") -> None:
    OWNERS[0].fp32_precision = precision


def of_onednn(precision: str = "tf32") -> None:
    OWNERS[1].fp32_precision = precision


def of_all(precision: str = "tf32") -> None:
    OWNERS[2].fp32_precision = precision


def high_but_for_cuda(precision: str = "ieee") -> None:
    torch.set_float32_matmul_precision("high")
    of_cuda(precision)
