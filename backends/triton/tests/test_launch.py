"""Programs that a call needs together are compiled concurrently, and launched in their order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton to launch with")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.knobs import HookChain

from anyflex_triton import arguments, launch, triton_launch, warm_up
from anyflex_triton import program as programs_module
from anyflex_triton.program import Options, Program, TellsFrontEnd

GPU = torch.device("cuda", 1)
AMD = GPUTarget("hip", "gfx942", 64)
"""Target where Triton's own launcher launches."""


class Pretended:
    """Program that records its calls. Its compilation waits for `together` others."""

    def __init__(self, name: str, notes: list[str], together: threading.Barrier) -> None:
        self.name, self.notes, self.together = name, notes, together
        self.compiled: dict[int | None, threading.Thread] = {}

    def is_compiled(self, device: int | None) -> bool:
        return device in self.compiled

    def compile(self, device: int | None = None) -> None:
        if self.is_compiled(device):
            return
        self.together.wait(timeout=20)
        if self.name == "broken":
            raise RuntimeError("no such instruction")
        self.compiled[device] = threading.current_thread()

    def launcher(self, *given: object) -> None:
        """Leave the launch to `launch`."""

    def launch(self, grid: int, device: torch.device, values: Mapping[str, object]) -> None:
        if device.type != "cpu" and not self.is_compiled(device.index):
            self.compile(device.index)
        self.notes.append(f"{self.name} {grid} {device.index} {values}")


def pretended(*names: str) -> tuple[list[launch.Launch], list[str]]:
    """Return launches of programs, and their notes."""
    notes: list[str] = []
    together = threading.Barrier(len(names))
    programs = [Pretended(name, notes, together) for name in names]
    launches = [
        launch.FixedLaunch(cast(Program, program), 3 + i, {}).launch({"x": i})
        for i, program in enumerate(programs)
    ]
    return launches, notes


def threads_of(launches: list[launch.Launch]) -> list[threading.Thread]:
    """Return the threads that compiled each."""
    return [cast(Pretended, given.program).compiled[GPU.index] for given in launches]


@pytest.fixture(autouse=True)
def current_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Record the devices that threads made current."""
    seen: list[torch.device] = []

    @contextlib.contextmanager
    def enter(device: torch.device) -> object:  # type: ignore[misc]
        seen.append(device)
        yield

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device=enter))
    return seen


def test_what_is_not_compiled_is_compiled_side_by_side(
    current_devices: list[torch.device],
) -> None:
    launches, notes = pretended("a", "b", "c")
    # Each compilation waits for the others.
    launch.launch_all(launches, GPU)
    assert notes == ["a 3 1 {'x': 0}", "b 4 1 {'x': 1}", "c 5 1 {'x': 2}"]
    assert current_devices == [GPU] * 3
    assert len(set(threads_of(launches))) == 3
    launch.launch_all(launches, GPU)
    assert len(notes) == 6 and len(current_devices) == 3


@pytest.mark.parametrize("names", [("broken", "a"), ("a", "broken")])
def test_a_compilers_error_comes_before_any_launch(names: tuple[str, str]) -> None:
    launches, notes = pretended(*names)
    with pytest.raises(RuntimeError, match="no such instruction"):
        launch.launch_all(launches, GPU)
    assert not notes


def test_each_is_yielded_with_what_its_compiler_raised(
    current_devices: list[torch.device],
) -> None:
    launches, _ = pretended("a", "broken", "c")
    programs = [given.program for given in launches]
    found = dict(launch.compile_all(programs, GPU))
    assert [str(found[program]) for program in programs] == ["None", "no such instruction", "None"]
    assert current_devices == [GPU] * 3


def test_nothing_is_compiled_for_the_interpreter() -> None:
    launches, notes = pretended("a", "b")
    launch.launch_all(launches, torch.device("cpu"))
    assert len(notes) == 2


class Compiled:
    """Stand-in for the result of `triton.compile`, as far as a launch reads it; records the
    arguments of Triton's launcher."""

    packed_metadata = "packed"

    def __init__(self) -> None:
        self.function: str | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.records: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Any:
        # Triton loads the kernel here.
        self.function = "loaded"
        return lambda *given: self.calls.append(given)

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *given: object) -> str:
        self.records.append((grid, stream, *given))
        return "record"


FUNCTION = SimpleNamespace(__name__="add", arg_names=["x", "y", "SIZE", "z"])


def program_of(x_type: str = "*fp32") -> tuple[Program, Compiled]:
    """Return a program that is compiled for GPU."""
    program = Program(
        FUNCTION, {"x": x_type, "y": "i32", "z": "i32"}, {"SIZE": 8}, {}, Options(4, 1)
    )
    compiled = Compiled()
    program._compiled[GPU.index] = compiled
    return program, compiled


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a driver whose current stream is `stream`, and remove all launch hooks."""
    made = SimpleNamespace(stream=7, get_current_device=lambda: GPU.index)
    made.get_current_stream = lambda device: made.stream if device == GPU.index else None
    made.get_current_target = lambda: "the current"
    for module in (programs_module, triton_launch, warm_up):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=made))
    monkeypatch.setattr(programs_module, "INTERPRETED", False)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(knobs.runtime, name, HookChain())
    return made


def test_a_launch_is_in_the_order_of_the_function_and_on_the_stream_of_the_moment(
    driver: SimpleNamespace,
) -> None:
    program, compiled = program_of()
    program.launch(3, GPU, {"z": 1, "x": "tensor", "y": 2})
    driver.stream = 9
    program.launch(4, GPU, {"y": 3, "z": 4, "x": "other"})
    nobody = (None, None, None)
    assert compiled.calls == [
        (3, 1, 1, 7, "loaded", "packed", *nobody, "tensor", 2, 8, 1),
        (4, 1, 1, 9, "loaded", "packed", *nobody, "other", 3, 8, 4),
    ]
    assert compiled.records == []


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hook_is_called_as_long_as_it_is_there(
    driver: SimpleNamespace, name: str
) -> None:
    program, compiled = program_of()
    chain = getattr(knobs.runtime, name)

    def hook(record: object) -> None:
        raise AssertionError("Triton's launcher calls it")

    values = {"x": "tensor", "y": 2, "z": 1}
    chain.add(hook)
    program.launch(3, GPU, values)
    chain.remove(hook)
    program.launch(3, GPU, values)
    hooks = (chain, None) if name == "launch_enter_hook" else (None, chain)
    assert [call[6:9] for call in compiled.calls] == [("record", *hooks), (None, None, None)]
    assert compiled.records == [((3, 1, 1), 7, "tensor", 2, 8, 1)]


def test_a_hook_that_is_no_chain_is_called_too(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, compiled = program_of()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", print)
    program.launch(3, GPU, {"x": "tensor", "y": 2, "z": 1})
    assert compiled.calls[0][6:9] == ("record", print, None)


def test_each_thread_has_a_context_before_its_first_descriptor_is_encoded(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: entered.append((threading.get_ident(), device)),
    )
    monkeypatch.setattr(arguments, "_entered", threading.local())
    values = {"x": "tensor", "y": 2, "z": 1}
    program_of()[0].launch(1, GPU, values)
    assert entered == []

    def twice() -> None:
        for _ in range(2):
            program_of("tensordesc<fp32[1, 8]>")[0].launch(1, GPU, values)

    other = threading.Thread(target=twice)
    twice()
    other.start()
    other.join(timeout=20)
    assert entered == [(threading.get_ident(), GPU), (other.ident, GPU)]
    program, compiled = program_of("tensordesc<fp32[1, 8]>")
    program._compiled[0] = compiled
    program.launch(1, torch.device("cuda", 0), values)
    assert entered[2:] == [(threading.get_ident(), torch.device("cuda", 0))]


def test_stages_that_shared_memory_does_not_hold_are_given_up(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs_module._most_shared.cache_clear()
    driver.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 250})
    asked: list[int] = []

    def compiled(source: object, target: object, options: Mapping[str, Any]) -> SimpleNamespace:
        asked.append(options["num_stages"])
        shared = 100 * options["num_stages"]
        return SimpleNamespace(metadata=SimpleNamespace(shared=shared, target=AMD), run=None)

    monkeypatch.setattr("triton.compile", compiled)
    monkeypatch.setattr(Program, "source", lambda program: None)
    for stages, tried in ((4, [4, 3, 2]), (2, [2]), (1, [1])):
        program = Program(FUNCTION, {"x": "i32", "y": "i32", "z": "i32"}, {"SIZE": 8}, {},
                                 Options(4, stages))  # fmt: skip
        asked.clear()
        found = program.compile(GPU.index)
        assert asked == tried and found.metadata.shared <= 250
        assert program.gives_up_stages == (len(tried) > 1)
        assert program.compile(GPU.index) is found
        # Without a device, as in tests of compilation, the stages stay as asked for.
        assert program.compile().metadata.shared == 100 * stages
    programs_module._most_shared.cache_clear()


def test_no_thread_gets_a_kernel_that_another_one_is_still_loading(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own object of a compiled kernel has its `run` before its `function`."""
    from triton.compiler import CompiledKernel

    launched: list[object] = []

    class Launcher:
        def __init__(self, *_: object) -> None:
            pass

        def __call__(self, *given: object) -> None:
            launched.append(given[4])

    def load(*_: object) -> tuple[str, str, int, int, int]:
        time.sleep(0.1)
        return "module", "function", 32, 0, 1024

    driver.utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 250}, load_binary=load
    )
    driver.launcher_cls = Launcher
    driver.get_current_target = lambda: SimpleNamespace(warp_size=32)
    monkeypatch.setattr("triton.compiler.compiler.driver", SimpleNamespace(active=driver))
    kernel = object.__new__(CompiledKernel)
    vars(kernel).update(
        module=None, function=None, _run=None, src=None, name="add", kernel=b"", hash="",
        packed_metadata=(), metadata_group={},
        metadata=SimpleNamespace(
            shared=0, num_warps=4, warp_size=32, tmem_size=None, target=AMD
        ),
    )  # fmt: skip
    monkeypatch.setattr("triton.compile", lambda source, target, options: kernel)
    monkeypatch.setattr(Program, "source", lambda program: None)
    programs_module._most_shared.cache_clear()
    program = Program(
        FUNCTION, {"x": "i32", "y": "i32", "z": "i32"}, {"SIZE": 8}, {}, Options(4, 1)
    )
    together = threading.Barrier(4)

    def run() -> None:
        together.wait(timeout=20)
        program.launch(1, GPU, {"x": 1, "y": 2, "z": 3})

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    programs_module._most_shared.cache_clear()
    assert launched == ["function"] * 4


class FrontEnd:
    """Source of a kernel, as far as Triton's front end goes."""

    def make_ir(self, target: str) -> str:
        return f"module for {target}"


class Source(TellsFrontEnd, FrontEnd):
    """Source for `triton.compile`."""


def compiler(monkeypatch: pytest.MonkeyPatch, notes: list[str], cached: bool = False) -> None:
    def compiled(source: Any, target: str | None, options: Any) -> SimpleNamespace:
        target = target or "the current"
        if not cached:
            assert source.make_ir(target) == f"module for {target}"
        notes.append(f"compiled for {target}")
        metadata = SimpleNamespace(shared=0, target=AMD)
        return SimpleNamespace(src=source, metadata=metadata, run="loaded")

    monkeypatch.setattr("triton.compile", compiled)
    monkeypatch.setattr(Program, "source", lambda program: Source())


def new_program() -> Program:
    types = {"x": "i32", "y": "i32", "z": "i32"}
    return Program(FUNCTION, types, {"SIZE": 8}, {}, Options(4, 1))


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_needed_next_is_begun_after_the_front_end_of_what_is_not_cached(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    notes: list[str] = []
    compiler(monkeypatch, notes, cached)
    new_program().compile(None, lambda: notes.append("begun"))
    assert notes == ["begun"] * (not cached) + ["compiled for the current"]


def test_triton_s_sources_tell_when_their_front_end_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(ASTSource, "make_ir", lambda source, *given: notes.append("front end"))
    source = Program.source_type(SimpleNamespace(__name__="add", arg_names=[]), {})
    source.make_ir(None, None, None, None, None)
    source.after_front_end = lambda: notes.append("told")
    source.make_ir(None, None, None, None, None)
    assert notes == ["front end", "front end", "told"]


def finish() -> None:
    """Wait for threads that compile, and for those that they start."""
    while True:
        running = [each for each in threading.enumerate() if each.name == "anyflex-triton"]
        if not running:
            return
        for thread in running:
            thread.join(timeout=20)
            assert not thread.is_alive()


@pytest.mark.parametrize("cached", [True, False])
def test_of_what_is_compiled_ahead_one_front_end_runs_at_a_time(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    running = 0
    most_running = most_compiling = in_compiler = 0
    both = threading.Barrier(2)

    class SlowFrontEnd:
        def make_ir(self, target: str) -> str:
            nonlocal running, most_running
            running += 1
            most_running = max(most_running, running)
            time.sleep(0.02)
            running -= 1
            return "module"

    class Slow(TellsFrontEnd, SlowFrontEnd):
        pass

    def compiled(source: Any, target: str, options: Any) -> SimpleNamespace:
        nonlocal in_compiler, most_compiling
        in_compiler += 1
        most_compiling = max(most_compiling, in_compiler)
        if not cached:
            source.make_ir(target)
            # Each of two continues when the other one's front end is done too.
            both.wait(timeout=20)
        in_compiler -= 1
        return SimpleNamespace(
            src=source, metadata=SimpleNamespace(shared=0, target=AMD), run="loaded"
        )

    monkeypatch.setattr(Program, "source", lambda program: Slow())
    monkeypatch.setattr("triton.compile", compiled)
    programs = [new_program() for _ in range(4)]
    launch.begin_compiling(programs, "sm_90")
    finish()
    assert most_running == (not cached) and (most_compiling == 1) == cached
    assert all(program._ahead is not None for program in programs)


def test_what_was_compiled_ahead_is_only_loaded_when_it_is_needed(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    compiler(monkeypatch, notes)
    ahead, broken = new_program(), new_program()

    def fail(*given: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(broken, "compile_ahead", fail)
    launch.begin_compiling([broken, ahead, ahead], "sm_90")
    finish()
    assert notes == ["compiled for sm_90"]
    assert not ahead.is_compiled(None) and not broken.is_compiled(None)
    assert ahead.compile().run == "loaded" and notes == ["compiled for sm_90"]
    ahead.compile_ahead("sm_90")
    assert notes == ["compiled for sm_90"]
    broken.compile()
    assert notes == ["compiled for sm_90", "compiled for the current"]


class LauncherOfSharedModule:
    """Triton 3.6's launcher in Python: a module's functions are replaced and read again."""

    module = ""

    def __init__(self, source: object, metadata: object) -> None:
        type(self).module = mine = f"launcher of {id(self)}"
        time.sleep(0.02)
        assert type(self).module == mine, "another thread made a launcher"


class Loading:
    """Stand-in for a compiled kernel, as far as its launcher is concerned."""

    src = None
    metadata = SimpleNamespace(shared=0, target=AMD)

    def __init__(self, driver: SimpleNamespace) -> None:
        self.driver = driver

    @property
    def run(self) -> object:
        return self.driver.launcher_cls(self.src, self.metadata)


def test_launchers_are_made_one_after_the_other(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules of Triton's launchers have one name, which Python's table of modules doesn't
    expect."""
    driver.launcher_cls = LauncherOfSharedModule
    driver.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 250})
    monkeypatch.setattr("triton.compile", lambda *_, **__: Loading(driver))
    monkeypatch.setattr(Program, "source", lambda program: None)
    programs_module._most_shared.cache_clear()
    programs = [new_program() for _ in range(8)]
    assert [error for _, error in launch.compile_all(programs, GPU)] == [None] * 8
    programs_module._most_shared.cache_clear()
