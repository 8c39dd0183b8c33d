"""The recorded cost model of the Metal kernels is that of the kernels' tiles."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_the_recorded_tables_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anyflex_mps", reason="anyflex-mps is not installed: make test")
    monkeypatch.syspath_prepend(BENCH)
    model = importlib.import_module("mps_cost_model")
    recorded = model.PAGE.read_text(encoding="utf-8").partition(model.MARKS[0])[2]
    recorded = recorded.partition(model.MARKS[1])[0]
    assert recorded == f"\n{model.tables()}", "python bench/mps_cost_model.py --record"
