"""Parts of sources: what is compiled once for many, and that messages name the source's lines."""

from __future__ import annotations

import pytest
import torch
from emulator import Instance, KernelFault, Numerics, compile_shader
from emulator.metal_source import kernels_of
from emulator.parts import FUNCTIONS, KERNELS, Part, parts_of

SOURCE = """#include <metal_stdlib>
using namespace metal;
#pragma METAL fp contract(off)

// Both of these are called by themselves.
static inline float helper(float x) {
  return x * 2.0;
}

static inline float score(
    float x, device const float* table, uint i) {
  return helper(x) + table[i];
}

static inline void load(threadgroup float* into, device const float* from, uint t) {
  into[t] = from[t];
}

static inline void load_two(threadgroup float* into, device const float* from, uint t) {
  load(into, from, t);
  load(into, from, t + 32);
}

kernel void scores(
    device float* out [[buffer(0)]], device const float* table [[buffer(1)]],
    uint t [[thread_position_in_grid]]) {
  threadgroup float rows[64];
  load_two(rows, table, t);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = score(rows[63 - t], table, t);
}
"""


def parts(source: str = SOURCE, **how: bool) -> tuple[Part, ...]:
    return parts_of(source, kernels_of(source), **how)


def run(source: str, *, race: bool = True) -> None:
    table = torch.arange(64.0)
    out = torch.full((32,), torch.nan)
    compile_shader(source, race=race).scores(out, table, threads=32, group_size=32)
    assert out.equal(2 * table.flip(0)[:32] + table[:32])


def test_functions_that_a_thread_runs_by_itself_are_a_part() -> None:
    kernels, functions = parts()
    assert (kernels.file, functions.file) == (KERNELS, FUNCTIONS)
    assert "float helper(float x) {" in functions.body and "x * 2.0f;" in functions.body
    for text in ("load", "scores", "threadgroup"):
        assert text not in functions.body
    assert kernels.body.startswith("static inline void load(")
    assert "helper" not in kernels.cpp and "return" not in kernels.body
    # The kernels' part declares what it calls, as the other defines it.
    hidden = '__attribute__((visibility("hidden"))) float score(\n    float x, '
    assert hidden in kernels.before and hidden in functions.body


@pytest.mark.parametrize("race", [False, True])
def test_parts_compute_what_the_source_says(race: bool) -> None:
    run(SOURCE, race=race)


@pytest.mark.parametrize("longer", ["return 3.0 * x;", "x = x + 1.0;\n  return x;"])
def test_a_kernel_is_the_same_whatever_its_functions_do(longer: str) -> None:
    other = SOURCE.replace("return x * 2.0;", longer)
    assert other != SOURCE
    assert parts(other)[0].cpp == parts()[0].cpp
    assert parts(other)[1].cpp != parts()[1].cpp


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("helper(x) + table[i];", "helper(x) + table[i + 99];"),
        ("  out[t] = score(", "  out[t + 1] = score("),
        ("  into[t] = from[t];", "  into[t] = from[t + 64];"),
    ],
    ids=["function", "kernel", "function of a threadgroup"],
)
def test_a_fault_names_the_line_of_the_source(now: str, then: str) -> None:
    source = SOURCE.replace(now, then)
    with pytest.raises(KernelFault) as raised:
        run(source)
    line = source[: source.index(then) + len(then)].count("\n") + 1
    assert line in raised.value.lines and f"line {line}: " in str(raised.value)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("now", ["table[i]", "rows[63 - t]"])
def test_a_compile_error_names_the_line_of_the_source(now: str, race: bool) -> None:
    source = SOURCE.replace(now, "nothing[0]")
    line = source[: source.index("nothing")].count("\n") + 1
    with pytest.raises(SyntaxError, match=f"kernel.metal:{line}:"):
        compile_shader(source, race=race)


def test_address_spaces_hold_between_the_parts() -> None:
    source = SOURCE.replace("score(rows[63 - t], table, t)", "score(1.0f, rows, t)")
    with pytest.raises(SyntaxError, match="error: "):
        compile_shader(source, race=True)


@pytest.mark.parametrize(
    "more",
    [
        "constant float table[2] = {1.0f, 2.0f};\n",
        "#define TWO 2\n",
        "static inline float score(float x) {\n  return x;\n}\n",
        "float other(float x) {\n  return x;\n}\n",
        "template <typename T>\nkernel void any(device T* out [[buffer(0)]]) { out[0] = T(1); }\n",
    ],
    ids=["table", "macro", "overload", "other function", "template"],
)
def test_any_other_source_is_one_part(more: str) -> None:
    source = SOURCE.replace("kernel void scores(", f"{more}kernel void scores(")
    (whole,) = parts(source)
    assert (whole.file, whole.first_line) == (KERNELS, 1)
    run(source)


def test_instances_of_templates_are_one_part() -> None:
    instances = {"other": Instance("scores", "float")}
    assert len(parts_of(SOURCE, kernels_of(SOURCE), instances)) == 1


def test_products_and_sums_contract_across_functions() -> None:
    source = """#include <metal_stdlib>
using namespace metal;
static inline float square(float x) {
  return x * x;
}
kernel void rest(device float* out [[buffer(0)]], device const float* x [[buffer(1)]]) {
  out[0] = square(x[0]) - x[1];
}
"""
    x = torch.tensor([1.0 + 2**-12, 1.0 + 2**-11])

    def rest(numerics: Numerics) -> float:
        out = torch.zeros(1)
        compile_shader(source, numerics=numerics).rest(out, x, threads=1, group_size=1)
        return out.item()

    assert rest(Numerics()) == 0
    assert rest(Numerics(contract=True)) == 2**-24
