"""`check_lowering` passes a right table, and names each operation that is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflex.plugin import OPERATIONS, Node, evaluate
from anyflex.testing import check_lowering


def changed(operation: str, change: Callable[[Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    """Core's evaluation with one operation's results changed."""

    def run(nodes: Sequence[Node], wanted: Sequence[int], **given: Any) -> list[Tensor]:
        found = evaluate(nodes, wanted, **given)
        if nodes[wanted[0]].operation != operation:
            return found
        return [change(value) for value in found]

    return run


def test_core_s_evaluation_passes_with_every_operation() -> None:
    seen = set()

    def run(nodes: Sequence[Node], wanted: Sequence[int], **given: Any) -> list[Tensor]:
        seen.add(nodes[wanted[0]].operation)
        return evaluate(nodes, wanted, **given)

    check_lowering(run)
    # These have no operands to try.
    assert set(OPERATIONS) - seen <= {"input", "number"}


@pytest.mark.parametrize(
    ("operation", "change", "says"),
    [
        ("floordiv", lambda value: value + 1, "floordiv i64: of [0, 1] is 1, wanted 0"),
        ("exp", lambda value: value * (1 + 1e-4), "exp f32: of "),
        (
            "exp2",
            lambda value: value.nan_to_num(math.nan, posinf=7.0),
            "exp2 f32: of [1000.0] is 7.0, wanted inf",
        ),
        ("neg", lambda value: value.abs() if value.dtype is torch.bfloat16 else value, "neg b"),
        ("lt", lambda value: value.int(), "lt f32: has type torch.int32, wanted torch.bool"),
        ("cast", lambda value: value + (value.dtype is torch.int8), "cast bool to i8: of [False]"),
        (
            "const",
            lambda value: value.float().to(value.dtype),
            "const 0.1 f64: of [] is 0.1000000",
        ),
        ("load", lambda value: value.flip(0), "load: of [-9] is 6.0, wanted 0.0"),
    ],
)
def test_a_wrong_operation_is_named(
    operation: str, change: Callable[[Tensor], Tensor], says: str
) -> None:
    with pytest.raises(AssertionError, match=re.escape(says)) as caught:
        check_lowering(changed(operation, change))
    lines = str(caught.value).splitlines()[1:]
    assert lines and all(line.startswith(operation) for line in lines)


def test_an_operation_that_raises_is_named_and_the_others_are_tried() -> None:
    def raised(value: Tensor) -> Tensor:
        raise OSError("no such instruction")

    with pytest.raises(AssertionError, match="erf f16: raised OSError: no such instruction"):
        check_lowering(changed("erf", raised))
    check_lowering(changed("erf", raised), operations=set(OPERATIONS) - {"erf"})
    check_lowering(changed("exp2", raised), dtypes=[torch.int64, torch.bool])
