"""Stand-in for torch.mps.compile_shader: torch's call, cast and dispatch rules."""

from __future__ import annotations

import mmap
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import emulator.compiling
import pytest
import torch
from emulator import EmulatedLibrary, compile_shader
from emulator.metal_source import kernels_of
from emulator.parts import parts_of
from emulator.requirement import require_emulator

SHOW = """
#include <metal_stdlib>
using namespace metal;
kernel void show(
    device float* out [[buffer(0)]], constant long& i [[buffer(1)]],
    constant float& f [[buffer(2)]], constant long* list [[buffer(3)]],
    constant int& narrow [[buffer(4)]], constant half& h [[buffer(5)]],
    uint at [[thread_position_in_grid]])
{
  out[at] = float(i) + f + float(list[at % 2]) + float(narrow) + float(h);
}
kernel void other(device float* out [[buffer(0)]]) { out[0] = 7.0f; }
"""
CASTS = {4: "int32", 5: "fp16"}


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    require_emulator()
    return compile_shader(SHOW)


def test_arguments_are_packed_and_cast_as_torch_does(library: EmulatedLibrary) -> None:
    x = torch.zeros(10)
    library.show(x[3:8], 1 << 20, 0.5, [7, 9], 3, 1.5, arg_casts=CASTS)
    expected = [(1 << 20) + 0.5 + y + 3 + 1.5 for y in (7, 9, 7, 9, 7)]
    assert x.tolist() == [0, 0, 0, *expected, 0, 0]


def test_a_bool_is_an_integer_of_64_bits(library: EmulatedLibrary) -> None:
    x = torch.zeros(1)
    library.show(x, True, 0.0, [0, 0], 0, 0.0, arg_casts=CASTS)
    assert x.item() == 1


@pytest.mark.parametrize(
    ("cast", "type_", "value", "seen"),
    [
        ("int32", "int", -3, -3),
        ("int16", "short", -3, -3),
        ("int8", "char", -3, -3),
        ("uint8", "uchar", 200, 200),
        ("fp16", "half", 1.0 + 2.0**-12, 1.0),
        ("bf16", "bfloat", 1.0 + 2.0**-9, 1.0),
        ("", "long", 1 << 40, float(1 << 40)),
        ("", "float", 0.1, torch.tensor(0.1).item()),
    ],
)
def test_each_cast_packs_its_type(
    cast: str, type_: str, value: float, seen: float, library: EmulatedLibrary
) -> None:
    source = f"""
#include <metal_stdlib>
using namespace metal;
kernel void one(device float* out [[buffer(0)]], constant {type_}& x [[buffer(1)]])
{{ out[0] = float(x); }}"""
    out = torch.zeros(1)
    compile_shader(source).one(out, value, arg_casts=cast)
    assert out.item() == seen


def test_the_first_element_decides_a_lists_type() -> None:
    source = """
#include <metal_stdlib>
using namespace metal;
kernel void two(device float* out [[buffer(0)]], constant float* x [[buffer(1)]])
{ out[0] = x[0] + x[1]; }"""
    require_emulator()
    out = torch.zeros(1)
    compile_shader(source).two(out, [0.5, 2])
    assert out.item() == 2.5


def good(**changes: object) -> tuple[list[object], dict[str, object]]:
    """Return arguments of `show`, some of them changed: positions as a0, a1, ..."""
    arguments: list[object] = [torch.zeros(4), 1, 2.0, [1, 2], 1, 1.0]
    keywords: dict[str, object] = {"arg_casts": CASTS}
    for name, value in changes.items():
        if name[0] == "a" and name[1:].isdigit():
            arguments[int(name[1:])] = value
        else:
            keywords[name] = value
    return arguments, keywords


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"a3": []}, RuntimeError, "Empty list/tuple can not be an argument"),
        ({"a3": "x"}, RuntimeError, "Unsupported argument type"),
        ({"a3": None}, RuntimeError, "Unsupported argument type"),
        (
            {"a3": [torch.zeros(1)]},
            NotImplementedError,
            "list of tensors: torch",
        ),
        (
            {"a3": [0] * 513},
            RuntimeError,
            "has 4104 bytes: setBytes takes 4096",
        ),
        ({"a0": torch.zeros(4).double()}, TypeError, "float64: Metal has no such type"),
        ({"a0": torch.zeros(4).cfloat()}, TypeError, "complex64: Metal has no such type"),
        ({"a0": torch.zeros(4, device="meta")}, TypeError, "is on meta: the emulator takes CPU"),
        ({"arg_casts": "fp8"}, RuntimeError, "Unsupported cast instruction fp8"),
        ({"group_size": [2048], "threads": [2048]}, ValueError, "exceeds 1024 limit"),
        ({"group_size": [2, 2], "threads": [4]}, RuntimeError, "differ in their number of dim"),
        ({"group_size": [0], "threads": [4]}, ValueError, "group_size must be positive"),
        ({"threads": [1, 1, 1, 1]}, RuntimeError, "wrong dimension"),
        ({"threads": [1 << 32]}, RuntimeError, "threads must be from 0 to 2^32 - 1"),
        ({"error_buf_idx": 1}, NotImplementedError, "error_buf_idx isn't emulated"),
    ],
)
def test_a_wrong_argument_is_refused(
    changes: dict[str, object],
    error: type[Exception],
    says: str,
    library: EmulatedLibrary,
) -> None:
    arguments, keywords = good(**changes)
    with pytest.raises(error) as raised:
        library.show(*arguments, **keywords)  # type: ignore[arg-type]
    assert says in str(raised.value)


def test_the_good_arguments_are_taken(library: EmulatedLibrary) -> None:
    arguments, keywords = good()
    library.show(*arguments, **keywords)  # type: ignore[arg-type]


def test_missing_arguments_are_counted(library: EmulatedLibrary) -> None:
    with pytest.raises(TypeError, match="show has 6 buffers and got 2 arguments"):
        library.show(torch.zeros(1), 1)


def test_an_unknown_kernel_is_refused_in_torchs_words(library: EmulatedLibrary) -> None:
    with pytest.raises(RuntimeError, match="Failed to create function state object for: nothing"):
        library.nothing  # noqa: B018
    assert dir(library) == ["other", "show"]


def test_a_library_makes_a_new_kernel_each_time(library: EmulatedLibrary) -> None:
    assert library.other is not library.other


def test_a_grid_without_threads_runs_nothing(library: EmulatedLibrary) -> None:
    x = torch.zeros(1)
    library.other(x, threads=[0, 1])
    assert x.item() == 0


def test_threads_default_to_the_first_tensors_elements_and_groups_to_the_limit() -> None:
    require_emulator()
    source = """
#include <metal_stdlib>
using namespace metal;
kernel void where(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]],
    uint group [[threadgroup_position_in_grid]], uint size [[threads_per_threadgroup]],
    uint groups [[threadgroups_per_grid]], uint all [[threads_per_grid]])
{ out[i] = int(group * 1000000 + size + groups * 100000000 + all % 7 * 10000); }"""
    out = torch.zeros(1500, dtype=torch.int32)
    compile_shader(source).where(out)
    expected = [g * 1000000 + s + 200000000 + 1500 % 7 * 10000 for g, s in ((0, 1024), (1, 476))]
    assert out.tolist() == [expected[0]] * 1024 + [expected[1]] * 476


def test_positions_of_three_dimensions_are_those_of_a_dispatch_of_threads() -> None:
    require_emulator()
    source = """
#include <metal_stdlib>
using namespace metal;
kernel void where(device int* out [[buffer(0)]], uint3 i [[thread_position_in_grid]],
    uint3 t [[thread_position_in_threadgroup]], uint3 g [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]],
    uint index [[thread_index_in_threadgroup]], uint2 plane [[threads_per_grid]],
    uint sgs [[simdgroups_per_threadgroup]])
{
  const uint at = (i.z * plane.y + i.y) * plane.x + i.x;
  const bool agree = g.x * 8 + t.x == i.x && g.y * 4 + t.y == i.y && g.z * 2 + t.z == i.z;
  out[at] = agree && lane == index % 32 && sg == index / 32 && sgs == 2 ? int(index) : -1;
}"""
    out = torch.full((4, 8, 16), -2, dtype=torch.int32)
    compile_shader(source).where(out, threads=[16, 8, 4], group_size=[8, 4, 2])
    z, y, x = torch.meshgrid(torch.arange(4), torch.arange(8), torch.arange(16), indexing="ij")
    assert out.equal((z % 2 * 32 + y % 4 * 8 + x % 8).int())


# Memory


COPY = """
#include <metal_stdlib>
using namespace metal;
kernel void copy(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
    constant long* P [[buffer(2)]], uint i [[thread_position_in_grid]])
{ out[(long)i * P[1]] = in[(long)i * P[0]] + 1.0f; }"""


@pytest.mark.parametrize("race", [False, True])
def test_tensors_that_share_memory_are_one_buffer(race: bool) -> None:
    require_emulator()
    x = torch.arange(8.0).view(4, 2)
    copy = compile_shader(COPY, race=race).copy
    copy(x[:, 0], x[:, 1], [2, 2], threads=4)
    assert x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    copy(x.view(-1), x.view(-1), [1, 1], threads=8)
    assert x.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_an_empty_tensor_may_be_bound() -> None:
    require_emulator()
    compile_shader(COPY).copy(torch.zeros(0), torch.zeros(0), [1, 1], threads=0)


def test_strides_past_32_bits_reach_sparse_memory() -> None:
    require_emulator()
    far = 1 << 33
    whole = sparse(far + 1)
    whole[far] = 41.0
    out = torch.zeros(2)
    rows = whole.as_strided((2,), (far,))
    for race in (False, True):
        compile_shader(COPY, race=race).copy(rows, out, [far, 1], threads=2)
        assert out.tolist() == [1.0, 42.0]


NORESERVE = 0x4000
"""Flag of mmap that newer Pythons name: memory that isn't written to costs nothing."""


def sparse(elements: int) -> torch.Tensor:
    """Return zeros whose pages exist once they are written to."""
    memory = mmap.mmap(-1, elements * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=torch.float32)


# Limits of a kernel


def threadgroup_kernel(floats: int) -> str:
    """Return a kernel with some threadgroup memory."""
    return f"""
#include <metal_stdlib>
using namespace metal;
kernel void big(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]])
{{
  threadgroup float x[{floats}];
  x[t] = 1.0f;
  out[t] = x[t];
}}"""


def test_threadgroup_memory_has_32768_bytes() -> None:
    require_emulator()
    kernel = compile_shader(threadgroup_kernel(8192)).big
    assert kernel.static_thread_group_memory_length == 32768
    assert kernel.max_threads_per_threadgroup == 1024
    assert kernel.thread_execution_width == 32
    library = compile_shader(threadgroup_kernel(8193))
    with pytest.raises(RuntimeError, match=r"Threadgroup memory size \(32784\) exceeds"):
        library.big  # noqa: B018


def test_kernels_of_one_source_count_their_own_threadgroup_memory() -> None:
    require_emulator()
    small = threadgroup_kernel(16).replace("void big", "void small")
    library = compile_shader(threadgroup_kernel(8192) + small)
    assert library.big.static_thread_group_memory_length == 32768
    assert library.small.static_thread_group_memory_length == 64


def buffers_kernel(count: int, first: int = 0) -> str:
    """Return a kernel with buffers from an index on."""
    parameters = ", ".join(f"device float* b{i} [[buffer({first + i})]]" for i in range(count))
    return f"#include <metal_stdlib>\nkernel void many({parameters}) {{ b0[0] = 1.0f; }}"


def test_a_kernel_has_at_most_31_buffers() -> None:
    require_emulator()
    tensors = [torch.zeros(1) for _ in range(31)]
    compile_shader(buffers_kernel(31)).many(*tensors)
    assert [tensor.item() for tensor in tensors] == [1.0] + [0.0] * 30
    with pytest.raises(SyntaxError, match="must be between 0 and 30"):
        compile_shader(buffers_kernel(32))


def test_indices_of_buffers_are_dense() -> None:
    with pytest.raises(SyntaxError, match=r"must be 0, 1, 2, ..., got \[1, 2\]"):
        compile_shader(buffers_kernel(2, first=1))


def test_a_source_that_is_not_ascii_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        compile_shader("// \u03b1")


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule must be one of"):
        compile_shader(SHOW, schedule="backwards")


def test_a_schedule_is_asked_for_at_each_launch() -> None:
    order = "forward"
    other = compile_shader(SHOW, schedule=lambda: order).other
    other(torch.zeros(1), threads=1, group_size=1)
    order = "backwards"
    with pytest.raises(ValueError, match=r"schedule must be one of .*, got 'backwards'"):
        other(torch.zeros(1), threads=1, group_size=1)


# The compiler


@pytest.fixture
def own_cache(
    library: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Path]:
    """Yield a cache folder that is in use and empty; the runtime's library is in the usual one."""
    memoized = [emulator.compiling._sources, emulator.compiling._flags, emulator.shaders._library]
    monkeypatch.setattr(emulator.compiling, "CACHE", tmp_path)
    for function in memoized:
        function.cache_clear()
    yield tmp_path
    for function in memoized:
        function.cache_clear()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that the emulator has started."""
    started = []
    real = emulator.compiling._run

    def counted(command: list[str], folder: Path | None = None) -> None:
        started.append(command[0])
        real(command, folder)

    monkeypatch.setattr(emulator.compiling, "_run", counted)
    return started


def test_a_library_is_compiled_once(own_cache: Path, commands: list[str]) -> None:
    compile_shader(SHOW)
    # The precompiled shim, the kernel and the linker.
    assert len(commands) == 3
    compile_shader(SHOW, schedule="random")
    assert len(commands) == 3
    compile_shader(SHOW, race=True)
    assert len(commands) == 6
    assert not list(own_cache.glob("tmp*"))


def test_a_kernel_is_compiled_once_for_all_functions_that_it_calls(
    own_cache: Path, commands: list[str]
) -> None:
    def run(result: str) -> torch.Tensor:
        source = f"""#include <metal_stdlib>
using namespace metal;
static inline float f(float x) {{
  return {result};
}}
kernel void scales(device float* out, uint i [[thread_position_in_grid]]) {{
  out[i] = f((float)i);
}}
"""
        out = torch.zeros(32)
        compile_shader(source).scales(out, threads=32, group_size=32)
        return out

    assert run("2.0f * x").equal(2 * torch.arange(32.0))
    # The precompiled shim, the kernel, the function and the linker.
    assert len(commands) == 4
    assert run("\n  x - 1.0f").equal(torch.arange(32.0) - 1)
    assert len(commands) == 6


def _compile(source: str) -> str:
    """Compile as another process does."""
    parts = parts_of(source, kernels_of(source))
    return str(emulator.compiling.compiled(parts, race=True))


def test_processes_share_the_cache(own_cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        paths = pool.map(_compile, [SHOW] * 8, chunksize=1)
    assert len(set(paths)) == 1
    made = sorted(path.name.split("-")[0] for path in own_cache.iterdir())
    assert made == ["kernels", "part", "shim", "sources"]


@pytest.mark.parametrize(("ci", "outcome"), [("1", pytest.fail), ("", pytest.skip)])
def test_without_the_compiler_tests_fail_in_ci_and_are_skipped_elsewhere(
    ci: str, outcome: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(emulator.compiling, "CXX", "clang++-of-no-version")
    with pytest.raises(outcome.Exception, match=r"needs clang.*: apt-get install"):  # type: ignore[attr-defined]
        require_emulator()
