"""torch's functions of flex attention as torch wrote them, and the devices whose calls are
re-routed away from them.

This module is imported before the first re-routing, so its copies hold torch's own code.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.attention.flex_attention as torch_flex

__all__ = ["FUNCTIONS", "create_block_mask", "flex_attention", "rerouted"]

FUNCTIONS: dict[str, Any] = {
    name: getattr(torch_flex, name) for name in ("flex_attention", "create_block_mask")
}
"""torch's functions, which run other code while they are re-routed."""


def _copied(function: Any) -> Callable[..., Any]:
    """Return a function of the same code that re-routing leaves alone; what isn't a plain function
    can't be re-routed, and is returned as it is."""
    if not isinstance(function, types.FunctionType):
        copied: Callable[..., Any] = function
        return copied
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


flex_attention = _copied(FUNCTIONS["flex_attention"])
create_block_mask = _copied(FUNCTIONS["create_block_mask"])

rerouted: tuple[str, ...] = ()
"""Device types whose calls go to anyflex. Compiled graphs are guarded by its items."""
