"""Methods that work on the host, and that torch.compile therefore leaves to Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from anyflex.tensors.torch_versions import kept_out_of_graphs

__all__ = ["outside_graphs"]

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_graphs(method: Method) -> Method:
    """Break a compiled graph where `method` is called, once, instead of at each of its steps.

    Under ``fullgraph=True`` torch raises: call it outside.
    """
    # Imported on demand: it would import the compiler.
    disabled = kept_out_of_graphs(method)

    @functools.wraps(method)
    def called(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*arguments, **options)
        return method(*arguments, **options)

    return called  # type: ignore[return-value]
