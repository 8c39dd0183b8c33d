"""Metal 4's tensors in the emulator: right products in any layout of results, and faults found."""

from __future__ import annotations

import pytest
from emulator import SCHEDULES, KernelFault
from emulator.requirement import require_emulator
from matmul_kernel import seeded
from tensor_kernel import BARRIER, TENSORS, largest_error, run_tensors

BOTH = pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    require_emulator()


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_product_is_right_in_a_layout_at_random(schedule: str, race: bool) -> None:
    assert largest_error(schedule=schedule, race=race) < 2e-5


@pytest.mark.parametrize("seed", range(6))
def test_a_product_is_right_in_each_layout(seed: int) -> None:
    assert largest_error(seed=seed) < 2e-5


@pytest.mark.parametrize(
    "assumed",
    ["(int)(tid * 12 + i)", "(int)(i * 128 + tid)"],
    ids=["thread by thread", "slot by slot"],
)
def test_code_that_assumes_a_layout_is_wrong(assumed: str) -> None:
    source = seeded("C[at[1] * 48 + at[0]] = sums[i];", f"C[{assumed} % 1536] = sums[i];", TENSORS)
    assert largest_error(source) > 1


def test_exchanged_coordinates_are_wrong() -> None:
    source = seeded("C[at[1] * 48 + at[0]]", "C[at[0] * 32 + at[1]]", TENSORS)
    assert largest_error(source) > 1


def test_slots_without_an_element_have_no_place() -> None:
    source = seeded("if (!sums.is_valid_element(i)) continue;", "", TENSORS)
    with pytest.raises(KernelFault, match="asks where an invalid element lies"):
        run_tensors(source)


def test_the_capacity_is_a_bound() -> None:
    source = seeded("sums[i] = 0.0f; // zeros", "sums[sums.get_capacity()] = 0.0f;", TENSORS)
    with pytest.raises(KernelFault, match="past a cooperative tensor's capacity"):
        run_tensors(source)


def test_elements_begin_as_nan() -> None:
    assert largest_error(seeded("sums[i] = 0.0f; // zeros", ";", TENSORS)) == float("inf")


def test_a_threadgroup_of_another_size_is_found() -> None:
    with pytest.raises(KernelFault, match="in a threadgroup of another size"):
        run_tensors(threads=256)


def test_extents_are_bounds() -> None:
    source = seeded("dextents<int32_t, 2>(16, 48)", "dextents<int32_t, 2>(16, 47)", TENSORS)
    with pytest.raises(KernelFault, match="multiplies a tensor past its extents"):
        run_tensors(source)


def test_lanes_that_do_not_join_are_found() -> None:
    source = seeded("product.run(a, b, sums);", "if (tid != 3) product.run(a, b, sums);", TENSORS)
    with pytest.raises(KernelFault):
        run_tensors(source)


@pytest.mark.parametrize("barrier", ["used", "loaded"])
def test_a_missing_barrier_is_a_race(barrier: str) -> None:
    source = seeded(f"{BARRIER} // {barrier}", "", TENSORS)
    with pytest.raises(KernelFault, match="data race on threadgroup memory"):
        run_tensors(source, race=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("descriptor(32, 48, 16,", "descriptor(24, 24, 16,", "must be a multiple of 16"),
        ("descriptor(32, 48, 16,", "descriptor(32, 48, 8,", "K must be a multiple of 16"),
        (
            "cooperative_tensor<decltype(a), decltype(b), float>",
            "cooperative_tensor<decltype(a), decltype(b), half>",
            "results are float",
        ),
    ],
)
def test_what_apple_asserts_does_not_compile(old: str, new: str, message: str) -> None:
    with pytest.raises(SyntaxError, match=message):
        run_tensors(seeded(old, new, TENSORS))


def test_operands_of_two_types_do_not_compile() -> None:
    source = TENSORS.replace("threadgroup half b_rows", "threadgroup bfloat b_rows").replace(
        "tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> b(",
        "tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline> b(",
    )
    source = source.replace("b_rows[i] = B", "b_rows[i] = (bfloat)B")
    with pytest.raises(SyntaxError, match="operands have one type"):
        run_tensors(source)
