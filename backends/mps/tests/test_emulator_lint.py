"""Source rules: each has a text that breaks it and one that doesn't."""

from __future__ import annotations

import pytest
from emulator.lint import RULES, Finding, conversions, findings
from emulator.requirement import require_emulator
from matmul_kernel import MATMUL
from tensor_kernel import TENSORS

GOOD = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

// A comment may say double, std::vector or goto.
static inline float twice(float x, device const float* t0, constant long* P) {
  const float y = x * 2.0f;
  return t0[P[0]] > 0.0f ? y : -y;
}

kernel void scale(
    device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
    constant long* P [[buffer(2)]],
    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]])
{
  threadgroup float x[64];
  threadgroup uint count;
  const bool live = (long)i < P[1];
  x[t] = live ? in[i] : 0.0f;
  if (t == 0) count = 0u;
  for (int k = 0; k < 2; k++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  simdgroup_matrix<float, 8, 8> m(1.0f);
  const int small = min(max((int)i, 0), 0x7fffffff);
  const ulong wide = 0xffffffffffu;
  const float nan = as_type<float>(0x7fc00000u);
  device float* to = out + small;
  const float p = x[t] * nan;
  float y = 1e-3f * twice(x[t], in, P);
  y = select(y, p, wide == 0ul) + m.thread_elements()[0];
  if (live) {
    *to = clamp(y, -1.0f, 1.0f);
    return;
  }
}
"""

HEAD = GOOD[: GOOD.index("// A comment")]

BAD = [
    ("ascii", "const bool live", "const float \u03b1 = 0.0f; const bool live", "isn't ASCII"),
    ("pragma", "#pragma METAL fp contract(off)\n", "", "contract(off)' before the first function"),
    ("pragma", "math_mode(safe)", "math_mode(fast)", "math_mode(safe)' before the first function"),
    ("forbidden-word", "const float y = x", "const double y = x", "Metal has no double"),
    ("forbidden-word", "const bool live =", "auto live =", "types are written out"),
    ("forbidden-word", "const bool live =", "goto end; const bool live =", "Metal has no goto"),
    ("forbidden-word", "x * 2.0f", "std::max(x, 2.0f)", "Metal has no std::"),
    ("forbidden-word", "static inline", "template <class T> inline", "no templates"),
    ("forbidden-word", "const ulong wide", "const long  long wide", "Metal has no long long"),
    (
        "lambda",
        "const float y = x * 2.0f",
        "const float y = [=](float z) { return z; }(x)",
        "no l",
    ),
    ("local-static", "const float y =", "static float y =", "no static variables in functions"),
    ("reserved-name", "const bool live =", "int device = 0; const bool live =", "'device' is res"),
    ("reserved-name", "int k = 0; k < 2; k++", "int vertex = 0; vertex < 2; vertex++", "'vertex'"),
    ("reserved-name", "float twice(", "float texture(", "'texture' is reserved"),
    ("unqualified-pointer", ", device const float* t0", ", const float* t0", "no address space"),
    (
        "unqualified-pointer",
        "device float* to =",
        "float* to =",
        "no address space",
    ),
    ("unqualified-pointer", "float twice(float x", "float twice(float& x", "no address space"),
    ("float-literal", "x * 2.0f", "x * 2.0", "'2.0' lacks its f"),
    ("float-literal", "1e-3f", "1e-3", "'1e-3' lacks its f"),
    ("integer-literal", "0xffffffffffu", "0xffffffffff", "lacks its u or l"),
    ("integer-literal", "0x7fffffff)", "2147483648)", "'2147483648' lacks its u or l"),
    ("buffers", "P [[buffer(2)]]", "P [[buffer(3)]]", "scale has buffers [0, 1, 3]"),
    ("buffers", "P [[buffer(2)]]", "P", "has no [[attribute]]"),
    ("threadgroup-array", "float x[64]", "float x[32 * 2]", "'32 * 2' of 'x' isn't a literal"),
    (
        "threadgroup-array",
        "for (int k = 0",
        "threadgroup float late[2];\n  for (int k = 0",
        "'late' isn't declared before the kernel's other statements",
    ),
    (
        "threadgroup-array",
        "const float y =",
        "threadgroup float z[1]; const float y =",
        "'z' isn't",
    ),
    ("recursion", "x * 2.0f;", "twice(x, t0, P);", "twice calls itself"),
    ("mixed-operands", "max((int)i, 0)", "max((int)i, 0u)", "max of int and uint"),
    ("mixed-operands", "clamp(y, -1.0f, 1.0f)", "clamp(y, -1, 1.0f)", "clamp of float and int"),
    (
        "mixed-operands",
        "select(y, p, wide",
        "select(0.0f, half(p), wide",
        "select of float and half",
    ),
    ("barrier-in-branch", "  for (int k", "  if (live)\n  for (int k", "a barrier in a branch"),
    ("barrier-in-branch", "  for (int k", "  if (live) { } else\n  for (int k", "a barrier in a"),
    ("early-return", "  for (int k", "  if (!live) return;\n  for (int k", "before a barrier"),
    ("unknown-function", "twice(x[t], in, P)", "expm1(x[t])", "expm1 isn't known"),
]


def test_a_good_text_has_no_finding() -> None:
    assert findings(GOOD) == []
    assert findings(MATMUL) == []
    assert findings(TENSORS) == []


@pytest.mark.parametrize(("rule", "old", "new", "says"), BAD)
def test_a_breach_is_named_with_its_line(rule: str, old: str, new: str, says: str) -> None:
    assert GOOD.count(old) == 1
    source = GOOD.replace(old, new)
    found = [finding for finding in findings(source) if finding.rule == rule]
    assert len(found) == 1
    assert says in str(found[0])
    line = GOOD.count("\n", 0, GOOD.index(old)) + 1
    assert rule in ("pragma", "buffers") or abs(found[0].line - line) <= 2


def test_every_rule_has_a_breach() -> None:
    assert {rule for rule, *_ in BAD} == set(RULES)


def test_thirty_two_buffers_are_too_many() -> None:
    def kernel(count: int) -> str:
        buffers = ", ".join(f"device float* b{i} [[buffer({i})]]" for i in range(count))
        return f"{HEAD}kernel void many({buffers}) {{ b0[0] = 1.0f; }}"

    assert findings(kernel(31)) == []
    assert any("many has 32 buffers, of 31" in str(finding) for finding in findings(kernel(32)))


def test_a_lossy_implicit_conversion_is_named() -> None:
    require_emulator()
    assert conversions(GOOD) == []
    source = GOOD.replace("min(max((int)i, 0), 0x7fffffff)", "P[0]")
    line = source[: source.index("= P[0]")].count("\n") + 1
    (found,) = conversions(source)
    assert found.line == line
    assert "implicit conversion loses integer precision" in found.text
    assert found.rule == "conversion"
    assert isinstance(found, Finding)
