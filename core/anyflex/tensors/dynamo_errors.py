"""Raising typed errors from code that Dynamo may be inlining.

A plain ``raise`` inside a compiled function reaches the user as Dynamo's "observed exception". The
error raised here is both ours and Dynamo's ``Unsupported``: with ``fullgraph=True`` it reaches the
user unchanged, without it the graph breaks and the eager call raises the plain error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from anyflex import errors
from anyflex.tensors.torch_versions import dynamo_constant, dynamo_name

__all__ = ["fail", "fail_while_compiling"]


def fail(name: str, message: str, **attributes: Any) -> NoReturn:
    """Raise ``errors.<name>(message, **attributes)``."""
    if torch.compiler.is_dynamo_compiling():
        fail_while_compiling(name, message, attributes)
    raise getattr(errors, name)(message, **attributes) from None


@dynamo_constant
def fail_while_compiling(
    name: str, message: str, attributes: dict[str, Any], *, breaks_graph: bool = True
) -> NoReturn:
    """Raise the error in the form that Dynamo needs; also for code that Dynamo itself calls.

    Args:
        name: of a class of `anyflex.errors`; `message` and `attributes` are its arguments.
        breaks_graph: without ``fullgraph=True`` Dynamo goes on in Python, which meets the error
            itself. Otherwise the user gets it at once.
    """
    plain = getattr(errors, name)
    final = dynamo_name("exc.Unsupported" if breaks_graph else "exc.UncapturedHigherOrderOpError")

    class Raised(plain, final):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            final.__init__(self, message)
            self.__dict__.update(plain(message, **attributes).__dict__)
            self.args = plain(message, **attributes).args

    Raised.__name__, Raised.__qualname__ = plain.__name__, plain.__qualname__
    raise Raised
