"""Arguments that a score mod's factory refuses, by a typed error that names argument, rule and
value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyflex
from anyflex import mods
from anyflex.errors import ArgumentError, ArgumentTypeError

__all__: list[str] = []

TABLE = torch.zeros(8, 4)
RELATION = torch.zeros(3, 3, dtype=torch.int64)

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no heads": (
        lambda: mods.alibi(0),
        ArgumentError,
        "alibi: slopes must be at least 1, got 0",
    ),
    "one slope as a float": (
        lambda: mods.alibi(0.5),  # type: ignore[arg-type]
        ArgumentTypeError,
        "alibi: slopes must be an int, got float",
    ),
    "slopes that are ints": (
        lambda: mods.alibi(torch.ones(4, dtype=torch.int32)),
        ArgumentTypeError,
        "alibi: slopes must have dtype float32, bfloat16, float16, float64; got torch.int32",
    ),
    "slopes of rank 2": (
        lambda: mods.alibi(TABLE),
        ArgumentError,
        r"alibi: slopes must have shape \[Hq\], got \[8, 4\]",
    ),
    "slopes for a negative number of heads": (
        lambda: mods.alibi_slopes(-1),
        ArgumentError,
        "alibi_slopes: heads must be at least 1, got -1",
    ),
    "an int for symmetric": (
        lambda: mods.alibi(4, symmetric=1),  # type: ignore[arg-type]
        ArgumentTypeError,
        "alibi: symmetric must be a bool, got int",
    ),
    "an offset elsewhere": (
        lambda: mods.alibi(TABLE[0], offset=torch.zeros(2, dtype=torch.int32, device="meta")),
        ArgumentError,
        "alibi: slopes is on cpu and offset on meta",
    ),
    "a cap of 0": (
        lambda: mods.softcap(0.0),
        ArgumentError,
        "softcap: cap must be positive and finite, got 0.0",
    ),
    "an infinite cap": (
        lambda: mods.softcap(math.inf),
        ArgumentError,
        "softcap: cap must be positive and finite, got inf",
    ),
    "a cap that is no number": (
        lambda: mods.softcap(math.nan),
        ArgumentError,
        "softcap: cap must be positive and finite, got nan",
    ),
    "a cap in a tensor": (
        lambda: mods.softcap(torch.tensor(3.0)),  # type: ignore[arg-type]
        ArgumentTypeError,
        "softcap: cap must be a float, got Tensor",
    ),
    "a name for approximate": (
        lambda: mods.softcap(3.0, "tanh"),  # type: ignore[arg-type]
        ArgumentTypeError,
        "softcap: approximate must be a bool, got str",
    ),
    "a T5 table of rank 1": (
        lambda: mods.t5_bias(TABLE[0]),
        ArgumentError,
        r"t5_bias: table must have shape \[buckets, Hq\], got \[4\]",
    ),
    "an odd number of buckets": (
        lambda: mods.t5_bias(TABLE[:7]),
        ArgumentError,
        "t5_buckets: buckets must be even where bidirectional, got 7",
    ),
    "too few buckets": (
        lambda: mods.t5_buckets(1, bidirectional=False),
        ArgumentError,
        "t5_buckets: buckets must be at least 2, got 1",
    ),
    "a max_distance within the exact buckets": (
        lambda: mods.t5_bias(TABLE, max_distance=2),
        ArgumentError,
        "t5_buckets: max_distance must be at least 3, got 2",
    ),
    "an even number of distances": (
        lambda: mods.relative_bias(TABLE),
        ArgumentError,
        r"must have an odd number of distances, 2 \* m \+ 1 from -m to m, got 8",
    ),
    "a relative table in a list": (
        lambda: mods.relative_bias([[0.0]]),  # type: ignore[arg-type]
        ArgumentTypeError,
        r"relative_bias: table must be a tensor \[2 \* m \+ 1, Hq\], got list",
    ),
    "a relation of floats": (
        lambda: mods.table_bias(TABLE, RELATION.float()),
        ArgumentTypeError,
        "table_bias: relation must have dtype int64, int32; got torch.float32",
    ),
    "a relation of rank 1": (
        lambda: mods.table_bias(TABLE, RELATION[0]),
        ArgumentError,
        r"table_bias: relation must have shape \[Q, KV\] or \[B, Q, KV\], got \[3\]",
    ),
    "a bias of rank 1": (
        lambda: mods.dense_bias(TABLE[0]),
        ArgumentError,
        r"bias must have shape \[Q, KV\] or \[H, Q, KV\] or \[B, H, Q, KV\], got \[4\]",
    ),
    "a tensor among the mods": (
        lambda: mods.compose(mods.softcap(3.0), TABLE),  # type: ignore[arg-type]
        ArgumentTypeError,
        "compose: argument 1 must be a score mod, got Tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_factory_refuses(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_a_refusal_inside_of_a_compiled_function_is_the_same_error() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def attend(q: torch.Tensor) -> torch.Tensor:
        return anyflex.flex_attention(q, q, q, mods.alibi(TABLE))

    with pytest.raises(ArgumentError, match="alibi: slopes must have shape"):
        attend(torch.randn(1, 4, 8, 8))
