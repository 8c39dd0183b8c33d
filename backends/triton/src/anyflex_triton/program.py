"""Program: one kernel function compiled for one class of arguments, and launched with any of it.

Triton's own JIT examines each integer (is it 1, is it a multiple of 16?) and compiles again for
each answer. Here types state the class once, so that a new length or stride never recompiles.

A launch goes one of three ways: Triton's interpreter, Triton's launcher (`triton_launch`), or, on
NVIDIA's GPUs, this package's launcher in C (`nvidia_launch`), which takes less of the host's time.
`launch` chooses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, ClassVar

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import driver

from anyflex.plugin import free_in_child
from anyflex_triton import absent_gpu, nvidia_launch
from anyflex_triton.arguments import Boxes, Part, Types, enter_device, pointer_type
from anyflex_triton.compiled_files import CompiledFiles, kernel_name, kernel_to_ship
from anyflex_triton.nvidia_launch import Launcher, Parameters
from anyflex_triton.triton_launch import interpret, launch_kernel, load_kernel, make_launcher
from anyflex_triton.warm_up import await_checksum, current_target

__all__ = ["INTERPRETED", "Options", "Program", "Source", "TellsFrontEnd"]

INTERPRETED = bool(knobs.runtime.interpret)
"""TRITON_INTERPRET=1 was set when triton was imported: kernels run in numpy, on CPU tensors."""

_LAYOUTS = 8
"""Maximum number of layouts of a program's parameters that are kept, of up to 33 KB each. Evicts
all: few are asked for again."""


@dataclass(frozen=True)
class Options:
    """Compiler options of a kernel.

    Args:
        num_warps, num_stages: as in Triton.
        more: keywords of one vendor's compiler (Intel's ``grf_mode``).
    """

    num_warps: int
    num_stages: int
    more: tuple[tuple[str, Any], ...] = ()

    def keywords(self) -> dict[str, Any]:
        """Return the options as Triton's keywords."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            # This is the default up to Triton 3.9, which warns that it will change.
            "enable_fp_fusion": True,
            **dict(self.more),
        }


class TellsFrontEnd:
    """Mixin of a source that tells when Triton's front end is done with it.

    The front end, ``make_ir``, holds Python's lock; the later passes don't.
    """

    after_front_end: Callable[[], None] | None = None

    def make_ir(self, *given: Any, **named: Any) -> Any:
        """Make Triton's IR, then call `after_front_end`."""
        module = super().make_ir(*given, **named)  # type: ignore[misc]
        if self.after_front_end is not None:
            self.after_front_end()
        return module


class Source(TellsFrontEnd, ASTSource):  # type: ignore[misc]
    """Source of a kernel for ``triton.compile``."""


class Program:
    """A kernel function with its types and constants. Thread-safe.

    Args:
        function: a ``triton.jit`` function.
        types: name -> types, for all arguments that aren't constants.
        constants: name -> value, for the others.
        aligned: name -> bytes, a known divisor of the pointer.
        options: compiler options.
        files: store of compiled kernels beside Triton's own cache, or None.

    Attributes:
        order: names of all arguments.
        gives_up_stages: the kernel has fewer stages than `options` asks for, because those need
            more shared memory than a program can have. Values that a mod reads are staged too, and
            no config table knows them.
    """

    source_type: ClassVar[Any] = Source

    @staticmethod
    def box_type(boxes: Boxes) -> str:
        """Return Triton's name of the type of a descriptor."""
        return f"tensordesc<{pointer_type(boxes.base.dtype)[1:]}{boxes.block_shape}>"

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
        self.gives_up_stages = False
        self._files = files
        self._ahead: Any = None
        self._compiled: dict[int | None, Any] = {}
        self._functions: dict[int | None, int] = {}
        self._laid_out: dict[object, Parameters] = {}
        self._lock = threading.Lock()
        free_in_child(self)
        self.order = tuple(function.arg_names)
        self._in_order = itemgetter(*self.order)
        # Encoding a descriptor needs a context, and happens before a launcher makes one.
        self._needs_context = any("tensordesc" in str(given) for given in self.types.values())

    def source(self) -> Any:
        """Return the source for ``triton.compile``."""
        signature: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, name in enumerate(self.order):
            signature[name] = self.types.get(name, "constexpr")
            if name in self.aligned:
                attributes[(index,)] = [["tt.divisibility", self.aligned[name]]]
        return self.source_type(self.function, signature, dict(self.constants), attributes)

    def is_compiled(self, device: int | None) -> bool:
        """Whether `compile` has nothing to do."""
        return device in self._compiled

    def compile(
        self, device: int | None = None, after_front_end: Callable[[], None] | None = None
    ) -> Any:
        """Compile for the current device and load the kernel, at most once; return Triton's
        kernel.

        Args:
            device: index of the current device; None: the kernel isn't loaded.
            after_front_end: called when the part of the compiler that holds Python's lock is done;
                not called where nothing has to be compiled.
        """
        found = self._compiled.get(device)
        if found is None:
            with self._lock:
                found = self._compiled.get(device)
                if found is None:
                    target = None if device is None else current_target()
                    found, self._ahead = self._ahead, None
                    if found is None:
                        found = self._translate(target, self.options, after_front_end)
                    found = self._compiled[device] = self._loaded(found, target, device)
        return found

    def compile_ahead(
        self, target: Any, after_front_end: Callable[[], None] | None = None
    ) -> None:
        """Do the part of `compile` that needs no device, at most once. Any thread may call this: a
        graph that another thread captures isn't disturbed.

        Args:
            target: the compiler's.
            after_front_end: as in `compile`.
        """
        with self._lock:
            if not self._compiled and self._ahead is None:
                self._ahead = self._translate(target, self.options, after_front_end)

    def _compile_for(self, gpu: absent_gpu.AbsentGpu) -> None:
        """Compile for a GPU that isn't there, and note the kernel."""
        name = self._name(gpu.target, self.options)
        if name not in gpu.kernels:
            self.compile_ahead(gpu.target)
            gpu.kernels[name] = kernel_to_ship(self._ahead)

    def _translate(
        self, target: Any, options: Options, after_front_end: Callable[[], None] | None = None
    ) -> Any:
        """Find the kernel among the spec's files, or compile and store it."""
        name = self._name(target, options)
        found = None if self._files is None else self._files.find(name, self.source)
        if found is None:
            source = self.source()
            if after_front_end is not None:
                source.after_front_end = after_front_end
            await_checksum()
            found = triton.compile(source, target=target, options=options.keywords())
            if self._files is not None:
                self._files.keep(name, found)
        return found

    def _name(self, target: Any, options: Options) -> str:
        """Return the kernel's name among the spec's files."""
        if self._files is None:
            return ""
        if target is None:
            target = current_target()
        named = (self.types, self.constants, self.aligned, options.keywords())
        # Sorted by name: a constant's place among the others depends on the process.
        return kernel_name(self.function, *[sorted(each.items()) for each in named], target)

    def _loaded(self, found: Any, target: Any, device: int | None) -> Any:
        """Return the kernel with as many stages as fit the device, loaded there."""
        if device is None:
            return found
        options = self.options
        while options.num_stages > 1 and found.metadata.shared > _most_shared(device):
            options = replace(options, num_stages=options.num_stages - 1)
            self.gives_up_stages = True
            found = self._translate(target, options)
        files = None if torch.version.cuda is None else self._files
        if files is not None:
            files.keep_module(getattr(driver.active.utils.load_binary, "__self__", None))
        if not nvidia_launch.takes(found.metadata):
            load_kernel(found)
            return found
        self._functions[device] = nvidia_launch.load_kernel(found, device)
        if files is not None:
            files.keep_module(nvidia_launch.launch_module())
        return found

    def launcher(
        self,
        device: torch.device,
        fixed: Mapping[str, Any],
        named: Mapping[str, str | Part],
        values: Mapping[str, Any],
    ) -> Launcher | None:
        """Return a launcher that bypasses Triton's, with some values laid out; None where Triton's
        launcher or its interpreter is used. Compiles for the current device, if need be.

        Args:
            fixed, named: as in `FixedLaunch`.
            values: a call's, for the tensors of descriptors.
        """
        # CPU tensors stand in for an absent device's, or are interpreted.
        if INTERPRETED or device.type == "cpu":
            return None
        metadata = self.compile(device.index).metadata
        function = self._functions.get(device.index)
        if function is None:
            return None
        # A growing KV cache makes a launcher for each length, with the same parameters. The parts
        # of backward's workspace lie elsewhere for each shape.
        key = (tuple(fixed), *named.items())
        parameters = self._laid_out.get(key)
        if parameters is None:
            if len(self._laid_out) >= _LAYOUTS:
                self._laid_out.clear()
            parameters = Parameters(self.order, self.types, metadata, fixed, named)
            self._laid_out[key] = parameters
        if self._needs_context:
            enter_device(device)
        return parameters.launcher(function, metadata, fixed, values)

    def launch(self, grid: int, device: torch.device, values: Mapping[str, object]) -> None:
        """Run `grid` programs on the current stream of the current device, in Triton's interpreter
        or by Triton's launcher; only compile the kernel where `absent_gpu` says so.

        Args:
            values: all arguments that aren't constants; it may also have those of other kernels.
        """
        absent = absent_gpu.in_force()
        if absent is not None:
            self._compile_for(absent)
            return
        arguments = self._in_order({**values, **self.constants})
        if INTERPRETED:
            interpret(self.function, grid, arguments, self.options.keywords())
            return
        kernel = self.compile(device.index)
        if device.index in self._functions:
            make_launcher(kernel)
        if self._needs_context:
            enter_device(device)
        launch_kernel(kernel, grid, arguments)


@lru_cache
def _most_shared(device: int) -> int:
    """Return the bytes of shared memory that a program can have."""
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])
