"""Compiling one kernel function for one class of arguments, and launching it.

Triton's own launcher looks at each integer (1? a multiple of 16?) and compiles anew for each
answer. Here the class is said once, by types, so that a new length or stride never compiles.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from anyflex.plugin import collector_paused, free_in_child
from anyflex_triton.arguments import enter_device, make_context
from anyflex_triton.cache_keys import ask_for_keys, has_key
from anyflex_triton.compiling import compile_missing
from anyflex_triton.preparation import attempt, await_checksum, await_driver

if TYPE_CHECKING:
    from anyflex_triton.compiled_files import CompiledFiles
    from anyflex_triton.nvidia_launch import Launcher, Parameters
    from anyflex_triton.prepared_launch import FixedArguments

__all__ = [
    "INTERPRETED",
    "Launch",
    "Options",
    "Program",
    "Types",
    "hooked",
    "launch_all",
    "launch_by",
    "milliseconds",
    "pointer_type",
    "without_bools",
]

Types = str | tuple[str, ...]
"""Of one argument: Triton's name of its type (``"*bf16"``, ``"i32"``), or a tuple of them."""


INTERPRETED = bool(knobs.runtime.interpret)
"""TRITON_INTERPRET=1 was set when triton was imported: kernels run in numpy, on CPU tensors."""
_interpreter = threading.Lock()
"""It keeps its place in the grid for all threads at once."""

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i8",
}


_making_launchers = threading.RLock()
"""One launcher at a time. Up to Triton 3.6 each is a module in C, all of one name. Of a file that
was loaded before Python makes no module: it puts the file's functions into the module of that name
that was loaded last, whichever that is. Triton takes the function out of it a moment later, and
gets another launcher's if a second thread has loaded one in between. Nothing keeps other users of
Triton in the process from doing that. Loading a kernel lies inside, hooks included: Triton does it
with the launcher, and a hook may make a call of its own."""

free_in_child(sys.modules[__name__], "_interpreter", "_making_launchers")


def pointer_type(dtype: torch.dtype) -> str:
    """Triton's name of a pointer to elements of `dtype`; a bool is read as a byte."""
    return _POINTERS[dtype]


@dataclass(frozen=True)
class Options:
    """How a kernel is compiled.

    Args:
        num_warps, num_stages: as in Triton.
        more: keywords that one vendor's compiler has (Intel's ``grf_mode``).
    """

    num_warps: int
    num_stages: int
    more: tuple[tuple[str, Any], ...] = ()

    def keywords(self) -> dict[str, Any]:
        """As Triton takes them."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            # Triton's default up to 3.9, which warns of another one to come.
            "enable_fp_fusion": True,
            **dict(self.more),
        }


class Program:
    """A kernel function with its types and constants. Thread-safe.

    Args:
        function: made by ``triton.jit``.
        types: name -> types, of all arguments that aren't constants.
        constants: name -> value of the others.
        aligned: name -> bytes of which a pointer is known to be a multiple.
        options: of the compiler.
        files: where what Triton makes is kept beside its own cache; None: nowhere.

    Attributes:
        order: names of all arguments.
        meanwhile: called with the compiler's target when the part of it that holds Python's lock
            is done with this kernel; not where the kernel comes out of a cache. What fails there
            is tried again by whoever needs it, and raised then.
        gives_up_stages: fewer were compiled than `options` asks for: see `_compile_for`.
    """

    def __init__(
        self,
        function: Any,
        types: Mapping[str, Types],
        constants: Mapping[str, object],
        aligned: Mapping[str, int],
        options: Options,
        files: CompiledFiles | None = None,
    ) -> None:
        self.function = function
        self.types = dict(types)
        self.constants = dict(constants)
        self.aligned = dict(aligned)
        self.options = options
        self._files = files
        self.gives_up_stages = False
        self.meanwhile: Callable[[Any], None] | None = None
        self._ahead: Any = None
        self._compiled: dict[int | None, Any] = {}
        self._launchers: dict[int | None, Launcher] = {}
        self._laid_out: dict[object, Parameters] = {}
        self._lock = threading.Lock()
        free_in_child(self)
        named = set(self.types) | set(self.constants)
        if named != set(function.arg_names):
            raise TypeError(
                f"arguments of {function.__name__}: {sorted(named ^ set(function.arg_names))}"
            )
        self.order = tuple(function.arg_names)
        # Constants come last, but those that stand for an argument that other kernels have.
        count = len(self.order)
        while count and self.order[count - 1] in self.constants:
            count -= 1
        self._last = tuple(self.constants[name] for name in self.order[count:])
        self._between = {n: self.constants[n] for n in self.order[:count] if n in self.constants}
        # A kernel has more arguments than one that aren't.
        self._ordered = itemgetter(*self.order[:count])
        # Encoding a descriptor needs a context, and happens before Triton's launcher makes one.
        self._needs_context = any("tensordesc" in str(given) for given in self.types.values())

    def source(self) -> Any:
        """What ``triton.compile`` takes."""
        # Mods come in as constants.
        ask_for_keys([self.function, *filter(has_key, self.constants.values())])
        return self.source_without_keys()

    def source_without_keys(self) -> Any:
        """As `source`, for a kernel that is compiled already."""
        from triton.compiler import ASTSource

        signature: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, name in enumerate(self.order):
            signature[name] = self.types.get(name, "constexpr")
            if name in self.aligned:
                attributes[(index,)] = [["tt.divisibility", self.aligned[name]]]
        return ASTSource(self.function, signature, dict(self.constants), attributes)

    def is_compiled(self, device: int | None) -> bool:
        """Whether `compile` has nothing to do."""
        return device in self._compiled

    def compiled(self, device: int | None) -> Any:
        """What `compile` returned, or None before it did."""
        return self._compiled.get(device)

    def launcher(
        self,
        device: int | None,
        fixed: Mapping[str, Any],
        described: Mapping[str, str],
        values: Mapping[str, Any],
    ) -> Launcher | None:
        """What launches it past Triton's own launcher where some values stay, or None where that
        one launches it, or it isn't compiled. Arguments: `nvidia_launch.parameters_of`, and
        `Parameters.launcher`."""
        if device not in self._launchers:
            return None
        kernel = self._compiled[device]
        # Of a growing cache there is a launcher for each length.
        key = (tuple(fixed), *described.items())
        parameters = self._laid_out.get(key)
        if parameters is None:
            parameters = self._parameters(kernel, fixed, described)
            assert parameters is not None, "with nothing fixed there were some"
            self._laid_out[key] = parameters
        return parameters.launcher(kernel, fixed, values)

    def compile(self, device: int | None = None) -> Any:
        """Compile for the current device, whose index is `device`, at most once."""
        found = self._compiled.get(device)
        if found is None:
            with self._lock:
                found = self._compiled.get(device)
                if found is None:
                    with collector_paused():
                        found = self._compiled[device] = self._compile_for(device)
                # Of a thread that has waited meanwhile: it holds on to a call's tensors.
                self.meanwhile = None
        return found

    def compile_ahead(self, target: Any, meanwhile: Callable[[Any], None] | None = None) -> None:
        """Do of `compile` what needs no device, at most once. In any thread: a graph that another
        one records isn't disturbed.

        Args:
            target: of the compiler.
            meanwhile: as the attribute.
        """
        # The collector isn't paused: this goes on after the call has returned.
        with self._lock:
            if not self._compiled and self._ahead is None:
                found = self._translate(target, self.options.keywords(), meanwhile)
                if self._parameters(found) is None:
                    # Leaves its module in C in Triton's cache.
                    await_driver()
                    with _making_launchers:
                        driver.active.launcher_cls(found.src, found.metadata)
                self._ahead = found

    def _compile_for(self, device: int | None) -> Any:
        """Compile and load.

        With fewer stages where those asked for take more shared memory than a program can have:
        what a mod reads is kept there too, and no table of configurations knows it.
        """
        # Its driver isn't needed before there is something to load, where the target is known.
        target = _nvidia_target(device)
        if target is None:
            await_driver()
        keywords = self.options.keywords()
        found, self._ahead = self._ahead, None
        if found is None:
            # Read once: another thread's `compile_missing` may take it back.
            meanwhile, self.meanwhile = self.meanwhile, None
            found = self._translate(target, keywords, meanwhile)
        if device is not None:
            await_driver()
            stages = self.options.num_stages
            while stages > 1 and found.metadata.shared > _most_shared(device):
                stages -= 1
                keywords["num_stages"] = stages
                self.gives_up_stages = True
                found = self._translate(target, keywords)
            parameters = self._parameters(found)
            # Asking for `run` loads the kernel. Of two threads that ask, one may get it before the
            # other's loading has ended: so nobody else has the kernel yet.
            late = contextlib.nullcontext() if parameters is None else _late_launchers()
            with _making_launchers, late:
                found.run  # noqa: B018
            if parameters is not None:
                self._launchers[device] = parameters.launcher(found)
            if self._files is not None and torch.version.cuda is not None:
                self._keep_modules(found, self._name(target, keywords), parameters is not None)
        return found

    def _translate(
        self,
        target: Any,
        keywords: Mapping[str, Any],
        meanwhile: Callable[[Any], None] | None = None,
    ) -> Any:
        """Find the kernel among the spec's files, or compile and keep it."""
        import triton

        name = ""
        if self._files is not None:
            name = self._name(target, keywords)
            found = self._files.find(name, self.source_without_keys)
            if found is not None:
                return found
        source = self.source()
        if meanwhile is not None:
            _call_after_front_end(source, meanwhile)
        await_checksum()
        found = triton.compile(source, target=target, options=keywords)
        if self._files is not None:
            self._files.keep(name, found)
        return found

    def _name(self, target: Any, keywords: Mapping[str, Any]) -> str:
        """The kernel's name among the spec's files."""
        from anyflex_triton.compiled_files import kernel_name

        if target is None:
            target = driver.active.get_current_target()
        named = (self.types, self.constants, self.aligned, keywords)
        # Sorted by names: a constant's place among the others depends on the process.
        return kernel_name(self.function, *[sorted(each.items()) for each in named], target)

    def _keep_modules(self, kernel: Any, name: str, own: bool) -> None:
        """Keep the modules in C with which a kernel was loaded and is launched.

        Args:
            name: of the kernel.
            own: our own launcher launches it, and Triton's isn't made.
        """
        from anyflex_triton.compiled_files import module_of
        from anyflex_triton.nvidia_launch import launch_module

        assert self._files is not None
        self._files.keep_module(module_of(driver.active.utils.load_binary))
        if own:
            self._files.keep_module(launch_module())
        else:
            self._files.keep_launcher(name, kernel.run)

    def _parameters(self, kernel: Any, *fixed: Any) -> Parameters | None:
        """What a compiled kernel is given by our own launcher, or None where there is none."""
        from anyflex_triton.nvidia_launch import launch_module, parameters_of

        parameters = parameters_of(self.order, self.types, kernel.metadata, *fixed)
        return None if parameters is None or launch_module() is None else parameters

    def launch(self, grid: int, device: torch.device, values: Mapping[str, object]) -> None:
        """Run `grid` programs on the current stream of the current device.

        Args:
            values: of all arguments that aren't constants. There may be more: another kernel's.
        """
        if not INTERPRETED:
            kernel = self.compile(device.index)
            launcher = self._launchers.get(device.index)
            if launcher is not None and not hooked():
                launch_by(launcher, grid, device, values)
                return
            if self._needs_context:
                enter_device(device)
        if self._between:
            values = {**values, **self._between}
        arguments = self._ordered(values) + self._last
        if INTERPRETED:
            with _interpreter:
                self.function[(grid,)](*arguments, **self.options.keywords())
        else:
            _launch(kernel, grid, arguments)


_late: list[Any] = []
"""What makes launchers at the moment, by `_late_launchers`."""


@contextlib.contextmanager
def _late_launchers() -> Iterator[None]:
    """While a kernel is loaded that Triton's own launcher seldom launches: it isn't made. It is a
    module in C, for which the compiler takes 0.25 to 0.45 s."""
    from anyflex_triton.nvidia_launch import LateLauncher

    active = driver.active
    own = active.launcher_cls
    if own in _late:
        # A hook that is told of a loading makes a call.
        yield
        return

    def make(source: Any, metadata: Any) -> Any:
        with _making_launchers:
            return own(source, metadata)

    def make_late(*given: Any) -> LateLauncher:
        return LateLauncher(partial(make, *given))

    # Whoever else loads a kernel meanwhile has a launcher that is made a little later.
    active.launcher_cls = make_late
    _late.append(make_late)
    try:
        yield
    finally:
        _late.remove(make_late)
        active.launcher_cls = own


def _call_after_front_end(source: Any, meanwhile: Callable[[Any], None]) -> None:
    make_ir = source.make_ir

    def make_and_call(target: Any, *more: Any, **named: Any) -> Any:
        module = make_ir(target, *more, **named)
        attempt(partial(meanwhile, target))
        return module

    source.make_ir = make_and_call


def launch_by(
    launcher: Launcher, grid: int, device: torch.device, values: Mapping[str, object]
) -> None:
    """Launch past Triton's own launcher, on the current stream of the current device."""
    stream = driver.active.get_current_stream(device.index)
    if launcher(grid, stream, values):
        return
    # The thread's first launch, or somebody has taken its context away.
    make_context(device)
    if not launcher(grid, stream, values):
        raise RuntimeError(f"this thread can't have a CUDA context on {device}")


def _launch(kernel: Any, grid: int, arguments: tuple[object, ...]) -> None:
    """Run a compiled kernel as ``kernel[(grid, 1, 1)](*arguments)`` and Triton's own functions
    do, and hand hooks over only where there are some: a chain of none is made a record of the
    launch, and called twice. Measured: 3 of 24 us."""
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    enter = _listened(knobs.runtime.launch_enter_hook)
    leave = _listened(knobs.runtime.launch_exit_hook)
    record = None
    if enter is not None or leave is not None:
        record = kernel.launch_metadata((grid, 1, 1), stream, *arguments)
    kernel.run(
        grid, 1, 1, stream, kernel.function, kernel.packed_metadata, record, enter, leave,
        *arguments,
    )  # fmt: skip


def hooked() -> bool:
    """Whether somebody is told of launches, by Triton's hooks."""
    runtime = knobs.runtime
    return not (
        _listened(runtime.launch_enter_hook) is _listened(runtime.launch_exit_hook) is None
    )


def _listened(hook: Any) -> Any:
    """A launch hook of Triton's, or None where it is a chain of none."""
    return hook if getattr(hook, "calls", hook) else None


def _nvidia_target(device: int | None) -> Any:
    """What Triton's driver for NVIDIA says that it compiles for, without it; None elsewhere."""
    if device is None or torch.version.cuda is None:
        return None
    from triton.backends.compiler import GPUTarget

    major, minor = torch.cuda.get_device_capability(device)
    return GPUTarget("cuda", major * 10 + minor, 32)


@lru_cache
def _most_shared(device: int) -> int:
    """Bytes of shared memory that a program can have."""
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


class Launch(NamedTuple):
    """A program with what it runs on.

    Args:
        values: as `Program.launch`'s.
        sums: tensors that are zeros before and are added to; others are overwritten.
        fixed: what launches it, with the arguments that `values` lack, if any.
    """

    program: Program
    grid: int
    values: Mapping[str, object]
    sums: Sequence[Tensor] = ()
    fixed: FixedArguments | None = None

    def run(self, device: torch.device) -> None:
        """Run it on the current stream of the current device."""
        if self.fixed is None:
            self.program.launch(self.grid, device, self.values)
        else:
            self.fixed.launch(self.program, self.grid, device, self.values)


def launch_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Run them one after the other on the current stream of the current device. Before that all
    are compiled."""
    missing = [
        launch.program for launch in launches if not launch.program.is_compiled(device.index)
    ]
    if len(missing) > 1 and device.type != "cpu":
        compile_missing(missing, device)
    for launch in launches:
        launch.run(device)


def milliseconds(launch: Callable[[], None]) -> float:
    """Median of a launch's times on the current device, caches flushed before each; in the
    interpreter, the wall time of one."""
    if INTERPRETED:
        begin = time.perf_counter()
        launch()
        return (time.perf_counter() - begin) * 1e3
    from triton.testing import do_bench

    return float(do_bench(launch, return_mode="median"))


def without_bools(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same memory; a bool is seen as a byte."""
    return tuple(
        tensor.view(torch.int8) if tensor.dtype is torch.bool else tensor for tensor in tensors
    )
