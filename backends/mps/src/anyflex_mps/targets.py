"""Apple GPUs: families, cores, and a machine's description in reports.

A spec's architecture names the family, ``"apple7"`` (M1, A14) to ``"apple10"`` (M5, A19). Families
are cumulative: each has what its predecessors have. So a chip that is newer than all known ones,
``"apple-m6-pro"``, counts as one of the newest family, and the self test decides whether it keeps
what kernels assume.
"""

from __future__ import annotations

import platform
import re

import torch

__all__ = ["MATRIX_UNITS", "NEWEST", "OLDEST", "cores", "family_of", "machine"]

OLDEST = 7
"""First family that multiplies 8x8 matrices: that of M1 and A14."""
NEWEST = 10
"""Newest family that is known."""
MATRIX_UNITS = 10
"""First family whose cores have units for products of matrices: that of M5 and A19."""

_FIRST_CHIPS = {"m": 1, "a": 14}
"""Number of the first chip of each line in the oldest family."""
_CORES = 10
"""Cores of a GPU that isn't here or doesn't tell: the smallest Macs have 7 to 10."""


def family_of(arch: str) -> int | None:
    """Return the number of an architecture's family, or None where kernels can't run.

    Args:
        arch: of a spec; "" for a GPU that isn't here, which counts as one of the newest.
    """
    family = re.fullmatch(r"apple(\d+)", arch)
    if family is not None:
        number = int(family[1])
        return min(number, NEWEST) if number >= OLDEST else None
    chip = re.match(r"apple-([am])(\d+)(?![^-])", arch)
    if arch and (chip is None or int(chip[2]) < _FIRST_CHIPS[chip[1]]):
        return None
    return NEWEST


def cores() -> int:
    """Return the number of the GPU's cores."""
    if not torch.backends.mps.is_available():
        return _CORES
    return torch.backends.mps.get_core_count() or _CORES


def machine() -> str:
    """Return ``"Apple M4 Pro, macOS 15.1, torch 2.13.0"``."""
    chip = "no Apple GPU"
    if torch.backends.mps.is_available():
        chip = torch.backends.mps.get_name()
    system = platform.mac_ver()[0]
    words = [
        chip,
        f"macOS {system}" if system else platform.system(),
        f"torch {torch.__version__}",
    ]
    return ", ".join(words)
