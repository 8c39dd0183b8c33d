"""A launch whose arguments were put together before is Triton's own, argument for argument."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton to launch with")

import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.knobs import HookChain

from anyflex_triton import arguments, fixed_arguments, launch
from anyflex_triton.fixed_arguments import FixedArguments

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="Triton's launcher is another one"
)
GPU = torch.device("cuda", 1)
TYPES = {
    "desc": "tensordesc<bf16[1, 8],layout>", "x": "*bf16", "tables": ("*fp32", "*i8"),
    "strides": ("i64", "i64"), "length": "i32", "scale": "fp32",
}  # fmt: skip
FUNCTION = SimpleNamespace(__name__="add", arg_names=[*TYPES, "SIZE"])
DESCRIBED = {
    "swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 8], "fp4_padded": False,
}  # fmt: skip


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses for which the driver encoded descriptors."""
    addresses: list[int] = []

    def fill(address: int, *of: Any) -> tuple[Any, ...]:
        addresses.append(address)
        return address, *map(str, of)

    driver = SimpleNamespace(
        get_current_device=lambda: GPU.index,
        get_current_stream=lambda device: 70 + device,
        utils=SimpleNamespace(fill_tma_descriptor=fill),
    )
    active = SimpleNamespace(active=driver)
    monkeypatch.setattr(launch, "driver", active)
    monkeypatch.setattr(fixed_arguments, "driver", active)
    monkeypatch.setattr(triton.runtime, "driver", active)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    for module in (launch, fixed_arguments):
        monkeypatch.setattr(module, "enter_device", lambda device: None)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(knobs.runtime, name, HookChain())
    return addresses


def compiled(described: bool = True, scratch: int = 0) -> tuple[launch.Program, list[Any]]:
    """A program that Triton's own launcher runs up to its function in C; its calls."""
    calls: list[Any] = []

    def function_in_c(*given: Any) -> None:
        calls.append(given)

    function_in_c.__name__ = "launch"
    types = dict(TYPES)
    constants: dict[str, object] = {"SIZE": 8}
    if not described:
        del types["desc"]
        constants["desc"] = None
    signature = {name: types.get(name, "constexpr") for name in FUNCTION.arg_names}
    metas = [DESCRIBED] if described else []
    run = object.__new__(nvidia.CudaLauncher)
    vars(run).update(
        num_ctas=1, launch=nvidia.wrap_handle_tensordesc(function_in_c, signature, metas),
        global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
    )  # fmt: skip
    program = launch.Program(FUNCTION, types, constants, (), launch.Options(4, 1))
    program._compiled[GPU.index] = SimpleNamespace(
        run=run, function=99, packed_metadata=(4, 1, 0),
        metadata=SimpleNamespace(tensordesc_meta=metas),
    )  # fmt: skip
    return program, calls


def given(described: bool = True) -> tuple[FixedArguments, dict[str, Any]]:
    """What stays, and what is a call's."""
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    fixed: dict[str, Any] = {"strides": (8, 1), "length": 4}
    if described:
        fixed["desc"] = ([4, 8], [8, 1], [1, 8])
    tables = (torch.zeros(2), torch.zeros(2, dtype=torch.int8))
    return FixedArguments(fixed), {
        "x": x, "desc": x, "tables": tables, "scale": 0.5, "another kernel's": 3,
    }  # fmt: skip


def as_numbers(call: tuple[Any, ...]) -> list[Any]:
    return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in call]


@pytest.mark.parametrize("described", [True, False])
def test_a_later_launch_gives_what_tritons_own_launcher_gives(
    described: bool, encoded: list[int]
) -> None:
    program, calls = compiled(described)
    fixed, values = given(described)
    for grid in (3, 3, 4):
        fixed.launch(program, grid, GPU, values)
    own, again, other = calls
    assert as_numbers(own) == list(again)
    assert other == (4, *again[1:]) and again[3] == 71
    # Then no driver was asked whose the memory is.
    assert not any(isinstance(argument, torch.Tensor) for argument in again)


def test_a_descriptor_is_encoded_once_for_an_address(encoded: list[int]) -> None:
    program, calls = compiled()
    fixed, values = given()
    first, second = values["desc"], torch.zeros(4, 8, dtype=torch.bfloat16)
    for tensor in (first, first, second, first, second):
        fixed.launch(program, 1, GPU, {**values, "desc": tensor})
    assert encoded == [tensor.data_ptr() for tensor in (first, first, second)]
    assert [call[13][0] for call in calls] == [
        tensor.data_ptr() for tensor in (first, first, second, first, second)
    ]


def test_a_profilers_hook_is_told_of_later_launches_too(encoded: list[int]) -> None:
    program, calls = compiled()
    program.compiled(GPU.index).launch_metadata = lambda *_: "record"
    fixed, values = given()
    fixed.launch(program, 1, GPU, values)
    fixed.launch(program, 1, GPU, values)

    def hook(record: object) -> None:
        raise AssertionError("Triton's launcher calls it")

    knobs.runtime.launch_enter_hook.add(hook)
    fixed.launch(program, 1, GPU, values)
    knobs.runtime.launch_enter_hook.remove(hook)
    fixed.launch(program, 1, GPU, values)
    assert [call[10] for call in calls] == [None, None, "record", None]


def test_a_launcher_that_is_not_known_is_left_to_triton(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another version, or of a kernel with memory of its own."""
    launched = []
    monkeypatch.setattr(launch.Program, "launch", lambda *given: launched.append(given[-1]))
    for version, scratch in (("3.7.0", 0), (triton.__version__, 128)):
        monkeypatch.setattr(triton, "__version__", version)
        program, calls = compiled(scratch=scratch)
        fixed, values = given()
        fixed.launch(program, 1, GPU, values)
        fixed.launch(program, 1, GPU, values)
        assert calls == []
    assert len(launched) == 4
    assert all(isinstance(found["desc"], arguments.Boxes) for found in launched)
    assert all(found["desc"].base is found["x"] for found in launched)


def test_a_descriptor_is_of_the_tensor_that_it_is_said_to_be_of(encoded: list[int]) -> None:
    program, calls = compiled()
    fixed, values = given()
    fixed = FixedArguments(fixed.values, {"desc": "x"})
    del values["desc"]
    for _ in range(2):
        fixed.launch(program, 3, GPU, values)
    own, again = calls
    assert as_numbers(own) == list(again) and values["x"].data_ptr() == encoded[0]
