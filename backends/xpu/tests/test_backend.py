"""Answers of `xpu` where CPU tensors stand in for an Intel GPU, and doctor's output about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machine import Machine

import anyflex
from anyflex.plugin import BackendRefused
from anyflex.testing import posing
from anyflex_triton import TritonBackend
from anyflex_xpu.backend import XpuBackend

INDEX = "https://download.pytorch.org/whl/xpu"


def query(dtype: torch.dtype = torch.float32, width: int = 64) -> torch.Tensor:
    return torch.zeros(1, 2, 64, width, dtype=dtype)


def test_it_is_the_default_of_its_device_type() -> None:
    with posing("xpu"):
        found = anyflex.explain(query(), query(), query())
    assert found.to_dict()["backend"] == "xpu"


def test_it_is_the_portable_backend_with_another_target() -> None:
    backend, portable = XpuBackend("xpu", "xpu"), TritonBackend("cuda.triton", "cuda")
    assert backend.target() == "xpu"
    assert backend.capabilities == portable.capabilities
    assert backend.options.keys() == portable.options.keys() | {"grf_mode"}
    assert backend.priority > portable.priority


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_dtypes_that_it_takes(dtype: torch.dtype) -> None:
    with posing("xpu"):
        found = anyflex.explain(query(dtype), query(dtype), query(dtype), backend="xpu")
    assert found.to_dict()["backend"] == "xpu"


def test_double_precision_is_refused_with_the_reason() -> None:
    wide = query(torch.float64)
    with posing("xpu"), pytest.raises(BackendRefused, match="xpu: dtype float64 is not supported"):
        anyflex.flex_attention(wide, wide, wide, backend="xpu")


def test_tensors_of_another_device_are_refused() -> None:
    with pytest.raises(BackendRefused, match=r"'xpu' computes on xpu tensors.*are on cpu"):
        anyflex.flex_attention(query(), query(), query(), backend="xpu")


def test_the_fingerprint_names_triton_and_each_kind_of_device_once(machine: Machine) -> None:
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    machine.torch("2.13.0+xpu", devices=({}, {}, {"name": "Intel(R) Arc(TM) B580"}))
    text = XpuBackend("xpu", "xpu").fingerprint()
    assert text.endswith(
        "triton-xpu 3.7.2; Intel(R) Data Center GPU Max 1100, driver 1.6.32224; "
        "Intel(R) Arc(TM) B580, driver 1.6.32224"
    )


def test_a_device_without_matrix_units_is_told(machine: Machine) -> None:
    slow = {"name": "Intel(R) Graphics", "has_subgroup_matrix_multiply_accumulate": False}
    machine.torch("2.13.0+xpu", devices=({}, slow))
    first, last = XpuBackend("xpu", "xpu").notes()
    assert first == (
        "Intel(R) Graphics has no matrix units (DPAS): products run slowly on its vector units"
    )
    assert last.startswith("the project has never run this backend on an Intel GPU")


def test_without_a_device_only_ipex_is_worth_a_note(machine: Machine) -> None:
    machine.torch("2.13.0+cpu")
    assert XpuBackend("xpu", "xpu").notes() == []
    machine.put("intel-extension-for-pytorch", "2.8.0")
    (line,) = XpuBackend("xpu", "xpu").notes()
    assert "2.8.0 is present, a CPU build" in line


PROGRAM = """
import sys
import anyflex.cli.main
from anyflex.plugin import register
from anyflex_xpu.backend import XpuBackend
from importlib.metadata import entry_points
if not any(point.name == "xpu" for point in entry_points(group="anyflex.backends.v1")):
    register("xpu", XpuBackend)
code = anyflex.cli.main.main(["doctor"])
print(code, sorted({"triton", "intel_extension_for_pytorch"} & set(sys.modules)))
"""


@pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has an Intel GPU")
def test_doctor_prints_the_refusal_and_the_note_and_imports_neither(tmp_path: Path) -> None:
    """Runs in a process of its own, with this machine's torch."""
    info = tmp_path / "site" / "intel_extension_for_pytorch-2.8.10+xpu.dist-info"
    info.mkdir(parents=True)
    name = "Metadata-Version: 2.1\nName: intel-extension-for-pytorch\nVersion: 2.8.10+xpu\n"
    (info / "METADATA").write_text(name)
    path = os.pathsep.join([str(info.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": path, "ANYFLEX_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("  xpu  rejected"))
    assert lines[at + 1].startswith(f"    torch {torch.__version__} ")
    assert INDEX in lines[at + 1]
    assert lines[at + 2].startswith(
        "    note: intel-extension-for-pytorch 2.8.10+xpu is present, for torch 2.8, and this is "
        f"torch {torch.__version__}: it would break at its import."
    )
    assert "All checks passed." in lines
    assert lines[-1] == "0 []"
