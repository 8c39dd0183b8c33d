"""Seeds of dropout, drawn from torch's generator."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.contract.dropout import SEEDS

__all__ = ["draw_seed"]


def draw_seed() -> Tensor:
    """Return the seed of one call, a 0-d CPU tensor as numbers are for the static op. Part of the
    traced half: Dynamo records the draw, so that a compiled program draws at each run.

    The CPU's generator serves every device: reading another's number would wait for the device.
    """
    return torch.randint(SEEDS, (), dtype=torch.float64, device="cpu")
