"""Deterministic gradients of captured tensors, which repeat bit for bit.

The rounding of a sum of floats depends on its order; integers are not rounded. So the query pass
runs twice. First it finds the number of additions of each element, and the largest. Then it adds
integers, multiples of a power of two that is as small for each element as its sum's 63 bits allow.
Non-finite additions are summed as floats: infinity and NaN are the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from anyflex.plugin import Call, TensorSpec
from anyflex_triton import backward
from anyflex_triton.kernel_signatures import Programs
from anyflex_triton.launch import FixedLaunch, Launch, kept_launch
from anyflex_triton.program import Options

__all__ = ["integer_specs", "total_launches"]

_BLOCK = 1024


def integer_specs(made: Programs, call: Call) -> tuple[TensorSpec, ...]:
    """Return the workspace: for the elements of each tensor that needs a gradient an integer, then
    the largest addition, then the number of additions. It is empty where no gradient of a captured
    tensor has to be deterministic."""
    if made.spec.determinism == "off" or not made.learned:
        return ()
    return tuple(
        TensorSpec(tuple(call.captured[i].shape), dtype, zeroed=True)
        for dtype in (torch.int64, torch.int32, torch.int64)
        for i in made.learned
    )


def total_launches(
    made: Programs,
    totals: Sequence[Tensor],
    integers: Sequence[Tensor],
    parts: dict[object, FixedLaunch],
) -> list[Launch]:
    """Return the launches that turn integers into `totals`, float32.

    Args:
        integers: tensors of `integer_specs`.
        parts: as in `kept_launch`.
    """

    make = partial(
        made.fixed_launch, backward.total_kernel, 1, {"BLOCK": _BLOCK}, Options(4, 1), {}
    )
    part = kept_launch(parts, "totals", make)
    return [
        Launch(
            part.program,
            -(-total.numel() // _BLOCK),
            part.fixed,
            {
                "total": total, "integers": integers[i], "largest": integers[i + len(totals)],
                "counts": integers[i + 2 * len(totals)], "count": total.numel(),
            },
        )
        for i, total in enumerate(totals)
        if total.numel()
    ]  # fmt: skip
