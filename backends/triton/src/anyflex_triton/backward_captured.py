"""Captured tensors' gradients that repeat bit for bit.

Floats that are added in another order are rounded otherwise; integers are not rounded. So the
query pass runs twice: it finds the largest addition to each tensor's gradient, then it adds
integers, multiples of a power of two that is as small as their sum's 63 bits allow. What isn't
finite is added as floats: infinity and NaN are the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyflex.plugin import Call, TensorSpec
from anyflex_triton import backward
from anyflex_triton.backward_call import queries_launch
from anyflex_triton.launch import Launch, Options
from anyflex_triton.programs import MaskRows, Programs, float_pointers

__all__ = ["integer_specs", "repeatable_launches"]

_BLOCK = 1024


def integer_specs(made: Programs, call: Call) -> tuple[TensorSpec, ...]:
    """The workspace: each learning tensor's largest addition, then its integers. Nothing where no
    gradient of a captured tensor has to repeat."""
    if made.spec.determinism == "off" or not made.learned:
        return ()
    return (
        TensorSpec((len(made.learned),), torch.int32, zeroed=True),
        *(
            TensorSpec(tuple(call.captured[i].shape), torch.int64, zeroed=True)
            for i in made.learned
        ),
    )


def repeatable_launches(
    made: Programs,
    call: Call,
    dout: Tensor,
    row_values: Tensor,
    dq: Tensor | None,
    totals: Sequence[Tensor],
    rows: MaskRows | None,
    workspace: Sequence[Tensor],
) -> list[Launch]:
    """What fills dq and adds to `totals`, float32, with the workspace of `integer_specs`."""
    largest, *integers = workspace
    headroom = _headroom(made, call)
    config = made.config("queries")
    places: tuple[Tensor | int, ...] = (*totals, *integers, largest, headroom)
    key = ("totals",)
    program = made.existing.get(key)
    if program is None:
        program = made.program(
            key,
            backward.total_kernel,
            {
                **float_pointers("total"),
                "integers": "*i64",
                "largest": "*i32",
                "headroom": "i32",
                "count": "i64",
            },
            {"BLOCK": _BLOCK},
            (),
            Options(4, 1),
        )
    return [
        queries_launch(made, call, dout, row_values, None, places, rows, config, "largest"),
        queries_launch(made, call, dout, row_values, dq, places, rows, config, "integers"),
        *(
            Launch(
                program,
                -(-total.numel() // _BLOCK),
                {
                    "total": total, "integers": integers[i], "largest": largest[i:],
                    "headroom": headroom, "count": total.numel(),
                },
            )
            for i, total in enumerate(totals)
            if total.numel()
        ),
    ]  # fmt: skip


def _headroom(made: Programs, call: Call) -> int:
    """Bits of the count of additions: all pairs at once can reach one element, by each read."""
    graph = made.spec.score_graph
    reads = 0 if graph is None else sum(node.operation == "load" for node in graph.nodes)
    batch, heads, length = call.query.shape[:3]
    return (batch * heads * length * call.key.shape[2] * reads).bit_length()
