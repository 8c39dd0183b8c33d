"""Methods that work on values, where torch.compile or export records a program that has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from anyflex.tensors.dynamo_errors import fail_while_compiling
from anyflex.tensors.torch_versions import (
    dispatch_modes,
    dynamo_constant,
    kept_out_of_graphs,
    whole_graph,
)

__all__ = ["in_graph", "outside_graphs"]

Method = TypeVar("Method", bound=Callable[..., Any])


def in_graph() -> bool:
    """Tell whether a program is recorded: by Dynamo, or with fake tensors by torch.export."""
    if torch.compiler.is_dynamo_compiling():
        return True
    # torch.compiler.is_compiling() is the process's: another thread may be compiling.
    return dispatch_modes() != 0 and type(torch.empty(0, device="cpu")) is not Tensor


def outside_graphs(method: Method) -> Method:
    """Break a compiled graph where `method` is called, once, instead of at each of its steps.

    Under ``fullgraph=True`` it raises BlockMaskError: call it outside.
    """
    # Imported on demand: it would import the compiler.
    disabled = kept_out_of_graphs(method)
    name = method.__qualname__

    @functools.wraps(method)
    def called(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_whole_graph(name)
            return disabled(*arguments, **options)
        return method(*arguments, **options)

    return called  # type: ignore[return-value]


@dynamo_constant
def _refuse_whole_graph(name: str) -> None:
    """Raise the error in our words where the graph may not break."""
    if whole_graph():
        fail_while_compiling(
            "BlockMaskError",
            f"{name} works on values of tensors, and inside of a compiled graph there are none: "
            "call it before the compiled function and pass the result in, or leave out "
            "fullgraph=True, and the graph breaks here",
            {},
        )
