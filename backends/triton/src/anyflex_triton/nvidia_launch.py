"""Launcher in C for NVIDIA's GPUs, which bypasses Triton's own launcher.

Triton's launcher takes all arguments as Python objects at each launch, and Triton 3.6 compiles one
in C for each signature. This one, nvidia_launch.c, is compiled once per machine, into Triton's
cache, by the compiler that Triton uses, and takes only the arguments that differ from call to
call. It is optional: where `parameters_of` returns None, Triton launches.
"""

from __future__ import annotations

import logging
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from anyflex.plugin import PerformanceWarning, free_in_child
from anyflex_triton.arguments import Boxes, Types, make_context

__all__ = [
    "IS_KNOWN",
    "Launcher",
    "Parameters",
    "launch_module",
    "load_kernel",
    "parameters_of",
]

IS_KNOWN = triton.__version__.startswith("3.6.")
"""Whether this module knows the parameters that this version of Triton gives a kernel. Where it is
False, Triton launches."""

_NUMBERS = {"i32": "i", "i64": "q", "fp32": "f"}
"""Types of numbers -> letters of `struct` and of nvidia_launch.c."""
_SCRATCH = 2
"""Number of pointers to scratch memory that Triton adds to each kernel's own arguments; these
kernels don't use them."""
_TENSOR_MEMORY = 512
"""Columns of tensor memory that a multiprocessor of Blackwell has."""
_DESCRIPTOR_BYTES, _ALIGNMENT = 128, 128
"""Size of a descriptor, and alignment of its address, in bytes."""

_log = logging.getLogger(__name__)
_made: list[Any] = []
_making = threading.Lock()
free_in_child(sys.modules[__name__], "_making")


def launch_module() -> Any | None:
    """Return nvidia_launch.c, compiled and bound to the driver; None, with a warning the first
    time, where that fails."""
    with _making:
        if not _made:
            _made.append(_make_module())
        return _made[0]


def _make_module() -> Any | None:
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.build import compile_module_from_src

    try:
        module = compile_module_from_src(
            src=Path(__file__).with_suffix(".c").read_text(),
            name="anyflex_nvidia_launch",
            include_dirs=nvidia.include_dirs,
        )
        module.open_driver("libcuda.so.1")
    except Exception as error:  # noqa: BLE001  calls work without it
        _log.info("the launcher in C can't be made", exc_info=True)
        cure = "It takes a C compiler (CC, gcc or clang) and Python's headers."
        if isinstance(error, OSError) and "libcuda" in str(error):
            cure = "It takes NVIDIA's driver 525 or a later one."
        warnings.warn(
            "anyflex's launcher can't be made, and Triton's own launches kernels instead, which "
            f"takes some microseconds longer a call: {error}. {cure}",
            PerformanceWarning,
            stacklevel=2,
        )
        return None
    return module


class Launcher:
    """Launches one kernel on one device.

    Args:
        launch: function of `nvidia_launch.c` that takes a number of programs, a stream and a
            call's values. It returns False, with nothing launched, where the thread has no context
            of the device.
        function: the driver's handle of the kernel.
    """

    __slots__ = ("_launch", "function")

    def __init__(
        self, launch: Callable[[int, int, Mapping[str, Any]], bool], function: int
    ) -> None:
        self._launch = launch
        self.function = function

    def launch(self, grid: int, device: torch.device, values: Mapping[str, Any]) -> None:
        """Run `grid` programs on the current stream of the current device.

        Args:
            values: a dict of the arguments that weren't fixed; it may have more.
        """
        stream = driver.active.get_current_stream(device.index)
        if self._launch(grid, stream, values):
            return
        # This is the thread's first launch, or its context was taken away.
        make_context(device)
        if not self._launch(grid, stream, values):
            raise RuntimeError(f"this thread can't have a CUDA context on {device}")


def load_kernel(kernel: Any, device: int) -> int:
    """Load a compiled kernel on the current device and return the driver's handle of it.

    Triton's own loading also makes Triton's launcher, for which it starts the C compiler. Here
    that is left to a hook that needs it.

    Raises:
        OutOfResources: the kernel needs more than a multiprocessor has.
    """
    metadata, runtime, utils = kernel.metadata, knobs.runtime, driver.active.utils
    most = utils.get_device_properties(device)["max_shared_mem"]
    if metadata.shared > most:
        raise OutOfResources(metadata.shared, most, "shared memory")
    if (getattr(metadata, "tmem_size", None) or 0) > _TENSOR_MEMORY:
        raise OutOfResources(metadata.tmem_size, _TENSOR_MEMORY, "tensor memory")
    facts = (kernel.name, kernel.metadata_group, kernel.hash)
    if runtime.kernel_load_start_hook is not None:
        runtime.kernel_load_start_hook(None, None, *facts)
    module, function, _, _, most_threads = utils.load_binary(
        kernel.name, kernel.kernel, metadata.shared, device
    )
    threads = metadata.num_warps * metadata.target.warp_size
    if threads > most_threads:
        raise OutOfResources(threads, most_threads, "threads")
    if runtime.kernel_load_end_hook is not None:
        runtime.kernel_load_end_hook(module, function, *facts)
    return int(function)


def parameters_of(
    order: tuple[str, ...], types: Mapping[str, Types], metadata: Any,
    fixed: Collection[str] = (), described: Mapping[str, str] | None = None,
) -> Parameters | None:  # fmt: skip
    """Return how a compiled kernel takes its arguments, or None where that isn't known.

    Args:
        order: names of its arguments.
        types: types of the arguments that aren't constants.
        metadata: the compiler's.
        fixed: names of the arguments that a launcher is made with. A call gives the others; for a
            descriptor it gives `Boxes`.
        described: argument of `FixedArguments`.
    """
    if (
        not IS_KNOWN
        or metadata.target.backend != "cuda"
        or metadata.num_ctas != 1
        or metadata.launch_cooperative_grid
        or metadata.global_scratch_size
        or metadata.profile_scratch_size
    ):
        return None
    parameters = Parameters()
    metas = iter(metadata.tensordesc_meta or ())
    for name in order:
        kind = types.get(name)
        if kind is None:
            continue
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            meta = next(metas, None)
            if meta is None or meta["fp4_padded"]:
                return None
            tensor = (described or {}).get(name, name) if name in fixed else None
            parameters.add_descriptor(name, meta, tensor)
        elif not parameters.add(name, kind, name in fixed):
            return None
    for _ in range(_SCRATCH):
        parameters.append(struct.pack("Q", 0))
    return parameters


class Parameters:
    """Parameters of a kernel in their order, with gaps for the values that a launcher or a call
    fills."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._places: list[tuple[int, int]] = []
        self._fixed: list[tuple[str, int, str, int]] = []
        self._descriptors: list[tuple[Any, str, str]] = []
        self._slots: list[tuple[str, int, str, Any]] = []

    def append(self, content: bytes) -> int:
        """Append a parameter, and return its offset."""
        size = len(content)
        unit = min(size, _ALIGNMENT)
        offset = -(-len(self._bytes) // unit) * unit
        self._bytes += bytes(offset - len(self._bytes)) + content
        self._places.append((offset, size))
        return offset

    def add(self, name: str, types: Types, is_fixed: bool, element: int = -1) -> bool:
        """Append an argument, a tuple element by element, and return whether its type is known."""
        if not isinstance(types, str):
            return all(self.add(name, each, is_fixed, place) for place, each in enumerate(types))
        letter = "P" if types.startswith("*") else _NUMBERS.get(types)
        if letter is None:
            return False
        offset = self.append(bytes(struct.calcsize(letter)))
        if is_fixed and letter != "P":
            self._fixed.append((name, element, letter, offset))
        else:
            self._add_slot(name, element, letter, offset)
        return True

    def add_descriptor(self, name: str, meta: Mapping[str, Any], tensor: str | None) -> None:
        """Append a descriptor, and the numbers that Triton gives a kernel behind it: sizes in 32
        bits and strides in 64.

        Args:
            meta: the compiler's.
            tensor: name of the tensor of a fixed descriptor; None: a call gives `Boxes`.
        """
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        offset = self.append(bytes(_DESCRIPTOR_BYTES))
        box = tuple(meta["block_size"])
        sizes, strides = (
            min([self.append(bytes(struct.calcsize(letter))) for _ in box]) for letter in "iq"
        )
        kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        place = (offset, sizes, strides, kind, meta["swizzle"], meta["elem_size"], box)
        if tensor is None:
            self._add_slot(name, -1, "D", place)
        else:
            self._descriptors.append((place, name, tensor))
            self._add_slot(tensor, -1, "A", offset)

    def _add_slot(self, name: str, element: int, kind: str, place: object) -> None:
        # One object per name: nvidia_launch.c recognizes the same value by it.
        self._slots.append((sys.intern(name), element, kind, place))

    def launcher(
        self,
        function: int,
        metadata: Any,
        fixed: Mapping[str, Any] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> Launcher:
        """Return the launcher of a loaded kernel.

        Args:
            function: result of `load_kernel`.
            metadata: the compiler's.
            fixed: argument of `FixedArguments`.
            values: a call's, for the tensors of fixed descriptors.

        Raises:
            RuntimeError: the kernel takes other parameters, or the driver refuses a descriptor.
        """
        module = launch_module()
        assert module is not None
        fixed, values = fixed or {}, values or {}
        content = bytearray(self._bytes)
        for name, element, letter, offset in self._fixed:
            value = fixed[name]
            struct.pack_into(letter, content, offset, value if element < 0 else value[element])
        descriptors = [
            (place, Boxes(values[tensor], *fixed[name]))
            for place, name, tensor in self._descriptors
        ]
        # Slots of one value follow each other, so that its address is read once.
        slots = sorted(self._slots, key=lambda slot: slot[0])
        launch = module.Launch(
            function, metadata.target.warp_size * metadata.num_warps, metadata.shared,
            metadata.launch_pdl, bytes(content), tuple(self._places), tuple(descriptors),
            tuple(slots),
        )  # fmt: skip
        return Launcher(launch, function)
