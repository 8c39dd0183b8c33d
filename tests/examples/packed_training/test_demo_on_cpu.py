"""The demo, where the CPU backend is installed: attention runs there and not on the reference."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest

from anyflex.reference.backend import ReferenceBackend
from packed_training.model import ModelSize
from packed_training.run import DemoSettings, run_demo

CpuKernel = pytest.importorskip("anyflex_cpu.kernel").CpuKernel
if importlib.import_module("anyflex_cpu.library").find() is None:
    pytest.skip("anyflex-cpu has no native library here", allow_module_level=True)

SMALL = DemoSettings(steps=2, size=ModelSize(2, 2, 8, 16), rows=2, length=64, sample=4)


def count(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, made: Counter[str]) -> None:
    plain = getattr(kind, name)

    def counting(*args: Any) -> Any:
        made[f"{kind.__name__}.{name}"] += 1
        return plain(*args)

    monkeypatch.setattr(kind, name, counting)


def test_the_demo_runs_on_the_cpu_backend_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    count(monkeypatch, CpuKernel, "forward", made)
    count(monkeypatch, CpuKernel, "backward", made)
    count(monkeypatch, ReferenceBackend, "compile", made)
    result = run_demo(SMALL, lambda line: None)
    assert result.selection["backend"] == "cpu" and result.gradients.passed
    assert made["CpuKernel.forward"] > 0 and made["CpuKernel.backward"] > 0
    assert made["ReferenceBackend.compile"] == 0
