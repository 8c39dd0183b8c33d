"""Products that keep non-finite values at dead pairs out.

A dead pair has weight 0, and 0 * NaN is NaN. So where an operand holds non-finite values, the
product is made with zeros in their place, and their contribution at live pairs is added after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Operand", "has_nonfinite"]

Product = Callable[[Tensor, Tensor], Tensor]


def has_nonfinite(values: Tensor) -> bool:
    """Whether some value is non-finite.

    It costs one sum on the CPU. On other devices it would synchronise: there the answer is True.
    """
    return values.device.type != "cpu" or not bool(values.sum().isfinite())


class Operand:
    """One operand of weighted sums, [..., N, E]."""

    def __init__(self, values: Tensor) -> None:
        self.nonfinite = has_nonfinite(values)
        self.values = torch.where(values.isfinite(), values, 0) if self.nonfinite else values
        if self.nonfinite:
            kinds = (values.isnan(), values == torch.inf, values == -torch.inf)
            # Only zero or positive matters, so the narrowest type that matrix units take is
            # enough.
            narrow = values.dtype if values.device.type == "cpu" else torch.float16
            self.marks = torch.cat([kind.to(narrow) for kind in kinds], -1)

    def taken(self, take: Callable[[Tensor], Tensor]) -> Operand:
        """The same operand with `take` applied to its tensors: a slice of positions."""
        part = object.__new__(Operand)
        part.nonfinite = self.nonfinite
        part.values = take(self.values)
        if self.nonfinite:
            part.marks = take(self.marks)
        return part

    def product(self, product: Product, weights: Tensor, alive: Tensor | None) -> Tensor:
        """Return ``product(weights, values)``.

        Args:
            product: sums weights times values over live pairs.
            weights: 0 at dead pairs.
            alive: bool, of the weights' shape; may be None only if all values are finite. An
                infinite value counts as infinite whatever its weight.
        """
        result = product(weights, self.values)
        if not self.nonfinite:
            return result
        assert alive is not None
        found = product(alive.to(self.marks.dtype), self.marks) > 0
        nan, plus, minus = found.chunk(3, -1)
        result = result.masked_fill_(plus & ~minus, torch.inf)
        result = result.masked_fill_(minus & ~plus, -torch.inf)
        return result.masked_fill_(nan | (plus & minus), torch.nan)
