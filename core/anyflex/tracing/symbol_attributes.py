"""What a symbol answers when it is asked for a tensor's attributes: ``s.T``, ``s.is_cuda``.

A symbol of an eager trace is a tensor, whose own attributes would tell of the meta device; one
under ``torch.compile`` has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.tracing.symbol import Symbol
from anyflex.tracing.trace_errors import refuse

__all__ = ["install_attributes"]

_ITSELF = "T mT H mH real".split()  # of a real scalar
_DEVICES = "cpu cuda ipu maia meta mps mtia vulkan xla xpu".split()
_NEVER = "is_mkldnn is_nested is_quantized is_sparse is_sparse_csr".split()
_REFUSED = {
    "data": ("the data of a symbol", "Use the symbol itself, or `.detach()`."),
    "grad": ("autograd inside a mod", "Call it outside; `.detach()` stops a gradient."),
    "imag": ("a complex number in a mod", "Scores are real."),
}


def _of_device(type_: str) -> Callable[[Symbol], bool]:
    return lambda self: self.device.type == type_


def _refusal(name: str) -> Callable[[Symbol], Any]:
    problem, hint = _REFUSED.get(
        name, ("an attribute that a symbol doesn't have", "A symbol is a scalar without a value.")
    )

    def attribute(self: Symbol) -> Any:
        refuse(f"{problem}: Tensor.{name}", f"Tensor.{name}", hint)

    return attribute


def _itself(self: Symbol) -> Symbol:
    return self


def install_attributes() -> None:
    """Give `Symbol` every attribute of a tensor that is no method and that it doesn't have."""
    answers: dict[str, Callable[[Symbol], Any]] = {
        **dict.fromkeys(_ITSELF, _itself),
        **{f"is_{type_}": _of_device(type_) for type_ in _DEVICES},
        **{name: lambda self: False for name in _NEVER},
        "itemsize": lambda self: self.dtype.itemsize,
        "nbytes": lambda self: self.dtype.itemsize,
        "layout": lambda self: torch.strided,
    }
    for name in dir(Tensor):
        if name.startswith("_") or hasattr(Symbol, name) or callable(getattr(Tensor, name)):
            continue
        setattr(Symbol, name, property(answers.get(name) or _refusal(name)))
