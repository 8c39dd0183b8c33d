"""Seeded faults: each is found, in the build that is said to find it, with its source line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulator import SCHEDULES, KernelFault, compile_shader
from emulator.compiling import runtime_library
from emulator.requirement import require_emulator
from matmul_kernel import BARRIER, MATMUL, largest_error, run_matmul, seeded

BOTH = pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
LOADED, USED = f"{BARRIER} // loaded", f"{BARRIER} // used"
BEGIN = "// begin"


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    require_emulator()


def kernel(body: str, parameters: str = "", functions: str = "") -> str:
    """Return the source of a kernel of one dimension with `out` and the thread's index `i`."""
    return f"""
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
{functions}
kernel void tested(device float* out [[buffer(0)]]{parameters},
    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]])
{{
  {body}
}}
"""


def run(
    source: str, *arguments: object, threads: int = 64, group: int = 64, **how: object
) -> None:
    """Run a kernel of `kernel`, on threads of one dimension."""
    library = compile_shader(source, **how)  # type: ignore[arg-type]
    library.tested(*arguments, threads=threads, group_size=group)  # type: ignore[arg-type]


def line_of(source: str, text: str) -> int:
    """Return the number of the one line that holds a text."""
    found = [n for n, line in enumerate(source.split("\n"), 1) if text in line]
    assert len(found) == 1
    return found[0]


# Barriers


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", [LOADED, USED], ids=["after loads", "before loads"])
def test_a_missing_barrier_is_a_race(missing: str, schedule: str) -> None:
    source = seeded(missing, "")
    with pytest.raises(KernelFault, match="matmul: data race on threadgroup memory: thread"):
        run_matmul(source, race=True, schedule=schedule)


def test_a_missing_barrier_after_loads_gives_wrong_numbers_in_the_plain_build() -> None:
    assert all(largest_error(seeded(LOADED, ""), schedule=s) > 1 for s in SCHEDULES)


def test_a_read_before_a_write_with_no_barrier_between_is_a_race_at_the_write() -> None:
    source = seeded(USED, "")
    with pytest.raises(KernelFault, match=r"overwrites what thread [0-9]+ read") as raised:
        run_matmul(source, race=True)
    loads = {line_of(source, "As[i] = A["), line_of(source, "Bs[i] = B[")}
    assert loads.intersection(raised.value.lines)


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_that_half_of_the_threads_reach_is_found(schedule: str, race: bool) -> None:
    source = seeded(LOADED, f"if (tid < 64) {BARRIER}")
    with pytest.raises(
        KernelFault, match=r"different barriers|data race" if race else "different"
    ):
        run_matmul(source, race=race, schedule=schedule)


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_barriers_of_two_branches_are_not_one(schedule: str, race: bool) -> None:
    source = kernel(f"""
  if (t < 32) {{
    {BARRIER}
    out[i] = 1.0f;
  }} else {{
    {BARRIER}
    out[i] = 2.0f;
  }}""")
    with pytest.raises(KernelFault, match=r"wait at different barriers: line [0-9]+.* and line"):
        run(source, torch.zeros(64), race=race, schedule=schedule)


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_in_a_branch_of_one_simdgroup_is_found(schedule: str, race: bool) -> None:
    source = kernel(f"if (lane % 2 == 0) {BARRIER}\n  out[i] = 1.0f;")
    with pytest.raises(KernelFault, match=r"barrier is reached by only 32 of 64 threads|deadlock"):
        run(source, torch.zeros(64), race=race, schedule=schedule)


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_early_return_before_a_barrier_is_found(schedule: str, race: bool) -> None:
    source = seeded(BEGIN, "if (tid == 127) return;")
    with pytest.raises(KernelFault, match=r"by only 127 of 128 threads|deadlock"):
        run_matmul(source, race=race, schedule=schedule)


def test_a_barrier_without_memory_flags_orders_nothing() -> None:
    source = seeded(LOADED, "threadgroup_barrier(mem_flags::mem_none);")
    with pytest.raises(KernelFault, match="data race on threadgroup memory"):
        run_matmul(source, race=True)


def test_a_simdgroup_barrier_orders_its_own_lanes_only() -> None:
    body = """
  threadgroup float x[64];
  x[t] = float(t);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = x[FROM];"""
    out = torch.zeros(64)
    run(kernel(body.replace("FROM", "t ^ 1")), out, race=True)
    assert out.tolist() == [float(i ^ 1) for i in range(64)]
    with pytest.raises(KernelFault, match="data race on threadgroup memory"):
        run(kernel(body.replace("FROM", "t ^ 32")), out, race=True)


# Bounds


@BOTH
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("out[i] = in[i + 1];", "reads past the end of buffer 1 'in': at byte 256 of 256"),
        ("out[i + 1] = in[i];", "writes past the end of buffer 0 'out': at byte 256 of 256"),
        ("out[i] = in[i + 1000000];", "reads past the end of buffer 1 'in'"),
        ("out[i] = in[i] + F[i];", "reads past the end of buffer 2 'F': at byte 8 of 8"),
    ],
)
def test_an_access_out_of_bounds_names_the_buffer_and_the_line(
    body: str, says: str, race: bool
) -> None:
    parameters = ", device const float* in [[buffer(1)]], constant float* F [[buffer(2)]]"
    source = kernel(body, parameters)
    with pytest.raises(KernelFault, match=says) as raised:
        run(source, torch.zeros(64), torch.zeros(64), [1.0, 2.0], race=race)
    assert raised.value.lines == (line_of(source, body),)


def test_a_read_before_the_begin_is_found_in_the_race_build_and_nan_in_the_plain() -> None:
    source = kernel("out[i] = in[(int)i - 1];", ", device const float* in [[buffer(1)]]")
    with pytest.raises(KernelFault, match="reads before the begin of buffer 1 'in': at byte -4"):
        run(source, torch.zeros(64), torch.zeros(64), race=True)
    out = torch.zeros(64)
    run(source, out, torch.zeros(64))
    assert out[0].isnan()
    assert out[1:].eq(0).all()


@BOTH
def test_a_write_before_the_begin_is_found(race: bool) -> None:
    with pytest.raises(KernelFault, match=r"writes (before the begin of|to) buffer 0 'out'"):
        run(kernel("out[(int)i - 1] = 1.0f;"), torch.zeros(64), race=race)


def test_a_misaligned_end_is_exact_in_the_race_build() -> None:
    source = kernel("out[i] = float(in[i + 1]);", ", device const half* in [[buffer(1)]]")
    with pytest.raises(KernelFault, match="past the end of buffer 1 'in': at byte 6 of 6"):
        run(source, torch.zeros(3), torch.zeros(3).half(), threads=3, group=3, race=True)


def test_a_write_into_the_slack_before_the_guard_page_is_found_in_the_plain_build() -> None:
    source = kernel("out[i + 1] = 0.0f;")
    with pytest.raises(KernelFault, match="writes to buffer 0 'out' past the end"):
        run(source, torch.zeros(3), threads=3, group=3)


@BOTH
def test_a_write_past_threadgroup_memory_names_the_variable(race: bool) -> None:
    source = kernel("""
  threadgroup float first[64];
  threadgroup float second[64];
  first[t + OFFSET] = 1.0f;
  second[t] = 2.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = first[t] + second[t];""")
    run(source.replace("OFFSET", "0"), torch.zeros(64), race=race)
    with pytest.raises(KernelFault, match="past the end of the threadgroup variable first"):
        run(source.replace("OFFSET", "4"), torch.zeros(64), race=race)


def test_a_read_past_threadgroup_memory_is_found_in_the_race_build_and_nan_in_the_plain() -> None:
    source = kernel(f"""
  threadgroup float x[64];
  x[t] = 1.0f;
  {BARRIER}
  out[i] = x[t + 1];""")
    with pytest.raises(KernelFault, match=r"thread 63 .* reads past the end of the .*variable x"):
        run(source, torch.zeros(64), race=True)
    out = torch.zeros(64)
    run(source, out)
    assert out[:63].eq(1).all()
    assert out[63].isnan()


@BOTH
def test_a_write_to_constant_memory_is_found(race: bool) -> None:
    source = kernel("((device float*)(ulong)F)[0] = 1.0f;", ", constant float* F [[buffer(1)]]")
    with pytest.raises(KernelFault, match="writes to buffer 1 'F', which is constant"):
        run(source, torch.zeros(64), [1.0], race=race)


@BOTH
def test_a_write_to_const_device_memory_is_found(race: bool) -> None:
    parameters = ", device const float* in [[buffer(1)]]"
    source = kernel("((device float*)in)[i] = 1.0f;", parameters)
    with pytest.raises(KernelFault, match="writes to buffer 1 'in', which is const"):
        run(source, torch.zeros(64), torch.zeros(64), race=race)


@BOTH
def test_a_write_between_the_elements_of_a_strided_tensor_is_found(race: bool) -> None:
    source = kernel("out[2 * i + OFFSET] = 1.0f;")
    whole = torch.zeros(64, 2)
    run(source.replace("OFFSET", "0"), whole[:, 0], race=race)
    assert whole.tolist() == [[1.0, 0.0]] * 64
    with pytest.raises(KernelFault, match="writes to buffer 0 'out' between the elements"):
        run(source.replace("OFFSET", "1"), whole[:, 0], threads=32, group=32, race=race)
    assert whole[:, 1].eq(0).all()


def test_a_read_between_the_elements_of_a_strided_tensor_is_nan() -> None:
    source = kernel("out[i] = in[i];", ", device const float* in [[buffer(1)]]")
    out = torch.zeros(64)
    run(source, out, torch.ones(64, 2)[:, 0])
    assert out[0::2].eq(1).all()
    assert out[1::2].isnan().all()


@BOTH
def test_a_misaligned_vector_access_is_found(race: bool) -> None:
    source = kernel(
        "((device float4*)out)[i] = *(device const float4*)(in + 4 * i);",
        ", device const float* in [[buffer(1)]]",
    )
    aligned, out = torch.randn(68), torch.zeros(64)
    run(source, out, aligned[:64], threads=16, group=16, race=race)
    assert out.equal(aligned[:64])
    with pytest.raises(KernelFault, match="misaligned vector access"):
        run(source, out, aligned[1:65], threads=16, group=16, race=race)


# Races


def test_two_threads_that_write_one_element_of_device_memory_race() -> None:
    source = kernel("out[i / 2] = 1.0f;")
    run(source, torch.zeros(64))
    with pytest.raises(KernelFault, match=r"data race on buffer 0 'out': thread 1 .* writes what"):
        run(source, torch.zeros(64), race=True)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("if (t == 0) out[0] = 1.0f;", "thread 0 .* writes what the 1. threadgroup wrote"),
        ("out[i] = group > 0 ? out[i - 64] : 1.0f;", "reads what the 1. threadgroup wrote"),
        ("out[i] = group == 0 ? out[i + 64] : 1.0f;", "writes what the 1. threadgroup read"),
    ],
)
def test_threadgroups_that_share_device_memory_race(body: str, says: str) -> None:
    with pytest.raises(KernelFault, match=f"data race between threadgroups on .*'out'.*{says}"):
        run(kernel(body), torch.zeros(128), threads=128, race=True)


def test_a_row_of_the_next_threadgroup_races_though_numbers_are_right() -> None:
    source = kernel("out[i] = float(i); if (i + 1 < 128) out[i + 1] = float(i + 1);")
    out = torch.zeros(128)
    run(source, out, threads=128, group=1)
    assert out.equal(torch.arange(128.0))
    with pytest.raises(KernelFault, match="data race between threadgroups"):
        run(source, out, threads=128, group=1, race=True)


def test_atomics_of_threadgroups_do_not_race_but_a_plain_read_beside_them_does() -> None:
    add = "atomic_fetch_add_explicit(total, 1.0f, memory_order_relaxed);"
    parameters = ", device atomic_float* total [[buffer(1)]]"
    total = torch.zeros(1)
    run(kernel(add, parameters), torch.zeros(128), total, threads=128, race=True)
    assert total.item() == 128
    read = f"{add} if (group == 1) out[i] = *(device float*)total;"
    with pytest.raises(KernelFault, match=r"reads what the 1. threadgroup changed by an atomic"):
        run(kernel(read, parameters), torch.zeros(128), total, threads=128, race=True)


def test_device_memory_is_ordered_by_a_barrier_with_its_flag_only() -> None:
    body = """
  out[i] = float(t);
  BARRIER(mem_flags::FLAG);
  const float x = out[i ^ OTHER];
  BARRIER(mem_flags::FLAG);
  out[i] = x;"""
    for barrier, other in (("threadgroup_barrier", 32), ("simdgroup_barrier", 1)):
        source = kernel(body.replace("BARRIER", barrier).replace("OTHER", str(other)))
        out = torch.zeros(64)
        run(source.replace("FLAG", "mem_device"), out, race=True)
        assert out.tolist() == [float(t ^ other) for t in range(64)]
        with pytest.raises(KernelFault, match="data race on buffer 0 'out'"):
            run(source.replace("FLAG", "mem_threadgroup"), out, race=True)


@pytest.mark.parametrize("space", ["device", "threadgroup"])
def test_atomics_race_with_plain_accesses_of_their_threadgroup(space: str) -> None:
    body = f"""
  threadgroup atomic_uint shared[1];
  {space} atomic_uint* at = {"(device atomic_uint*)out" if space == "device" else "shared"};
  if (t == 0) *({space} uint*)at = 0u;
  BEFORE
  atomic_fetch_add_explicit(at, 1u, memory_order_relaxed);
  AFTER
  if (t == 0) *({space} uint*)at = *({space} uint*)at + 1u;"""
    both = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
    ordered = kernel(body.replace("BEFORE", both).replace("AFTER", both))
    run(ordered, torch.zeros(1), race=True)
    for before, after in (("", both), (both, "")):
        source = kernel(body.replace("BEFORE", before).replace("AFTER", after))
        for schedule in SCHEDULES:
            with pytest.raises(KernelFault, match=r"(by an atomic what thread|by an atomic with)"):
                run(source, torch.zeros(1), race=True, schedule=schedule)


def test_bytes_beside_each_other_do_not_race() -> None:
    source = kernel("flags[i] = 1;", ", device uchar* flags [[buffer(1)]]")
    flags = torch.zeros(64, dtype=torch.bool)
    run(source, torch.zeros(64), flags, race=True)
    assert flags.all()


# Contents of memory


@pytest.mark.parametrize("race", [False, True])
def test_threadgroup_memory_of_the_threadgroup_before_is_not_seen(race: bool) -> None:
    source = kernel("""
  threadgroup float x[64];
  if (group == 0) x[t] = 1.0f;
  out[i] = x[t];""")
    out = torch.zeros(128)
    run(source, out, threads=128, race=race)
    assert out[:64].eq(1).all()
    assert out[64:].isnan().all()


def test_a_matrix_without_a_value_is_nan() -> None:
    body = "simdgroup_matrix<float, 8, 8> m; out[i] = m.thread_elements()[0];"
    out = torch.zeros(32)
    run(kernel(body), out, threads=32, group=32)
    assert out.isnan().all()


# Simdgroup functions


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "call",
    [
        "out[i] = simd_sum(1.0f);",
        "out[i] = simd_shuffle_xor(float(i), (ushort)1);",
        "simdgroup_multiply_accumulate(m, m, m, m); out[i] = m.thread_elements()[0];",
        "simdgroup_load(m, in);",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ],
)
def test_a_simdgroup_function_of_a_part_of_a_simdgroup_is_found(
    call: str, schedule: str, race: bool
) -> None:
    body = f"""
  simdgroup_matrix<float, 8, 8> m(1.0f);
  if (lane < 16) {{ {call} }}"""
    source = kernel(body, ", device const float* in [[buffer(1)]]")
    with pytest.raises(KernelFault, match=r"deadlock|different numbers of simdgroup functions"):
        run(source, torch.zeros(64), torch.zeros(64), race=race, schedule=schedule)


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_different_simdgroup_functions_of_one_simdgroup_are_found(
    schedule: str, race: bool
) -> None:
    body = """
  float x;
  if (lane < 16) { x = simd_sum(1.0f); out[i] = x + 1.0f; } else { x = simd_max(2.0f); }
  out[i] += x;"""
    with pytest.raises(KernelFault, match="in different simdgroup functions: line"):
        run(kernel(body), torch.zeros(64), race=race, schedule=schedule)


@BOTH
def test_a_product_of_different_matrices_is_found(race: bool) -> None:
    body = """
  simdgroup_matrix<float, 8, 8> a(1.0f);
  simdgroup_matrix<float, 8, 8> c[2];
  for (int j = 0; j < 2; j++) {
    c[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_multiply_accumulate(c[j], a, a, c[j]);
  }
  const uint k = lane < 16 ? 0 : 1;
  simdgroup_multiply_accumulate(c[k], a, a, c[k]);
  out[i] = c[0].thread_elements()[0] + c[1].thread_elements()[0];"""
    with pytest.raises(KernelFault, match="add a product to different matrices"):
        run(kernel(body), torch.zeros(64), race=race)


@BOTH
def test_a_product_in_an_incomplete_simdgroup_is_found(race: bool) -> None:
    body = """
  simdgroup_matrix<float, 8, 8> a(1.0f);
  simdgroup_multiply_accumulate(a, a, a, a);
  out[i] = a.thread_elements()[0];"""
    with pytest.raises(KernelFault, match="simdgroup of fewer than 32 threads"):
        run(kernel(body), torch.zeros(64), threads=48, group=48, race=race)


# Arithmetic and control


@BOTH
def test_a_division_of_integers_by_zero_is_found(race: bool) -> None:
    source = kernel("out[i] = float(10 / (int)in[i]);", ", device const float* in [[buffer(1)]]")
    with pytest.raises(KernelFault, match=r"divides an integer by zero|Metal leaves undefined"):
        run(source, torch.zeros(64), torch.zeros(64), race=race)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(int)in[i] + 2147483647", 1.0), ("1 << (int)in[i]", 32.0), ("(int)in[i]", 3e9)],
    ids=["overflow", "shift", "conversion"],
)
def test_arithmetic_that_metal_leaves_undefined_is_found_in_the_race_build(
    expression: str, value: float
) -> None:
    source = kernel(f"out[i] = float({expression});", ", device const float* in [[buffer(1)]]")
    run(source, torch.zeros(64), torch.ones(64), race="int)in[i]" not in expression)
    with pytest.raises(KernelFault, match="what Metal leaves undefined") as raised:
        run(source, torch.zeros(64), torch.full((64,), value), race=True)
    assert raised.value.lines == (line_of(source, expression),)


@BOTH
def test_an_endless_loop_ends(race: bool) -> None:
    source = kernel("while (out[i] == 0.0f) out[i] = -0.0f;")
    with pytest.raises(KernelFault, match=r"stopped after 0.2"):
        run(source, torch.zeros(64), seconds=0.2, race=race)


@BOTH
def test_a_recursion_without_end_is_found(race: bool) -> None:
    functions = """
static __attribute__((noinline)) float deep(float x, device float* out) {
  volatile float y[64];
  y[int(x) % 64] = x;
  out[0] = x;
  return deep(x + 1.0f, out) + y[0];
}"""
    with pytest.raises(KernelFault, match="overflows its stack"):
        run(kernel("out[i] = deep(1.0f, out);", "", functions), torch.zeros(64), race=race)


# Compile errors


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float* p = out; p[0] = 0.0f;",
        "device float* p = F; p[0] = 0.0f;",
        "F[0] = 1.0f;",
        "float* p = out; p[0] = 0.0f;",
        "out[i] = max(out[i], (half)1.0f);",
        "out[i] = min(1, 2u);",
        "simdgroup_matrix<half, 8, 8> m; simdgroup_load(m, out);",
        "atomic_fetch_add_explicit((device atomic_int*)F, 1, memory_order_relaxed);"
        " atomic_fetch_max_explicit((device atomic_float*)out, 1.0f, memory_order_relaxed);",
        "threadgroup atomic_float x; atomic_fetch_add_explicit(&x, 1.0f, memory_order_relaxed);",
        "out[i] = sin(1);",
    ],
)
def test_what_metal_refuses_is_a_compile_error(body: str, race: bool) -> None:
    with pytest.raises(SyntaxError, match="error: "):
        compile_shader(kernel(body, ", constant float* F [[buffer(1)]]"), race=race)


def test_a_compile_error_names_the_line() -> None:
    source = kernel("out[i] = nothing;")
    with pytest.raises(SyntaxError, match=f"kernel.metal:{line_of(source, 'nothing')}:"):
        compile_shader(source)


# The process lives on


def test_faults_leave_the_process_as_it_was() -> None:
    bad = kernel("out[i + 1] = 1.0f;")
    good = kernel("out[i] = float(i);")
    for _ in range(50):
        with pytest.raises(KernelFault):
            run(bad, torch.zeros(64))
        out = torch.zeros(64)
        run(good, out)
        assert out.equal(torch.arange(64.0))


def test_a_fault_of_somebody_else_is_not_caught() -> None:
    script = f"""
import sys, ctypes, torch
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from matmul_kernel import largest_error
largest_error()
ctypes.string_at(8)
"""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ.copy(), check=False)
    assert done.returncode == -11


def test_a_thread_may_run_a_kernel_while_the_process_ends() -> None:
    # Exit would destroy what is in use: fibers vanish, and the launch faults or crashes.
    library = str(runtime_library())
    done = subprocess.run(["nm", "-D", "-u", library], capture_output=True, text=True, check=True)
    assert "memcpy" in done.stdout and "__cxa_atexit" not in done.stdout


def test_the_unchanged_kernel_has_no_fault() -> None:
    assert all(largest_error(MATMUL, race=True, schedule=s) < 2e-5 for s in SCHEDULES)
