"""Score mods of the operations' records, each with its slope where it has one, and of operations
together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.record import Sample
from anyflex.testing.mods.mod import Entry

__all__ = ["OPERATION_MODS"]

_TOGETHER: dict[str, Sample] = {
    "logic": lambda s, q, k: (((q > k) & (k > 2)) | ~(q < 5) ^ (k == 1)).float(),
    "comparisons": lambda s, q, k: (
        (q == k) * 0.5
        + (q != k + 1) * 0.25
        + (q < k) * 0.125
        + (q <= k + 2) * 0.0625
        + (q > k - 3) * 1.5
        + (q >= k - 5) * 0.75
    ),
    "comparisons_of_floats": lambda s, q, k: (
        ((q - k) * 0.5 == 1.0) * 0.5
        + ((q - k) * 0.5 < 1.0) * 0.25
        + ((q - k) * 0.5 <= -1.0) * 0.125
        + ((q - k) * 0.5 > 2.0) * 0.75
        + ((q - k) * 0.5 >= 2.0) * 1.5
        + ((q - k) * 0.5 != 0.0) * 0.3
    ),
}

OPERATION_MODS: dict[str, Entry] = {}


def _enter(samples: Mapping[str, Sample], builder: Callable[[Sample], Callable[..., Any]]) -> None:
    for name, sample in samples.items():
        name = f"operation_{name}"
        OPERATION_MODS[name] = Entry("S+", name, functools.partial(builder, sample))


def _alone(sample: Sample) -> Callable[..., Any]:
    return lambda s, b, h, q, k: sample(s, q, k)


def _added(sample: Sample) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + sample(s, q, k)


for _record in RECORDS.values():
    _enter(_record.samples, _alone)
    _enter(_record.index_samples, _added)
_enter(_TOGETHER, _added)
