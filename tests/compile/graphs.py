"""A backend for torch.compile that counts the graphs it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CountingBackend"]


class CountingBackend:
    """Ahead-of-time autograd, run without a compiler: forward and backward graphs, no C++."""

    def __init__(self) -> None:
        self.graphs = 0
        self._compile = torch._dynamo.lookup_backend("aot_eager")

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Count and compile."""
        self.graphs += 1
        return self._compile(graph, inputs)
