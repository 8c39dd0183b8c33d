"""Parameters and buffers of torch's lazy modules, which have no shape before the first call."""

from __future__ import annotations

from typing import Any

from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from anyflex.tensors.dynamo_errors import fail

__all__ = ["LAZY", "check_initialized"]

LAZY = (UninitializedParameter, UninitializedBuffer)
"""Their types, for Dynamo to compare: it doesn't follow torch's own is_lazy."""


def check_initialized(name: str, tensor: Any) -> None:
    """Raise ArgumentTypeError, which tells `name`, for a tensor that has no shape yet: whatever it
    is asked for, torch answers with an error that knows no name."""
    if type(tensor) in LAZY:
        fail(
            "ArgumentTypeError",
            f"{name} is an {type(tensor).__name__}, which has no shape yet: call the lazy module "
            "that it belongs to once with an input, or .materialize(shape) it.",
        )
