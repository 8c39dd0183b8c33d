"""Records: values and constants that the functions of a kernel hand to each other as one argument.

A kernel's own arguments can't be records: a launch takes pointers, numbers and constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import triton
import triton.language as tl
from triton import knobs

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda function: function


__all__ = ["record"]

C = TypeVar("C", bound=type)

_aggregate: Any = getattr(triton, "aggregate", None) or tl.core._aggregate
"""Public since Triton 3.8."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def record(cls: C) -> C:
    """Make the class a record, which kernels construct with all of its fields as keywords.

    A field may be anything that a function of Triton's takes: tensors, pointers, descriptors,
    tuples, other records, and constants, including None and functions, which stay constants. A
    record is immutable; to change a field, construct another one. It has no methods: Triton's
    interpreter doesn't bind them.

    A field that is assigned in the class has that value where it isn't given.

    A constant must not change in a loop: Triton silently drops such a change in the loop's body.

    The order of fields and their annotations have no meaning, because up to Triton 3.7 neither is
    part of a kernel's key in Triton's cache.

    Attributes:
        plain: the undecorated class, for running kernels without Triton.
    """
    names = tuple(cls.__annotations__)
    defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}

    def fill(self: Any, values: dict[str, Any]) -> None:
        values = {**defaults, **values}
        if values.keys() != set(names):
            raise TypeError(f"fields of {cls.__name__}: {sorted(values.keys() ^ set(names))}")
        for name in names:
            object.__setattr__(self, name, values[name])

    def plain_init(self: Any, **values: Any) -> None:
        fill(self, values)

    def init(self: Any, **values: Any) -> None:
        given = {**defaults, **values}
        fill(self, {name: _held(value) for name, value in given.items()})

    plain: Any = cls
    plain.__init__ = plain_init
    plain.plain = cls
    if knobs.runtime.interpret:
        return cls
    # Without this mark Triton looks for the source of `init`, to make it part of kernels' keys.
    init.__triton_builtin__ = True  # type: ignore[attr-defined]
    # Triton checks fields against annotations, which can't be strings up to Triton 3.7.
    types = dict.fromkeys(names, tl.core.base_value)
    made: Any = _aggregate(
        type(cls.__name__, (), {
            "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
            "__annotations__": types, "__init__": init,
        })
    )  # fmt: skip
    made.plain = cls
    found: C = made
    return found


def _held(value: Any) -> Any:
    return value if isinstance(value, tl.core.base_value) else tl.constexpr(value)
