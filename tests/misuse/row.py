"""One line of the misuse list: the call, the error it must give, what the message must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Attend", "Row", "Table", "inputs"]

Attend = Callable[..., Any]
"""`flex_attention`, as it is, forced to a backend, or compiled."""


@dataclass(frozen=True)
class Row:
    """A wrong use, or one that looks wrong and is legal.

    Args:
        number: of the list.
        name: describes the use.
        call: does it, given `Attend`; builds masks and tensors by itself.
        error: the type to be raised; None for a legal use, which `call` itself asserts on.
        names: regular expressions, each found in the message.
        compiled: can be written under ``torch.compile(fullgraph=True)`` as a wrong call.
        attends: it calls `Attend`; building a mask, say, is the same with any backend.
        line: the error must tell the line of the mod, in this function's source.
        eager: names that Dynamo hides, because they need frames, or closures inside of an
            operation.
    """

    number: int
    name: str
    call: Callable[[Attend], Any]
    error: type[Exception] | tuple[type[Exception], ...] | None
    names: tuple[str, ...]
    compiled: bool
    attends: bool
    line: bool
    eager: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number}-{self.name}"


class Table:
    """Collects the rows of a module by decorators."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def wrong(
        self,
        number: int,
        error: type[Exception] | tuple[type[Exception], ...],
        *names: str,
        compiled: bool = False,
        attends: bool = True,
        line: bool = False,
        eager: tuple[str, ...] = (),
    ) -> Callable[[Callable[[Attend], Any]], Callable[[Attend], Any]]:
        """Enter the decorated function as a wrong use."""
        details = (compiled, attends, line, eager)
        return lambda call: self._enter(number, call, error, names, *details)

    def legal(
        self, number: int, *, compiled: bool = False, attends: bool = True
    ) -> Callable[[Callable[[Attend], Any]], Callable[[Attend], Any]]:
        """Enter the decorated function as a use that must succeed."""
        details = (compiled, attends, False, ())
        return lambda call: self._enter(number, call, None, (), *details)

    def _enter(
        self, number: int, call: Callable[[Attend], Any], *details: Any
    ) -> Callable[[Attend], Any]:
        self.rows.append(Row(number, call.__name__, call, *details))
        return call


def inputs(
    batch: int = 2,
    heads: int = 2,
    q_length: int = 16,
    kv_length: int = 16,
    dim: int = 8,
    kv_heads: int | None = None,
    kv_batch: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value that fit together, float32 unless `options` say otherwise."""
    kv_shape = (kv_batch or batch, kv_heads or heads, kv_length, dim)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((batch, heads, q_length, dim), generator=generator, **options)
    key, value = (torch.randn(kv_shape, generator=generator, **options) for _ in "kv")
    return query, key, value
