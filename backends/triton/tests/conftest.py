"""Test setup: kernels run in Triton's interpreter, whose variable is read when it is imported. Of
a test with many cases a part runs."""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections import Counter

import pytest
from soak import SOAK

os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("triton") is not None:
    from interpreting import hasten

    hasten()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave four fifths of a test's cases but the first out, drawn by name, unless it has at most
    three. `make soak` runs all."""
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    left_out, begun = set(), set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        drawn = test not in begun or zlib.crc32(item.name.encode()) % 5 == 0
        if not SOAK and cases[test] > 3 and not drawn:
            left_out.add(item)
        begun.add(test)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
