"""Reading Metal source: kernels, parameters and what is rewritten."""

from __future__ import annotations

import pytest
from emulator.metal_source import (
    CONSTANT,
    READ_ONLY,
    WRITABLE,
    Buffer,
    as_cpp,
    blank_comments,
    granule_shift,
    kernels_of,
    split_list,
)

SOURCE = """
// kernel void commented(device float* out [[buffer(0)]]) {}
/* kernel void
   commented_too() { */
kernel void first(
    device const float* in [[buffer(0)]], device float * out [[ buffer(1) ]],
    const device half* halves [[buffer(2)]], constant float& f [[buffer(3)]],
    const constant long* P [[buffer(4)]], device float const* other [[buffer(5)]],
    uint3 i [[thread_position_in_grid]], ushort2 g [[threadgroup_position_in_grid]],
    uint width [[threads_per_simdgroup]], uint x [[threads_per_grid]])
{
  threadgroup float a[4], b;
  threadgroup metal::vec<float, 2> c[2][3];
  threadgroup float* p = a;
}
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(32)]] void second(device T* out) { }
[[kernel]] void third(device float* out, constant int& n) { if (n) { out[0] = 1.5; } }
"""


def test_kernels_and_their_buffers_are_read() -> None:
    kernels = kernels_of(SOURCE)
    assert list(kernels) == ["first", "second", "third"]
    assert kernels["first"].buffers == (
        Buffer(0, "in", READ_ONLY, False),
        Buffer(1, "out", WRITABLE, False),
        Buffer(2, "halves", READ_ONLY, False),
        Buffer(3, "f", CONSTANT, True),
        Buffer(4, "P", CONSTANT, False),
        Buffer(5, "other", READ_ONLY, False),
    )
    assert kernels["first"].arguments[6:] == (
        "(uint3)(emulated_current->position_in_grid)",
        "(ushort2)(emulated_current->group_position.xy)",
        "32u",
        "(uint)(emulated_current->threads_per_grid.x)",
    )
    assert [kernel.is_template for kernel in kernels.values()] == [False, True, False]
    assert kernels["third"].buffers == (
        Buffer(0, "out", WRITABLE, False),
        Buffer(1, "n", CONSTANT, True),
    )


def test_a_kernel_ends_at_its_brace() -> None:
    for kernel in kernels_of(SOURCE).values():
        text = SOURCE[kernel.begin : kernel.end + 1]
        assert text.endswith("}")
        assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("float* out", "neither device, constant nor an attribute"),
        ("uint i [[thread_position_on_screen]]", "doesn't know the attribute"),
        ("texture2d<float> t [[texture(0)]]", "doesn't know the attribute"),
    ],
)
def test_a_parameter_that_is_not_emulated_is_refused(parameter: str, says: str) -> None:
    with pytest.raises(SyntaxError, match=says):
        kernels_of(f"kernel void wrong({parameter}) {{ }}")


def test_an_open_bracket_is_refused_with_its_line() -> None:
    with pytest.raises(SyntaxError, match=r"no '}' closes the '{' of line 2"):
        kernels_of("\nkernel void wrong(device float* out [[buffer(0)]]) {")


def test_threadgroup_variables_become_registered_statics_and_pointers_stay() -> None:
    cpp = as_cpp(SOURCE, kernels_of(SOURCE))
    for name in ("a[4]", "b", "c[2][3]"):
        assert f" {name} EMULATED_THREADGROUP_SECTION = {{}};" in cpp
    assert '{"first", "a", (void*)&a, sizeof(a)}' in cpp
    assert "threadgroup float* p = a;" in cpp


def test_lines_keep_their_numbers() -> None:
    cpp = as_cpp(SOURCE, kernels_of(SOURCE)).split("\n")
    for number, line in enumerate(SOURCE.split("\n")):
        if "threadgroup" not in line:
            assert cpp[number].replace("1.5f", "1.5") == line


@pytest.mark.parametrize(
    ("literal", "cpp"),
    [
        ("1.0", "1.0f"), ("1.", "1.f"), (".5", ".5f"), ("1e3", "1e3f"), ("2.5e-3", "2.5e-3f"),
        ("1.0f", "1.0f"), ("1.0h", "half(1.0f)"), ("1.0bf", "bfloat(1.0f)"), ("10", "10"),
        ("0x1e5", "0x1e5"), ("7u", "7u"), ("v.x", "v.x"), ("a[1].y", "a[1].y"), ("x1e3", "x1e3"),
    ],
)  # fmt: skip
def test_literals_of_floats_are_no_doubles(literal: str, cpp: str) -> None:
    assert as_cpp(f"y = {literal};", {}).startswith(f"y = {cpp};")


def test_comments_are_blanked_in_place() -> None:
    text = "a // b\nc /* d\ne */ f"
    assert blank_comments(text) == "a     \nc     \n     f"


def test_lists_split_outside_of_brackets() -> None:
    assert split_list("a, vec<int, 2> b, f(c, d), {e, g}, ") == [
        "a", "vec<int, 2> b", "f(c, d)", "{e, g}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "shift"),
    [
        ("device float* x; bool f(int y); // char half", 2),
        ("device half* x;", 1),
        ("threadgroup bfloat4 x;", 1),
        ("device const uchar* t0;", 0),
        ("threadgroup bool flags[4];", 0),
        ("device bool* flags;", 0),
    ],
)
def test_accesses_are_tracked_by_the_smallest_element(source: str, shift: int) -> None:
    assert granule_shift(source) == shift
