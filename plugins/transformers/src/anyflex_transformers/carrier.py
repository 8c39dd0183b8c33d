"""A block mask in a form that transformers hands on to attention as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import anyflex

__all__ = ["Carrier", "NoTensorError"]


class NoTensorError(anyflex.ArgumentTypeError, AttributeError):
    """A model that computes attention itself used a block mask as a tensor."""


class Carrier(TorchBlockMask):
    """Carry a block mask through a model to attention.

    transformers keeps a prepared mask only if it is a tensor or torch's BlockMask, with a shape
    of four dimensions. All else that is done with it is a model that computes attention itself,
    and raises NoTensorError.

    Attributes:
        own: anyflex's block mask, of rows and keys of this forward, from 0; None: rows see the
            first `seen` keys.
        shape: (B, 1, Q_LEN, KV_LEN).
        seen: number of keys, a 0-d tensor on the device of attention, or None.
        count: the same number where the host has read it, else None.
        documents: whether the mask keeps documents apart that are packed into one row; True in a
            program that is traced, where that isn't known.
    """

    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    ndim = 4
    requires_grad = False

    def __init__(
        self,
        own: anyflex.BlockMask | None,
        shape: tuple[int, int, int, int],
        seen: Tensor | None = None,
        count: int | None = None,
        documents: bool = False,
    ) -> None:
        # Without torch's __init__, which would make its index lists.
        self.own = own
        self.shape = shape
        self.seen = seen
        self.count = count
        self.documents = documents

    def __getitem__(self, index: Any) -> Carrier:
        """Return the mask of consecutive rows: ``mask[:, :, start:stop, :]``."""
        whole = slice(None)
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(rows, slice) or (index[0], index[1], index[3]) != (whole, whole, whole):
            _refuse(f"[{index!r}]")
        start, stop, step = rows.indices(self.shape[2])
        if step != 1:
            _refuse(f"[{index!r}]")
        own = None if self.own is None else self.own.row_slice(start, stop)
        rest = self.seen, self.count, self.documents
        return Carrier(own, (*self.shape[:2], stop - start, self.shape[3]), *rest)

    def to(self, *arguments: Any, **options: Any) -> Carrier:
        """Return the mask on a device; it has no dtype."""
        device = options.get("device", arguments[0] if arguments else None)
        options.pop("non_blocking", None)
        if isinstance(device, torch.dtype) or len(arguments) > 1 or set(options) - {"device"}:
            _refuse(f".to{arguments}")
        if device is None:
            return self
        own = None if self.own is None else self.own.to(device)
        seen = None if self.seen is None else self.seen.to(device)
        return Carrier(own, self.shape, seen, self.count, self.documents)

    def contiguous(self) -> Carrier:
        """Return the mask itself. Some versions' generate() calls it on any mask."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f".{name}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> NoReturn:
        _refuse(f"torch's {getattr(function, '__name__', function)}")

    def __repr__(self) -> str:
        return f"Carrier({self.own!r}, shape={self.shape})"


def _refuse(use: str) -> NoReturn:
    raise NoTensorError(
        "attention_mask is a block mask of attn_implementation='anyflex', and the model used it "
        f"as a tensor ({use}): it computes attention itself, at least in part. Load it with "
        "attn_implementation='eager'; anyflex_transformers.supports(model) tells beforehand"
    )


def _operator(name: str) -> Callable[..., NoReturn]:
    def refused(self: Carrier, *others: object) -> NoReturn:
        _refuse(name)

    return refused


for _name in "add radd sub rsub mul rmul truediv invert neg and rand or ror lt le gt ge".split():
    setattr(Carrier, f"__{_name}__", _operator(f"__{_name}__"))
