"""Reports of what is missing on a machine without a usable Intel GPU, with the exact cure."""

from __future__ import annotations

import sys
import types

import pytest
from machine import Machine

from anyflex.plugin import Accepted, Rejected
from anyflex_xpu import probing
from anyflex_xpu.backend import XpuBackend

INDEX = "https://download.pytorch.org/whl/xpu"


def probed() -> str:
    decision = XpuBackend("xpu", "xpu").probe()
    return decision.reason if isinstance(decision, Rejected) else "accepted"


def test_torch_and_its_own_triton_are_all_it_takes(machine: Machine) -> None:
    machine.put("torch", "2.13.0+xpu", requires=["triton-xpu==3.7.2"])
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    assert XpuBackend("xpu", "xpu").probe() == Accepted()


def test_a_torch_built_without_intel_gpus_is_named_with_the_index_that_has_one(
    machine: Machine,
) -> None:
    machine.torch("2.13.0+cpu")
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    assert probed() == (
        "torch 2.13.0+cpu is built without support of Intel GPUs, and the package index has no "
        f"build with it: pip uninstall torch, then pip install torch --index-url {INDEX}"
    )


def test_a_torch_that_sees_no_device_asks_for_the_driver(machine: Machine) -> None:
    machine.torch("2.13.0+xpu", devices=())
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    reason = probed()
    assert reason.startswith("torch 2.13.0+xpu supports Intel GPUs and sees none: install the GPU")
    assert "Level Zero" in reason and "group render" in reason


def test_a_variable_that_may_hide_the_device_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.torch("2.13.0+xpu", devices=())
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3")
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "*:cpu")
    assert probed().endswith(
        "sees none: ZE_AFFINITY_MASK=3 and ONEAPI_DEVICE_SELECTOR=*:cpu may hide it"
    )


@pytest.mark.parametrize(
    ("torch_asks", "wanted"),
    [
        (["triton-xpu==3.7.2"], "triton-xpu==3.7.2"),
        (
            ["sympy", "pytorch-triton-xpu==3.5.0; platform_system == 'Linux'"],
            "pytorch-triton-xpu==3.5.0",
        ),
        (["triton==3.7.1"], "triton-xpu"),
        ([], "triton-xpu"),
    ],
)
def test_without_a_triton_the_one_that_torch_asks_for_is_named(
    torch_asks: list[str], wanted: str, machine: Machine
) -> None:
    machine.put("torch", "2.13.0+xpu", requires=torch_asks)
    assert probed() == (
        f"there is no Triton, which compiles the kernels: pip install '{wanted}' --index-url "
        f"{INDEX}"
    )


def test_a_torch_without_metadata_gets_the_current_name(machine: Machine) -> None:
    assert "pip install 'triton-xpu' --index-url" in probed()


@pytest.mark.parametrize(
    ("name", "backends"),
    [("triton", ("amd", "nvidia")), ("pytorch-triton-rocm", ("amd",))],
)
def test_a_flavour_for_other_devices_is_named_with_how_to_replace_it(
    name: str, backends: tuple[str, ...], machine: Machine
) -> None:
    machine.put_triton(name, "3.6.0", *backends)
    assert probed() == (
        f"Triton has no backend for Intel GPUs here ({name} 3.6.0): pip uninstall {name}, then "
        f"pip install 'triton-xpu' --index-url {INDEX}"
    )


def test_the_index_s_triton_over_intel_s_is_found_by_the_library_s_size(machine: Machine) -> None:
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    machine.put_triton("triton", "3.6.0", "amd", "nvidia")
    assert probed() == (
        "triton-xpu 3.7.2 and triton 3.6.0 are installed into the same folder, and triton 3.6.0, "
        "without Intel GPUs, was the last: pip uninstall triton-xpu triton, then pip install "
        f"'triton-xpu' --index-url {INDEX}"
    )


def test_intel_s_triton_over_the_index_s_works(machine: Machine) -> None:
    machine.put_triton("triton", "3.6.0", "amd", "nvidia")
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    assert probed() == "accepted"


def test_two_flavours_of_which_the_last_is_unknown_are_refused(machine: Machine) -> None:
    machine.put_triton("triton", "3.6.0", "amd", "nvidia", recorded=False)
    machine.put_triton("triton-xpu", "3.7.2", "intel", recorded=False)
    assert "which was the last can't be told: pip uninstall triton-xpu triton, then" in probed()


def test_a_library_that_is_gone_is_nobody_s(machine: Machine) -> None:
    machine.put_triton("triton", "3.6.0", "amd", "nvidia")
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    (machine.site / "triton/_C/libtriton.so").unlink()
    assert [flavour.library for flavour in probing.triton_flavours()] == [False, False]
    assert "which was the last can't be told" in probed()


def test_a_triton_built_from_source_with_intel_s_backend_is_taken(machine: Machine) -> None:
    machine.put_triton("triton", "3.8.0+git941a04e", "intel")
    assert probed() == "accepted"


def test_a_backend_folder_that_no_distribution_names_is_taken(machine: Machine) -> None:
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    for file in machine.site.glob("*.dist-info/*"):
        file.unlink()
    assert probed() == "accepted"


def test_a_triton_that_is_imported_already_is_asked_itself(machine: Machine) -> None:
    machine.put_triton("triton-xpu", "3.7.2", "intel")
    module = types.ModuleType("triton.backends")
    machine.patch.setitem(sys.modules, "triton.backends", module)
    assert probed() == "accepted"  # only half imported: files decide
    module.backends = {"nvidia": object()}  # type: ignore[attr-defined]
    assert probed().startswith(
        "the Triton that this process has imported has no backend for Intel GPUs (triton-xpu "
        "3.7.2): pip uninstall triton-xpu, then"
    )
    module.backends = {"intel": object()}  # type: ignore[attr-defined]
    assert probed() == "accepted"


def test_a_module_without_a_spec_is_no_triton(machine: Machine) -> None:
    module = types.ModuleType("triton")
    machine.patch.setitem(sys.modules, "triton", module)
    assert "there is no Triton" in probed()


def test_devices_are_described(machine: Machine) -> None:
    machine.torch("2.13.0+xpu", devices=({}, {"name": "Intel(R) Iris(R)", "driver_version": "2"}))
    described = [str(device) for device in probing.devices()]
    assert described == [
        "Intel(R) Data Center GPU Max 1100, driver 1.6.32224",
        "Intel(R) Iris(R), driver 2",
    ]
