"""The calls that are repeated and run under sanitizers take each kernel for Hopper, and those of
the presets with the constants that are timed."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton to launch with")

from recording import OnHopper, recording
from scripts_beside import SOAK

import anyflex
from anyflex.bench.case import BenchCase, Direction
from anyflex.bench.patterns import make_mask_mod, make_score_mod
from anyflex.bench.presets import PRESETS
from anyflex.plugin import BackendRefused, isolated, register
from anyflex_triton.building import Program

BENCH = Path(__file__).parents[3] / "bench"
CPU = torch.device("cpu")
WHOLE_LIST = pytest.mark.skipif(
    not SOAK, reason="only in make soak: it plans a hundred calls; those listed are planned here"
)


Launched = tuple[Program, int, Mapping[str, object]]


class Asked(Exception):
    """Raised when explain has answered."""


@contextlib.contextmanager
def hopper() -> Iterator[list[Launched]]:
    """Yield the launches."""
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            yield launched


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCH))
    with hopper():
        yield


def variant_of(number: int) -> str:
    """Return explain's description of a call, without numbers of programs and without reasons."""
    import gpu_random  # type: ignore[import-not-found]

    case = gpu_random.case_of(number)
    said: list[str] = []

    def ask(*args: Any, **settings: Any) -> Any:
        said.append(anyflex.explain(*args, **settings).variant)
        raise Asked

    with (
        gpu_random.deterministic(gpu_random.is_deterministic(number)),
        contextlib.suppress(Asked, BackendRefused),
    ):
        gpu_random.by_backend(case, case.draw(CPU), "cuda", CPU, ask)
    without = re.sub(r" \(not .*?\)(?=$|,)", "", said[0] if said else "refused")
    return re.sub(r" programs=\d+|(?<=prefill) \d+x\d+", "", without)


@pytest.mark.usefixtures("on_hopper")
def test_each_call_takes_the_kernels_that_it_is_listed_under() -> None:
    from kernel_calls import KERNELS  # type: ignore[import-not-found]

    listed = {number: variant for variant, numbers in KERNELS.items() for number in numbers}
    assert {number: variant_of(number) for number in listed} == listed


@WHOLE_LIST
@pytest.mark.usefixtures("on_hopper")
def test_whatever_hoppers_kernel_a_random_call_takes_some_are_listed() -> None:
    from kernel_calls import KERNELS

    def parts(variant: str) -> set[str]:
        forward, _, backward = variant.partition(", backward ")
        return {part for part in (forward, f"backward {backward}") if "hopper" in part}

    listed = set().union(*map(parts, KERNELS))
    taken = set().union(*(parts(variant_of(number)) for number in range(100)))
    assert listed == taken and len(listed) == 11


def kernels_of(launched: Iterable[Launched]) -> set[str]:
    """Return each kernel's module, name and constants, with mods by their text."""
    found = set()
    for program, _, _ in launched:
        function = program.function.fn
        compiled = {
            name: getattr(value, "src", value) for name, value in program.constants.items()
        }
        found.add(
            f"{function.__module__}.{function.__name__} {sorted(compiled.items())} "
            f"{sorted(program.types.items())} {sorted(program.aligned)} {program.options}"
        )
    return found


def run_row(case: BenchCase, direction: Direction) -> None:
    """Make the call that `anyflex bench` times."""
    call = case.pattern_call(CPU)
    mask_mod = make_mask_mod(case.masks, call)
    mask = None
    if mask_mod is not None:
        mask = anyflex.create_block_mask(mask_mod, None, *call.shape[1:])
    learns = direction == "backward"
    # These tensors are never written, so the system allocates no memory for large ones.
    tensors = [
        torch.empty(shape, dtype=case.torch_dtype).requires_grad_(learns)
        for shape in (case.q_shape, case.kv_shape, case.v_shape)
    ]
    score_mod = make_score_mod(case.mods, call)
    out = anyflex.flex_attention(*tensors, score_mod, mask, enable_gqa=case.gqa, backend="cuda")
    if learns:
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, tensors, torch.empty_like(out))


@WHOLE_LIST
def test_the_kernels_of_a_preset_s_rows_are_launched_by_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_random
    import preset_calls  # type: ignore[import-not-found]
    from kernel_calls import OF_EACH_KERNEL

    rows: dict[str, str] = {}
    with hopper() as launched:
        for preset_row in PRESETS["h200"]:
            # Otherwise kernels would differ in the number that they compare with.
            row = dataclasses.replace(preset_row, masks=preset_calls.nearer(preset_row.masks))
            for direction in row.directions:
                launched.clear()
                run_row(row, direction)
                for kernel in kernels_of(launched):
                    rows.setdefault(kernel, f"{row.name}, {direction}")
        # This stands behind the rows, because random calls have other numbers in their mods, and a
        # number's second value is compiled differently.
        launched.clear()
        for number in OF_EACH_KERNEL:
            case = gpu_random.case_of(number)
            with gpu_random.deterministic(gpu_random.is_deterministic(number)):
                gpu_random.by_backend(case, case.draw(CPU), "cuda", CPU)
        called = kernels_of(launched)
    lacking = [f"{name}: {kernel}" for kernel, name in rows.items() if kernel not in called]
    assert not lacking, "\n".join(lacking)
