"""Launcher in C for NVIDIA's GPUs, which bypasses Triton's own launcher.

Triton's launcher takes all arguments as Python objects at each launch, and Triton 3.6 compiles one
in C for each signature. This one, nvidia_launch.c, is compiled once per machine, into Triton's
cache, by the compiler that Triton uses, and takes only the arguments that differ from call to
call. It is optional: Triton launches what it doesn't take.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from anyflex.plugin import PerformanceWarning, free_in_child
from anyflex_triton.arguments import Part, Types, make_context

__all__ = [
    "IS_KNOWN",
    "Launcher",
    "Parameters",
    "launch_module",
    "load_kernel",
    "takes",
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
_NO_INTERLEAVING, _PROMOTION_TO_128_BYTES, _ZEROS_OUTSIDE = 0, 2, 0
"""Values of CUDA's enumerations, for a descriptor."""
_LIBRARY = "libcuda.so.1"
"""Name of CUDA's driver."""

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
        module.open_driver(_LIBRARY)
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
    """

    __slots__ = ("_launch",)

    def __init__(self, launch: Callable[[int, int, Mapping[str, Any]], bool]) -> None:
        self._launch = launch

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
    kernel.module, kernel.function = module, function
    return int(function)


def takes(metadata: Any) -> bool:
    """Whether this launcher launches a compiled kernel.

    Args:
        metadata: the compiler's.
    """
    return (
        IS_KNOWN
        and metadata.target.backend == "cuda"
        and metadata.num_ctas == 1
        and not metadata.launch_cooperative_grid
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
        and launch_module() is not None
    )


class Parameters:
    """Parameters of a kernel in their order, with gaps for the values that a launcher or a call
    fills.

    Args:
        order: names of the kernel's arguments.
        types: types of those that aren't constants.
        metadata: the compiler's.
        fixed: names of the arguments that a launcher is made with, all descriptors among them. A
            call gives the others.
        named: as in `FixedLaunch`.
    """

    def __init__(
        self, order: tuple[str, ...], types: Mapping[str, Types], metadata: Any,
        fixed: Collection[str], named: Mapping[str, str | Part],
    ) -> None:  # fmt: skip
        self._named = named
        self._bytes = bytearray()
        self._places: list[tuple[int, int]] = []
        self._fixed: list[tuple[str, int, str, int]] = []
        self._descriptors: list[tuple[str, Any, tuple[int, int, int]]] = []
        self._slots: list[tuple[str, int, str, int, int]] = []
        metas = iter(metadata.tensordesc_meta or ())
        for name in order:
            kind = types.get(name, ())
            if isinstance(kind, tuple):
                for element, each in enumerate(kind):
                    self._add(name, element, each, name in fixed)
            elif kind.startswith("tensordesc"):
                self._add_descriptor(name, next(metas))
            else:
                self._add(name, -1, kind, name in fixed)
        for _ in range(_SCRATCH):
            self._append("q")
        # Slots of one value follow each other, so that its address is read once.
        self._slots.sort(key=lambda slot: slot[0])

    def _append(self, letter: str, size: int = 0) -> int:
        """Append a parameter, and return its offset."""
        size = size or struct.calcsize(letter)
        unit = min(size, _ALIGNMENT)
        offset = -(-len(self._bytes) // unit) * unit
        self._bytes += bytes(offset - len(self._bytes) + size)
        self._places.append((offset, size))
        return offset

    def _add(self, name: str, element: int, kind: str, is_fixed: bool) -> None:
        """Append an argument, or an element of a tuple."""
        letter = "P" if kind.startswith("*") else _NUMBERS[kind]
        offset = self._append(letter)
        if is_fixed and letter != "P":
            self._fixed.append((name, element, letter, offset))
        else:
            self._add_slot(name, element, letter, offset)

    def _add_descriptor(self, name: str, meta: Mapping[str, Any]) -> None:
        """Append a descriptor, and the numbers that Triton gives a kernel behind it: sizes in 32
        bits and strides in 64."""
        offset = self._append("", _DESCRIPTOR_BYTES)
        sizes, strides = (
            min([self._append(letter) for _ in meta["block_size"]]) for letter in "iq"
        )
        self._descriptors.append((name, meta, (offset, sizes, strides)))
        self._add_slot(name, -1, "A", offset)

    def _source(self, name: str) -> tuple[str, int]:
        """Return the name of the call's value that an argument takes, and the bytes from its
        address to the argument's."""
        source = self._named.get(name, name)
        return (source.of, source.begin) if isinstance(source, Part) else (source, 0)

    def _add_slot(self, name: str, element: int, kind: str, offset: int) -> None:
        source, begin = self._source(name)
        # One object per name: nvidia_launch.c recognizes the same value by it.
        self._slots.append((sys.intern(source), element, kind, offset, begin))

    def launcher(
        self, function: int, metadata: Any, fixed: Mapping[str, Any], values: Mapping[str, Any]
    ) -> Launcher:
        """Return the launcher of a loaded kernel.

        Args:
            function: result of `load_kernel`.
            metadata: the compiler's.
            fixed: as in `FixedLaunch`.
            values: a call's, for the tensors of descriptors.

        Raises:
            RuntimeError: the kernel takes other parameters, or the driver refuses a descriptor.
        """
        module = launch_module()
        assert module is not None
        content = bytearray(self._bytes)
        for name, element, letter, offset in self._fixed:
            value = fixed[name]
            struct.pack_into(letter, content, offset, value if element < 0 else value[element])
        for name, meta, (offset, sizes, strides) in self._descriptors:
            shape, steps, _ = fixed[name]
            tensor, begin = self._source(name)
            encoded = _encoded(values[tensor].data_ptr() + begin, shape, steps, meta)
            content[offset : offset + _DESCRIPTOR_BYTES] = encoded
            struct.pack_into(f"{len(shape)}i", content, sizes, *shape)
            struct.pack_into(f"{len(shape)}q", content, strides, *steps)
        launch = module.Launch(
            function, metadata.target.warp_size * metadata.num_warps, metadata.shared,
            metadata.launch_pdl, bytes(content), tuple(self._places), tuple(self._slots),
        )  # fmt: skip
        return Launcher(launch)


@functools.lru_cache(1)
def _driver() -> ctypes.CDLL:
    # Opening it takes longer than encoding, and a growing KV cache has new descriptors each step.
    return ctypes.CDLL(_LIBRARY)


def _encoded(
    address: int, shape: Sequence[int], strides: Sequence[int], meta: Mapping[str, Any]
) -> bytes:
    """Return a descriptor as Triton encodes it.

    Args:
        shape, strides: of the tensor, in elements.
        meta: the compiler's.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    def backwards(kind: Any, numbers: Sequence[int]) -> Any:
        return (kind * len(numbers))(*reversed(numbers))

    room = ctypes.create_string_buffer(_DESCRIPTOR_BYTES + _ALIGNMENT)
    begin = -ctypes.addressof(room) % _ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + begin),
        TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
        len(shape),
        ctypes.c_void_p(address),
        backwards(ctypes.c_uint64, shape),
        # The last dimension has no stride: its elements are neighbours.
        backwards(ctypes.c_uint64, [stride * meta["elem_size"] for stride in strides[:-1]]),
        backwards(ctypes.c_uint32, meta["block_size"]),
        backwards(ctypes.c_uint32, [1] * len(shape)),
        _NO_INTERLEAVING,
        meta["swizzle"],
        _PROMOTION_TO_128_BYTES,
        _ZEROS_OUTSIDE,
    )
    if status:
        raise RuntimeError(
            f"CUDA error {status}, for a descriptor of a tensor of shape {shape} and strides "
            f"{strides}"
        )
    return room.raw[begin : begin + _DESCRIPTOR_BYTES]
