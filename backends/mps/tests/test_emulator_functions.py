"""Metal's library as the emulator has it, against float64 and plain Python."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from emulator import SCHEDULES, compile_shader
from emulator.requirement import require_emulator
from metal_expressions import HEAD, computed

BOTH = pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    require_emulator()


FLOATS = {
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2,
    "log10": torch.log10, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan, "sinh": torch.sinh, "cosh": torch.cosh,
    "tanh": torch.tanh, "atan": torch.atan, "asinh": torch.asinh, "floor": torch.floor,
    "ceil": torch.ceil, "trunc": torch.trunc, "rint": torch.round, "fabs": torch.abs,
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "fast::", "precise::"])
def test_functions_of_floats_are_right_to_two_ulps(prefix: str) -> None:
    x = torch.rand(100, generator=torch.Generator().manual_seed(0)) * 6 + 0.01
    seen = computed([f"{prefix}{name}(x)" for name in FLOATS], x)
    for row, function in zip(seen, FLOATS.values(), strict=True):
        expected = function(x.double())
        assert ((row - expected).abs() <= expected.abs() * 2.0**-22).all()


@pytest.mark.parametrize(("type_", "dtype"), [("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_functions_of_halves_round_once(type_: str, dtype: torch.dtype) -> None:
    x = (torch.rand(100, generator=torch.Generator().manual_seed(0)) * 6 + 0.1).to(dtype)
    seen = computed([f"{name}(x)" for name in FLOATS], x, type_, type_, dtype)
    for row, function in zip(seen, FLOATS.values(), strict=True):
        # Rounding float32's value to a half may differ where that of float64 is halfway.
        assert (row == function(x.double()).to(dtype)).float().mean() > 0.98


@pytest.mark.parametrize(("type_", "dtype"), [("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_each_operation_of_halves_is_rounded(type_: str, dtype: torch.dtype) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    (seen,) = computed(["x * x + x"], x, type_, type_, dtype)
    assert seen.equal(x * x + x)


def test_special_floats_are_kept() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.5, 1.5, -0.0])
    seen = computed(
        ["isnan(x)", "isinf(x)", "isfinite(x)", "signbit(x)", "max(x, 1.0f)", "min(1.0f, x)",
         "x - x", "rint(x)", "round(x)", "clamp(x, -1.0f, 1.0f)", "select(1.0f, 2.0f, x > 1.0f)",
         "copysign(3.0f, x)", "fmin(x, 0.0f)", "abs(x)"], x
    )  # fmt: skip
    nan = math.nan
    expected = [
        [0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 1],
        [math.inf, 1, 1, 1, 1.5, 1], [1, -math.inf, 1, 0.5, 1, 0], [nan, nan, nan, 0, 0, 0],
        [math.inf, -math.inf, nan, 0, 2, 0], [math.inf, -math.inf, nan, 1, 2, 0],
        [1, -1, -1, 0.5, 1, 0], [2, 1, 1, 1, 2, 1], [3, -3, 3, 3, 3, -3],
        [0, -math.inf, 0, 0, 0, 0], [math.inf, math.inf, nan, 0.5, 1.5, 0],
    ]  # fmt: skip
    assert torch.allclose(seen, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_literals_have_metals_types() -> None:
    expressions = [
        "0.1 + x",
        ".1",
        "1e-3",
        "1.",
        "1.0h / 3.0h",
        "1.0bf / 3.0bf",
        "0x10",
        "3 / 2",
        "1.5f",
        "sizeof(1.0)",
        "sizeof(1.0h)",
    ]
    seen = computed(expressions, torch.zeros(1))[:, 0].tolist()
    thirds = [(torch.ones((), dtype=d) / 3).item() for d in (torch.float16, torch.bfloat16)]
    single = [torch.tensor(value).item() for value in (0.1, 0.1, 1e-3)]
    assert seen == [*single, 1.0, *thirds, 16.0, 1.0, 1.5, 4.0, 2.0]


INTEGERS = {
    "char": torch.int8, "uchar": torch.uint8, "short": torch.int16, "int": torch.int32,
    "long": torch.int64,
}  # fmt: skip


@pytest.mark.parametrize("type_", INTEGERS)
def test_functions_of_integers_count_the_types_bits(type_: str) -> None:
    dtype = INTEGERS[type_]
    bits = 8 * dtype.itemsize
    values = [0, 1, 2, 100, torch.iinfo(dtype).max, torch.iinfo(dtype).min]
    seen = computed(
        ["popcount(x)", "clz(x)", "ctz(x)", "abs(x)", f"max(x, ({type_})3)", "sizeof(x)"],
        torch.tensor(values, dtype=dtype), type_, "long", torch.int64, race=False,
    )  # fmt: skip
    unsigned = [value % 2**bits for value in values]
    assert seen[0].tolist() == [bin(value).count("1") for value in unsigned]
    assert seen[1].tolist() == [bits - value.bit_length() for value in unsigned]
    assert seen[2].tolist() == [
        bits if not value else (value & -value).bit_length() - 1 for value in unsigned
    ]
    assert seen[3][:5].tolist() == [abs(value) for value in values[:5]]
    assert seen[4].tolist() == [max(value, 3) for value in values]
    assert seen[5].tolist() == [dtype.itemsize] * 6


def test_integers_of_all_widths_convert_and_wrap() -> None:
    x = torch.tensor([0, 1, -1, 1 << 40, -(1 << 63)])
    expressions = [
        "(char)x", "(uchar)x", "(short)x", "(ushort)x", "(int)x", "(uint)x", "(long)(ulong)x",
        "(long)((ulong)x * 3ul)", "mulhi((uint)x, 0x80000000u)", "mulhi(-1, (int)x)",
    ]  # fmt: skip
    seen = computed(expressions, x, "long", "long", torch.int64).T.tolist()

    def wrapped(value: int, bits: int, signed: bool) -> int:
        value %= 1 << bits
        return value - (1 << bits) if signed and value >> (bits - 1) else value

    for value, row in zip(x.tolist(), seen, strict=True):
        assert row == [
            wrapped(value, 8, True), wrapped(value, 8, False), wrapped(value, 16, True),
            wrapped(value, 16, False), wrapped(value, 32, True), wrapped(value, 32, False),
            value, wrapped(value * 3, 64, True), wrapped(value, 32, False) >> 1,
            -wrapped(value, 32, True) >> 32,
        ]  # fmt: skip


def test_bits_are_reinterpreted() -> None:
    x = torch.tensor([1.5, -0.0, math.inf])
    seen = computed(["as_type<uint>(x)"], x, "float", "uint", torch.uint32)
    assert seen[0].tolist() == [struct.unpack("<I", struct.pack("<f", v))[0] for v in x.tolist()]
    (back,) = computed(["as_type<float>(0x7f800000u)"], x)
    assert back.isinf().all()


def test_vectors_have_constructors_and_swizzles() -> None:
    expressions = [
        "float4(x).w", "float4(float2(x, 2.0f), 3.0f, 4.0f).zy.x", "dot(float3(x), float3(2.0f))",
        "half2(half(x), 1.0h).x", "float(uint3(1u, 2u, 3u).y)", "any(bool3(false, x > 0.0f, 0))",
        "all(bool2(true, x > 5.0f))", "float2(float4(1.0f, x, 3.0f, 4.0f).xy).y",
        "float(ulong2(1ul << 40, 2ul).x >> 40)",
    ]  # fmt: skip
    seen = computed(expressions, torch.tensor([5.0]))[:, 0].tolist()
    assert seen == [5.0, 3.0, 30.0, 5.0, 2.0, 1.0, 0.0, 5.0, 1.0]


# Simdgroups


def lanes(expression: str, count: int = 32, **how: object) -> list[float]:
    """Return an expression of `lane` in each of a threadgroup's threads."""
    source = f"""{HEAD}
kernel void lanes(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{{
  out[t] = float({expression});
}}"""
    out = torch.zeros(count)
    compile_shader(source, **how).lanes(out, threads=count, group_size=count)  # type: ignore[arg-type]
    return out.tolist()


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_sum(float(lane))", [496.0] * 32),
        ("simd_sum((int)lane - 20)", [496.0 - 640.0] * 32),
        ("simd_max(float(lane % 7))", [6.0] * 32),
        ("simd_min(3 - (int)lane)", [-28.0] * 32),
        ("simd_broadcast(float(lane), (ushort)5)", [5.0] * 32),
        ("simd_broadcast_first(float(lane + 1))", [1.0] * 32),
        ("simd_shuffle(float(lane), (ushort)(31 - lane))", [31.0 - i for i in range(32)]),
        ("simd_shuffle_xor(float(lane), (ushort)8)", [float(i ^ 8) for i in range(32)]),
        ("simd_shuffle_down(float(lane), (ushort)1)", [*map(float, range(1, 32)), 31.0]),
        ("simd_shuffle_up(float(lane), (ushort)1)", [0.0, *map(float, range(31))]),
        ("simd_all(lane < 31)", [0.0] * 32),
        ("simd_any(lane == 31)", [1.0] * 32),
    ],
)
def test_simdgroup_functions(
    expression: str, expected: list[float], schedule: str, race: bool
) -> None:
    assert lanes(expression, schedule=schedule, race=race) == expected


def test_simdgroup_reductions_of_a_part_leave_missing_lanes_out() -> None:
    assert lanes("simd_sum(1.0f)", 40) == [32.0] * 32 + [8.0] * 8
    assert lanes("simd_max((int)lane)", 40) == [31.0] * 32 + [7.0] * 8
    assert all(map(math.isnan, lanes("simd_broadcast(1.0f, (ushort)20)", 8)))


# Atomics


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("space", ["device", "threadgroup"])
@pytest.mark.parametrize("type_", ["int", "uint"])
def test_atomics_of_integers(type_: str, space: str, schedule: str, race: bool) -> None:
    relaxed = "memory_order_relaxed"
    source = f"""{HEAD}
kernel void atomics(device atomic_{type_}* out [[buffer(0)]],
    device {type_}* before [[buffer(1)]], uint t [[thread_index_in_threadgroup]])
{{
  threadgroup atomic_{type_} shared[6];
  {space} atomic_{type_}* at = {"out" if space == "device" else "shared"};
  if (t < 6) atomic_store_explicit(&at[t], ({type_})(t == 2 ? 100 : t == 4 ? 255 : 0), {relaxed});
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  before[t] = atomic_fetch_add_explicit(&at[0], ({type_})1, {relaxed});
  atomic_fetch_max_explicit(&at[1], ({type_})(t % 50), {relaxed});
  atomic_fetch_min_explicit(&at[2], ({type_})(t + 7), {relaxed});
  atomic_fetch_or_explicit(&at[3], ({type_})(1 << t % 8), {relaxed});
  atomic_fetch_and_explicit(&at[4], ({type_})(255 - t % 4), {relaxed});
  {type_} seen = atomic_load_explicit(&at[5], {relaxed});
  while (!atomic_compare_exchange_weak_explicit(
      &at[5], &seen, seen + ({type_})t, {relaxed}, {relaxed})) {{ }}
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  if (t < 6) atomic_store_explicit(&out[t], atomic_load_explicit(&at[t], {relaxed}), {relaxed});
}}"""
    dtype = {"int": torch.int32, "uint": torch.uint32}[type_]
    out, before = torch.zeros(6, dtype=dtype), torch.zeros(64, dtype=dtype)
    compile_shader(source, race=race, schedule=schedule).atomics(
        out, before, threads=64, group_size=64
    )
    assert out.tolist() == [64, 49, 7, 255, 252, sum(range(64))]
    assert sorted(before.tolist()) == list(range(64))


@BOTH
def test_a_sum_of_64_bits_in_two_words_is_exact_in_every_schedule(race: bool) -> None:
    source = f"""{HEAD}
kernel void total(device const ulong* in [[buffer(0)]], device atomic_uint* out [[buffer(1)]],
    uint i [[thread_position_in_grid]])
{{
  const uint low = (uint)in[i], high = (uint)(in[i] >> 32);
  const uint old = atomic_fetch_add_explicit(&out[0], low, memory_order_relaxed);
  const uint carry = old + low < low ? 1u : 0u;
  atomic_fetch_add_explicit(&out[1], high + carry, memory_order_relaxed);
}}"""
    values = torch.randint(-(1 << 62), 1 << 62, (256,), generator=torch.Generator().manual_seed(0))
    for schedule in SCHEDULES:
        out = torch.zeros(2, dtype=torch.uint32)
        compile_shader(source, race=race, schedule=schedule).total(
            values, out, threads=256, group_size=64
        )
        low, high = out.tolist()
        assert (high << 32 | low) == sum(values.tolist()) % 2**64


@BOTH
def test_floats_add_on_device_memory(race: bool) -> None:
    source = f"""{HEAD}
kernel void total(device const float* in [[buffer(0)]], device atomic_float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]])
{{
  atomic_fetch_add_explicit(out + i % 2, in[i], memory_order_relaxed);
  atomic_fetch_sub_explicit(out + 2, in[i], memory_order_relaxed);
}}"""
    x, out = torch.arange(256.0), torch.zeros(3)
    compile_shader(source, race=race).total(x, out, threads=256, group_size=64)
    assert out.tolist() == [x[0::2].sum(), x[1::2].sum(), -x.sum()]


# Matrices


MATRICES = f"""{HEAD}
kernel void matrices(device const TYPE* A [[buffer(0)]], device const TYPE* B [[buffer(1)]],
    device TYPE* out [[buffer(2)]], device float* elements [[buffer(3)]],
    uint lane [[thread_index_in_simdgroup]])
{{
  threadgroup TYPE t[80];
  simdgroup_matrix<TYPE, 8, 8> a;
  simdgroup_matrix<TYPE, 8, 8> b;
  simdgroup_matrix<TYPE, 8, 8> c;
  simdgroup_load(a, A, 16, ulong2(8, 2));
  simdgroup_load(b, B, 8, ulong2(0), true);
  simdgroup_multiply(c, a, b);
  simdgroup_store(c, out, 8);
  simdgroup_store(c, t, 10, ulong2(0), true);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(a, t, 10);
  simdgroup_matrix<TYPE, 8, 8> twice((TYPE)2.0f);
  simdgroup_multiply_accumulate(c, a, twice, c);
  simdgroup_store(c, out + 64, 8);
  elements[2 * lane] = float(c.thread_elements()[0]);
  elements[2 * lane + 1] = float(c.thread_elements()[1]);
}}"""


@BOTH
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("type_", "dtype"),
    [("float", torch.float32), ("half", torch.float16), ("bfloat", torch.bfloat16)],
)
def test_matrices_load_multiply_and_store(
    type_: str, dtype: torch.dtype, schedule: str, race: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, s, generator=random).to(dtype) for s in ((10, 16), (8, 8)))
    out = torch.full((2, 8, 8), float("nan"), dtype=dtype)
    elements = torch.full((32, 2), float("nan"))
    source = MATRICES.replace("TYPE", type_)
    compile_shader(source, race=race, schedule=schedule).matrices(
        a, b, out, elements, threads=32, group_size=32
    )
    product = a[2:, 8:].float() @ b.float().T
    second = product + 2 * product.T
    assert out[0].float().equal(product)
    assert out[1].float().equal(second)
    lane = torch.arange(32)
    row = (lane // 4 & 4) + lane // 2 % 4
    column = (lane // 4 & 2) * 2 + lane % 2 * 2
    assert elements.equal(torch.stack([second[row, column], second[row, column + 1]], 1))
