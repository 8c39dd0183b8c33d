"""Tiny models with random weights, one of each family; no downloads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from anyflex_transformers import NAME
from families import Family

__all__ = ["pair"]


def pair(family: Family, what: str = "") -> tuple[Any, Any]:
    """Return (anyflex's model, eager's) of equal weights, in float32, or skip the test.

    Args:
        what: what the test needs of those that `later` names.
    """
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    needed = max(family.since, family.later.get(what, family.since))
    if version < needed:
        since = ".".join(map(str, needed))
        pytest.skip(f"{family.name} needs transformers {since}, got {transformers.__version__}")
    torch.manual_seed(0)
    ours = _made(family, NAME)
    _no_zeros(ours)
    eager = _made(family, "eager")
    eager.load_state_dict(ours.state_dict())
    return ours, eager


def _made(family: Family, implementation: str) -> Any:
    config = getattr(transformers, family.config)(**{**family.sizes, **family.options})
    config._attn_implementation = implementation
    return getattr(transformers, family.model)(config).eval()


def _no_zeros(model: Any) -> None:
    """Give sinks and biases, which begin with zero or unset, values that show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() == 1 and bool((parameter == 0).all()):
                parameter.normal_(std=0.1)
