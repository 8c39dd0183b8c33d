"""Deterministic gradients of captured tensors, which repeat bit for bit.

The rounding of a sum of floats depends on its order; integers are not rounded. So the query pass
runs twice. First it finds the number of additions of each element, and the largest. Then it adds
integers, multiples of a power of two that is as small for each element as its sum's 63 bits allow.
Non-finite additions are summed as floats: infinity and NaN are the same in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyflex.plugin import Call, TensorSpec
from anyflex_triton import backward
from anyflex_triton.backward_call import queries_launch
from anyflex_triton.kernel_signatures import MaskRows, Programs
from anyflex_triton.launch import FixedArguments, Launch
from anyflex_triton.mods import Sums
from anyflex_triton.program import Options

__all__ = ["integer_specs", "repeatable_launches"]

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


def repeatable_launches(
    made: Programs,
    call: Call,
    values: Mapping[str, Any],
    dq: Tensor | None,
    totals: Sequence[Tensor],
    rows: MaskRows | None,
    workspace: Sequence[Tensor],
) -> list[Launch]:
    """Return the launches that fill dq and add to `totals`, float32.

    Args:
        values: result of `backward_call.backward_values`, with `rows`.
        workspace: tensors of `integer_specs`.
    """
    places = (*totals, *workspace)
    config = made.config("queries")
    program = made.program(("totals",), backward.total_kernel, {"BLOCK": _BLOCK}, Options(4, 1))
    own = FixedArguments({})

    def queries(dq: Tensor | None, sums: Sums) -> Launch:
        fixed = queries_launch(
            made, call, values["dout"], values["row_values"], dq, places, rows, config, sums
        )
        return fixed.launch({**values, "totals": places})

    return [
        queries(None, "bounds"),
        queries(dq, "integers"),
        *(
            Launch(
                program,
                -(-total.numel() // _BLOCK),
                own,
                {
                    "total": total, "integers": workspace[i],
                    "largest": workspace[i + len(totals)],
                    "counts": workspace[i + 2 * len(totals)], "count": total.numel(),
                },
            )
            for i, total in enumerate(totals)
            if total.numel()
        ),
    ]  # fmt: skip
