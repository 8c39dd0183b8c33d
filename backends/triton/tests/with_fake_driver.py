"""Cases of test_nvidia_launch.py, in a process whose libcuda.so.1 is fake_driver.c."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.knobs import HookChain
from triton.runtime.errors import OutOfResources

from anyflex.plugin import PerformanceWarning
from anyflex_triton import nvidia_launch, triton_launch, warm_up
from anyflex_triton import program as programs_module
from anyflex_triton.arguments import Boxes, Part
from anyflex_triton.launch import FixedLaunch
from anyflex_triton.program import Options, Program

GPU = torch.device("cuda", 1)
TYPES = {
    "x_desc": "tensordesc<bf16[1, 8],layout>", "x": "*bf16", "tables": ("*fp32", "*i8"),
    "count": "i32", "y_desc": "tensordesc<fp16[1, 2, 64],layout>", "strides": ("i64", "i64"),
    "none": (), "shifts": ("i32",) * 4, "wide": "i64", "floats": ("fp32", "fp32"),
    "scale": "fp32",
}  # fmt: skip
DESCRIBED = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 8], "fp4_padded": False},
    {"swizzle": 1, "elem_size": 2, "elem_type": 6, "block_size": [1, 2, 64], "fp4_padded": False},
]
FIXED = {
    "x_desc": ([4, 8], [8, 1], [1, 8]),
    "y_desc": ([5, 6, 64], [6 * 64, 64, 1], [1, 2, 64]),
    "strides": (8, -(1 << 40)), "count": -4,
}  # fmt: skip
SIZES = [128, 4, 4, 8, 8, 8, 8, 8, 4, 128, 4, 4, 4, 8, 8, 8, 8, 8, 4, 4, 4, 4, 8, 4, 4, 4, 8, 8]
"""Bytes of the kernel's parameters."""


class Kernel(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), ("sizes", ctypes.c_int * 64)]


class Last(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("launches", ctypes.c_uint),
        ("overlaps", ctypes.c_uint),
        ("stream", ctypes.c_ulonglong),
        ("parameters", ctypes.c_ubyte * 8192),
        ("bytes", ctypes.c_int),
    ]


fake = ctypes.CDLL("libcuda.so.1")
fake.last_launch.restype = ctypes.POINTER(Last)


def last() -> tuple[Any, ...]:
    """Return grid, threads, shared memory, stream and parameters of the last launch."""
    found = fake.last_launch().contents
    return (
        found.grid, found.threads, found.shared, found.stream,
        bytes(found.parameters[: found.bytes]),
    )  # fmt: skip


def launches() -> int:
    return int(fake.last_launch().contents.launches)


def kernel_of(sizes: list[int]) -> Kernel:
    return Kernel(len(sizes), (ctypes.c_int * 64)(*sizes))


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give Triton's own utilities and launchers the fake driver."""
    flags = sys.getdlopenflags()
    # Lazy binding: functions that no test calls are missing.
    sys.setdlopenflags(os.RTLD_LAZY)
    active = SimpleNamespace(
        get_current_device=lambda: GPU.index,
        get_current_stream=lambda device: 70 + device,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        utils=Utilities(),
        launcher_cls=Launchers,
    )
    made_by_triton.clear()
    monkeypatch.setattr(triton, "compile", None)
    programs_module._most_shared.cache_clear()
    for module in (nvidia_launch, programs_module, triton_launch, warm_up, triton.runtime):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(programs_module, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: fake.set_context(1))
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(knobs.runtime, name, HookChain())
    fake.forget()
    fake.set_context(1)
    fake.set_status(0)
    yield
    sys.setdlopenflags(flags)


def metadata_of(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "target": GPUTarget("cuda", 90, 32), "num_warps": 4, "num_ctas": 1, "shared": 1234,
            "tensordesc_meta": DESCRIBED, "global_scratch_size": 0, "global_scratch_align": 1,
            "profile_scratch_size": 0, "profile_scratch_align": 1,
            "launch_cooperative_grid": False, "launch_pdl": False, **more,
        }
    )  # fmt: skip


class Utilities(nvidia.CudaUtils):  # type: ignore[misc]
    """Triton's own utilities, which load the kernels that "Triton" has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.load_binary = self.load
        self.get_device_properties = lambda device: {"max_shared_mem": 1 << 20}

    def load(self, name: str, kernel: Any, shared: int, device: int) -> tuple[object, ...]:
        assert (name, device) == ("add", GPU.index)
        return "module", ctypes.addressof(kernel), 32, 0, 1024


class Compiled:
    """Stand-in for the result of `triton.compile`: its launcher is made when it is read."""

    name, hash = "add", "hash"
    metadata_group: ClassVar[dict[str, str]] = {}

    def __init__(self, program: Program, sizes: list[int], metadata: Any) -> None:
        types = program.types
        signature = {name: types.get(name, "constexpr") for name in program.order}
        self.src = SimpleNamespace(signature=signature)
        self.metadata = metadata
        self.kernel = kernel_of(sizes)
        self.function = ctypes.addressof(self.kernel)
        self.packed_metadata = (4, 1, 1234)
        self._run: Any = None

    @property
    def run(self) -> Any:
        if self._run is None:
            assert not hasattr(self, "module"), "it is loaded twice"
            self._run = programs_module.driver.active.launcher_cls(self.src, self.metadata)
        return self._run

    def launch_metadata(self, *given: Any) -> str:
        return "record"


made_by_triton: list[object] = []


class Launchers(nvidia.CudaLauncher):  # type: ignore[misc]
    """Triton's own launchers, counted."""

    def __init__(self, source: Any, metadata: Any) -> None:
        made_by_triton.append(source)
        super().__init__(source, metadata)


def program_of(types: dict[str, Any], sizes: list[int], **metadata: Any) -> Program:
    """Return a program that "Triton" compiles."""
    function = SimpleNamespace(__name__="add", arg_names=[*types, "SIZE"])
    program = Program(function, types, {"SIZE": 8}, {}, Options(4, 1))
    compiled = Compiled(program, sizes, metadata_of(**metadata))
    program.source = lambda: None  # type: ignore[method-assign]
    triton.compile = lambda source, **options: compiled
    program.compile(GPU.index)
    return program


def compiled(sizes: list[int] = SIZES, **metadata: Any) -> Program:
    return program_of(TYPES, sizes, **metadata)


def launched_by_triton(launch_it: Callable[..., None], grid: int, values: dict[str, Any]) -> None:
    """Launch by Triton's launcher, as a hook makes it."""
    told: list[object] = []
    hook = told.append
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch_it(grid, GPU, values)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert told == ["record"]


def given(program: Program, grid: int = 1) -> tuple[FixedLaunch, dict[str, Any]]:
    """Return a launch with arguments that are fixed, and a call's values."""
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    tables = (torch.zeros(2), torch.zeros(2, dtype=torch.int8))
    return FixedLaunch(program, grid, FIXED, {"x_desc": "x", "y_desc": "y"}), {
        "x": x, "y": torch.zeros(5, 6, 64, dtype=torch.float16), "tables": tables, "none": (),
        "scale": 0.1, "floats": (1, -1e300), "shifts": (-1, 0, 7, 1 << 30), "wide": -3,
        "another kernel's": 3,
    }  # fmt: skip


def test_each_launch_gives_what_tritons_own_launcher_gives() -> None:
    """The first launch has any shape; later ones write only a call's own values."""
    program = compiled()
    fixed, _ = given(program)
    seen: list[tuple[Any, ...]] = []
    for grid, more in (
        (3, {}),
        (3, {}),
        (4, {"scale": 2, "wide": 1 << 62, "shifts": (4, 3, 2, 1)}),
    ):
        _, others = given(program)
        others.update(more)
        fake.forget()
        fixed.grid = grid
        fixed.run(GPU, others)
        seen.append(last())
        assert seen[-1][:4] == (grid, 128, 1234, 71) and len(seen[-1][4]) == sum(SIZES)
        assert len(made_by_triton) == min(1, len(seen) - 1), "it is made for a hook alone"
        fake.forget()
        launched_by_triton(program.launch, grid, fixed.together(others))
        assert last() == seen[-1]
    assert len(made_by_triton) == 1
    assert isinstance(fixed.launcher, nvidia_launch.Launcher)


def test_arguments_take_values_of_other_names_and_parts_of_tensors() -> None:
    program = compiled()
    _, values = given(program)
    memory = torch.arange(2048, dtype=torch.int16).view(torch.uint8)
    renamed = {"y": values.pop("y"), "numbers": values.pop("floats"), "memory": memory}
    named: dict[str, str | Part] = {
        "x_desc": Part("memory", 64, (4, 8), torch.bfloat16), "floats": "numbers",
        "x": Part("memory", 1024, (3, 5), torch.bfloat16), "y_desc": "y", "another's": "y",
    }  # fmt: skip
    fixed = FixedLaunch(program, 3, FIXED, named)
    for _ in range(2):
        fake.forget()
        fixed.run(GPU, {**values, **renamed})
        seen = last()
        fake.forget()
        together = fixed.together({**values, **renamed})
        launched_by_triton(program.launch, 3, together)
        assert last() == seen
        memory = memory.clone()
        renamed["memory"] = memory
    assert together["x"].shape == (3, 5) and together["x"].view(torch.int16)[0, 0] == 512
    assert together["x_desc"].base.view(torch.int16).flatten().tolist() == list(range(32, 64))


def test_few_layouts_of_parts_are_kept() -> None:
    """Backward's workspace has its parts elsewhere for each shape."""
    program = compiled()
    _, values = given(program)
    values["memory"] = torch.zeros(2048, dtype=torch.uint8)
    for begin in range(0, 1024, 16):
        x = Part("memory", begin, (3, 5), torch.bfloat16)
        named: dict[str, str | Part] = {"x_desc": "x", "y_desc": "y", "x": x}
        FixedLaunch(program, 3, FIXED, named).run(GPU, values)
    assert 0 < len(program._laid_out) < 10


def test_what_stays_for_calls_of_one_shape_is_not_what_stays_for_those_of_another() -> None:
    program = compiled()
    fixed, values = given(program, 3)
    others = {**FIXED, "strides": (7, 1 << 40), "count": 5, "x_desc": ([2, 8], [16, 1], [1, 8])}
    other = FixedLaunch(program, 3, others, {"x_desc": "x", "y_desc": "y"})
    seen = []
    for each in (fixed, other) * 3:
        fake.forget()
        each.run(GPU, values)
        seen.append(last())
        fake.forget()
        launched_by_triton(program.launch, 3, each.together(values))
        assert last() == seen[-1]
    assert seen == [*seen[:2]] * 3 and seen[0] != seen[1]


def test_no_launcher_of_tritons_is_made_for_a_launch() -> None:
    program = compiled()
    fixed, values = given(program)
    for _ in range(3):
        fixed.run(GPU, values)
    assert launches() == 3 and not made_by_triton
    assert programs_module.driver.active.launcher_cls is Launchers


@pytest.mark.parametrize(
    ("more", "what"),
    [({"shared": (1 << 20) + 1}, "shared memory"), ({"num_warps": 64}, "threads")],
)
def test_a_kernel_that_takes_more_than_there_is_is_refused(
    more: dict[str, Any], what: str
) -> None:
    """As Triton refuses it."""
    with pytest.raises(OutOfResources, match=what):
        compiled(**more)


def test_who_listens_to_loading_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    for name in ("kernel_load_start_hook", "kernel_load_end_hook"):
        chain = HookChain()
        chain.add(lambda *given: told.append(given))
        monkeypatch.setattr(knobs.runtime, name, chain)
    program = compiled()
    facts = ("add", {}, "hash")
    function = ctypes.addressof(program.compile(GPU.index).kernel)
    assert told == [(None, None, *facts), ("module", function, *facts)]


def test_where_nothing_is_fixed_a_call_gives_all() -> None:
    types = {"out": "*fp32", "sizes": ("i64", "i32"), "count": "i32"}
    program = program_of(types, [8, 8, 4, 4, 8, 8], tensordesc_meta=[])
    for out in (torch.zeros(4), torch.zeros(4)):
        values = {"out": out, "sizes": (5, -6), "count": 7, "another's": None}
        FixedLaunch(program, 2, {}).run(GPU, values)
        expected = struct.pack("<QqiiQQ", out.data_ptr(), 5, -6, 7, 0, 0)
        assert last() == (2, 128, 1234, 71, expected)
    assert not made_by_triton


def test_a_descriptor_that_the_driver_refuses_raises() -> None:
    program = compiled()
    _, values = given(program)
    for wrong in ([1 << 32, 8], [4, "8"], 8):
        others = {**FIXED, "x_desc": (wrong, [8, 1], [1, 8])}
        fixed = FixedLaunch(program, 1, others, {"x_desc": "x"})
        with pytest.raises((struct.error, TypeError)):
            fixed.run(GPU, values)
    assert launches() == 0


def test_a_threads_first_launch_makes_its_context() -> None:
    program = compiled()
    fixed, values = given(program)
    fixed.run(GPU, values)
    for count in (2, 3):
        # The second time its context was taken away.
        fake.set_context(0)
        fixed.run(GPU, values)
        assert launches() == count


def test_a_thread_that_gets_no_context_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled()
    fixed, values = given(program)
    fixed.run(GPU, values)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: None)
    fake.set_context(0)
    with pytest.raises(RuntimeError, match="context on cuda:1"):
        fixed.run(GPU, values)
    assert launches() == 1


def test_a_grid_of_none_launches_nothing() -> None:
    program = compiled()
    fixed, values = given(program, 0)
    for _ in range(2):
        fixed.run(GPU, values)
    assert launches() == 0
    fixed.grid = (1 << 32) + 5
    with pytest.raises(OverflowError, match="4294967301 programs"):
        fixed.run(GPU, values)


def test_a_profilers_hook_is_told_of_later_launches_too() -> None:
    program = compiled()
    fixed, values = given(program)
    fixed.run(GPU, values)
    launched_by_triton(program.launch, 1, fixed.together(values))
    launched_by_triton(lambda grid, *given: fixed.run(*given), 1, values)
    fixed.run(GPU, values)
    assert launches() == 4


@pytest.mark.parametrize(
    "metadata",
    [
        {"target": GPUTarget("hip", "gfx942", 64)}, {"num_ctas": 2},
        {"launch_cooperative_grid": True}, {"global_scratch_size": 128},
        {"profile_scratch_size": 8},
    ],
)  # fmt: skip
def test_a_launch_that_is_not_known_is_left_to_triton(
    metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(
        programs_module, "launch_kernel", lambda *given: launched.append(given[-1])
    )
    program = compiled(**metadata)
    fixed, values = given(program)
    for _ in range(2):
        fixed.run(GPU, values)
    assert launches() == 0 and len(launched) == 2
    assert fixed.launcher is None and len(made_by_triton) == 1
    places = [program.order.index(name) for name in ("x_desc", "x")]
    for x_desc, x in ([arguments[place] for place in places] for arguments in launched):
        assert isinstance(x_desc, Boxes) and x_desc.base is x


def test_another_version_of_triton_launches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_launch, "IS_KNOWN", False)
    program = compiled()
    fixed, values = given(program)
    for _ in range(2):
        fixed.run(GPU, values)
    assert fixed.launcher is None and launches() == 2


def test_a_kernel_may_begin_before_the_launch_before_it_ends() -> None:
    for program, overlaps in ((compiled(launch_pdl=True), 1), (compiled(), 0)):
        fixed, values = given(program)
        for _ in range(2):
            fixed.run(GPU, values)
            assert fake.last_launch().contents.overlaps == overlaps
    assert launches() == 4


def test_without_a_compiler_triton_launches_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(nvidia_launch, "_made", [])
    own = knobs.cache.dir
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))

    def make(*given: Any) -> Any:
        # Triton's launchers are in its cache.
        monkeypatch.setattr(knobs.cache, "dir", own)
        return Launchers(*given)

    programs_module.driver.active.launcher_cls = make
    with pytest.warns(PerformanceWarning, match="C compiler"):
        program = compiled()
    fixed, values = given(program)
    for _ in range(2):
        fixed.run(GPU, values)
    assert fixed.launcher is None and launches() == 2


@pytest.mark.parametrize(
    ("change", "raised", "message"),
    [
        ({"wide": "1"}, TypeError, "integer"),
        ({"wide": 1 << 63}, OverflowError, "int"),
        ({"shifts": (0, 0, 0)}, TypeError, "shifts has no element 3"),
        ({"shifts": (0, 0, 0, 1 << 31)}, OverflowError, "shifts is 2147483648"),
        ({"scale": None}, TypeError, "real number"),
        ({"x": 3}, AttributeError, "data_ptr"),
        ({"y": torch.zeros(3)[1:]}, RuntimeError, "address: CUDA error 1"),
    ],
)
def test_what_is_no_value_is_refused_before_a_launch(
    change: dict[str, Any], raised: type[Exception], message: str
) -> None:
    program = compiled()
    fixed, values = given(program)
    fixed.run(GPU, values)
    with pytest.raises(raised, match=message):
        fixed.run(GPU, {**values, **change})
    for name in ("x", "scale", "tables"):
        with pytest.raises(KeyError, match=name):
            fixed.run(GPU, {n: v for n, v in values.items() if n != name})
    assert launches() == 1


def test_a_failing_launch_says_what_the_driver_says() -> None:
    program = compiled()
    fixed, values = given(program)
    fixed.run(GPU, values)
    fake.set_status(701)
    with pytest.raises(RuntimeError, match="launching a kernel: CUDA error 701, too many"):
        fixed.run(GPU, values)


@pytest.mark.parametrize("place", [0, 1, len(SIZES) - 1])
def test_parameters_of_other_sizes_are_noticed(place: int) -> None:
    """Before anything is launched with them."""
    sizes = list(SIZES)
    sizes[place] *= 2
    for wrong in (sizes, SIZES[:-1]):
        fixed, values = given(compiled(wrong))
        with pytest.raises(RuntimeError, match="parameter"):
            fixed.run(GPU, values)


def test_nothing_of_a_call_is_kept() -> None:
    program = compiled()
    fixed, values = given(program)
    fixed.run(GPU, values)
    gone = weakref.ref(values["y"])
    counts = [sys.getrefcount(values[name]) for name in ("x", "tables", "scale")]
    for _ in range(100):
        fixed.run(GPU, values)
    assert counts == [sys.getrefcount(values[name]) for name in ("x", "tables", "scale")]
    del values
    gc.collect()
    assert gone() is None


def test_threads_launch_the_same_kernel() -> None:
    program = compiled()
    fixed, values = given(program)
    fixed.run(GPU, values)
    before = launches()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(200):
                fixed.run(GPU, values)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The fake driver counts without a lock.
    assert not failures and before < launches() <= before + 800


def test_a_library_that_is_no_driver_is_refused() -> None:
    module = nvidia_launch.launch_module()
    for path in ("no such library", "libc.so.6"):
        with pytest.raises(OSError, match=r"no such library|libc\.so\.6"):
            module.open_driver(path)
    with pytest.raises(TypeError):
        module.open_driver(3)
    module.open_driver("libcuda.so.1")
