"""Doctor's notes on each intel-extension-for-pytorch that a user may still have."""

from __future__ import annotations

import sys
import types

import pytest
from machine import Machine

from anyflex_xpu import ipex

DISTRIBUTION = "intel-extension-for-pytorch"
MODULE = "intel_extension_for_pytorch"
BREAKING = """
import os
print("ERROR! Intel Extension for PyTorch needs to work with PyTorch 2.8.*")
os.exit(127)
"""
WORKING = """
class PagedAttention: ...
class VarlenAttention: ...
"""


def put(
    machine: Machine, version: str | None, source: str = "raise SystemExit('imported')"
) -> None:
    """Install an IPEX whose module runs `source` when it is imported."""
    machine.put(DISTRIBUTION, version, files={f"{MODULE}/__init__.py": source})


def put_working(machine: Machine, version: str, layers: str = WORKING) -> None:
    files = {f"{MODULE}/{each}__init__.py": "" for each in ("", "llm/")}
    machine.put(DISTRIBUTION, version, files={**files, f"{MODULE}/llm/modules.py": layers})


def test_nothing_is_said_where_there_is_none(machine: Machine) -> None:
    assert ipex.find() is None and ipex.notes() == []


def test_an_opt_in_without_it_is_told(machine: Machine) -> None:
    machine.patch.setenv("ANYFLEX_XPU_IPEX", "1")
    assert ipex.notes() == [
        "ANYFLEX_XPU_IPEX=1 is set, and intel-extension-for-pytorch is not installed: without "
        "effect"
    ]


@pytest.mark.parametrize("asked", ["", "1"])
def test_metadata_without_a_version_is_told_and_nothing_imported(
    asked: str, machine: Machine
) -> None:
    put(machine, None)
    machine.patch.setenv("ANYFLEX_XPU_IPEX", asked)
    (line,) = ipex.notes()
    assert line.startswith("intel-extension-for-pytorch is present, and its metadata names no ")
    assert line.endswith("pip uninstall intel-extension-for-pytorch")
    assert MODULE not in sys.modules


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0+cpu"])
@pytest.mark.parametrize("asked", ["", "0", "1"])
def test_a_cpu_build_is_told_and_not_imported(version: str, asked: str, machine: Machine) -> None:
    machine.torch("2.8.0+xpu")
    put(machine, version)
    machine.patch.setenv("ANYFLEX_XPU_IPEX", asked)
    assert ipex.notes() == [
        f"intel-extension-for-pytorch {version} is present, a CPU build: it has nothing for Intel "
        "GPUs and is not used"
    ]
    assert MODULE not in sys.modules


@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_build_for_another_torch_is_told_and_not_imported(asked: str, machine: Machine) -> None:
    put(machine, "2.8.10+xpu", BREAKING)
    machine.patch.setenv("ANYFLEX_XPU_IPEX", asked)
    assert ipex.notes() == [
        "intel-extension-for-pytorch 2.8.10+xpu is present, for torch 2.8, and this is torch "
        "2.13.0+xpu: it would break at its import. It is not used; its development has ended: pip "
        "uninstall intel-extension-for-pytorch"
    ]
    assert MODULE not in sys.modules


def test_a_build_that_fits_waits_for_the_opt_in(machine: Machine) -> None:
    machine.torch("2.8.0+xpu")
    put(machine, "2.8.10+xpu")
    found = ipex.find()
    assert found == ipex.Ipex("2.8.10+xpu", "xpu", "2.8", False) and found.fits
    assert ipex.notes() == [
        "intel-extension-for-pytorch 2.8.10+xpu is present and fits torch 2.8.0+xpu; it is not "
        "used unless ANYFLEX_XPU_IPEX=1"
    ]
    assert MODULE not in sys.modules


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (BREAKING, "AttributeError: module 'os' has no attribute 'exit'"),
        ("import sys; sys.exit(127)", "SystemExit: 127"),
        ("import its_missing_library", "ModuleNotFoundError: No module named"),
        (
            "raise OSError('libze_loader.so: not found\\nmore')",
            "OSError: libze_loader.so: not found)",
        ),
    ],
)
def test_an_import_that_breaks_is_told_and_ends_nothing(
    source: str, error: str, machine: Machine
) -> None:
    machine.torch("2.8.0+xpu")
    put(machine, "2.8.10+xpu", source)
    machine.patch.setenv("ANYFLEX_XPU_IPEX", "1")
    (line,) = ipex.notes()
    assert f"but can't be imported ({error}" in line
    assert line.endswith("it is not used")


@pytest.mark.parametrize(
    ("layers", "has"),
    [
        (WORKING, "PagedAttention and VarlenAttention"),
        ("class PagedAttention: ...", "PagedAttention"),
        ("", "neither PagedAttention nor VarlenAttention"),
    ],
)
def test_under_the_opt_in_it_is_said_what_it_has_and_that_nothing_needs_it(
    layers: str, has: str, machine: Machine
) -> None:
    machine.torch("2.8.0+xpu")
    put_working(machine, "2.8.10+xpu", layers)
    machine.patch.setenv("ANYFLEX_XPU_IPEX", "1")
    try:
        assert ipex.notes() == [
            f"intel-extension-for-pytorch 2.8.10+xpu is present and has {has}; it computes "
            "nothing: contract 1 has no paged or packed calls to hand it"
        ]
    finally:
        for name in [*sys.modules]:
            if name.partition(".")[0] == MODULE:
                del sys.modules[name]


def test_one_that_is_imported_already_is_asked_for_its_version(machine: Machine) -> None:
    put(machine, "2.8.0")
    module = types.ModuleType(MODULE)
    machine.patch.setitem(sys.modules, MODULE, module)
    assert ipex.find() == ipex.Ipex("2.8.0", "cpu", "2.8", True)
    module.__version__ = "2.8.10+xpu"  # type: ignore[attr-defined]
    assert ipex.notes() == [
        "intel-extension-for-pytorch 2.8.10+xpu is imported already, for torch 2.8, and this is "
        "torch 2.13.0+xpu. It is not used; its development has ended: pip uninstall "
        "intel-extension-for-pytorch"
    ]


def test_another_value_of_the_variable_counts_as_unset_and_is_told(machine: Machine) -> None:
    machine.torch("2.8.0+xpu")
    put(machine, "2.8.10+xpu")
    machine.patch.setenv("ANYFLEX_XPU_IPEX", "yes")
    first, second = ipex.notes()
    assert first == "ANYFLEX_XPU_IPEX='yes' is not 0 or 1, and counts as unset"
    assert second.endswith("it is not used unless ANYFLEX_XPU_IPEX=1")
    assert MODULE not in sys.modules
