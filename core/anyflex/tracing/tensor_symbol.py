"""The symbols that an eager trace hands out: symbols that are tensors to Python and to torch.

A mod, or a function that it calls, may ask ``isinstance(x, torch.Tensor)`` or
``torch.is_tensor(x)``. torch's C++ asks the same and then reads the object as a tensor, so the
answer can't be feigned: a symbol of an eager trace is one, of the meta device, where nothing can
be computed unseen. Under ``torch.compile`` symbols stay plain objects, which Dynamo inlines; there
`anyflex.tracing.dynamo_symbols` answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anyflex.tensors.torch_versions import as_symbol_tensor, without_modes
from anyflex.tracing.symbol import Symbol

if TYPE_CHECKING:
    from anyflex.tracing.tracer import Tracer

__all__ = ["TensorSymbol", "tensor_symbol"]

with without_modes():  # anyflex may first be imported under fake tensors
    _BASE = torch.empty((), device="meta")


class TensorSymbol(Symbol, torch.Tensor):  # type: ignore[misc, override]
    """A `Symbol` that is a tensor; all that it answers comes from `Symbol`."""


def tensor_symbol(tracer: Tracer, position: int, kind: str) -> Symbol:
    """Return a symbol of an eager trace."""
    symbol: Symbol = as_symbol_tensor(TensorSymbol, _BASE)
    symbol.tracer = tracer
    symbol.position = position
    symbol.kind = kind
    return symbol
