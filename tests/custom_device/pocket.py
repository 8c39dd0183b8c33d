"""pocket: a device of torch's open registration, in Python alone.

Its memory is the host's, under another label: a DLPack capsule of a CPU tensor whose device field
is rewritten makes a plain ``torch.Tensor`` on "pocket" that shares the storage, and back. One
fallback for all operations relabels the arguments, computes on the CPU and relabels the results.
Importing this renames PrivateUse1 for the whole process, for good: do it in a subprocess.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["NAME", "PocketModule", "module"]

NAME = "pocket"

_CPU, _EXTENSION = 1, 12  # kDLCPU, kDLExtDev of dlpack.h


class PocketModule:
    """``torch.pocket``: the functions that torch itself calls, and nothing more. It has no context
    manager that selects a device and knows nothing of autocast; tests add what they need."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


class _Head(ctypes.Structure):
    """The first fields of DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _labelled(tensor: Tensor, device_type: int) -> Tensor:
    """Return a tensor of the same memory under another device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    address = _pointer(capsule, b"dltensor")
    head = ctypes.cast(address, ctypes.POINTER(_Head)).contents
    head.device_type, head.device_index = device_type, 0
    labelled: Tensor = torch._C._from_dlpack(capsule)
    return labelled


def _fallback(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute any operation on the CPU."""
    pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        if not isinstance(value, Tensor) or value.device.type != NAME:
            return value
        if value.numel():
            host = _labelled(value, _CPU)
        else:  # the operation may resize it, which foreign memory doesn't allow
            host = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        pairs[id(host)] = value, host
        return host

    host_args, host_kwargs = _pytree.tree_map(on_host, (args, kwargs))
    if operation is torch.ops.aten._copy_from.default:
        host_args[1].copy_(host_args[0])
        return args[1]
    results = operation(*host_args, **host_kwargs)
    for value, host in pairs.values():
        if value.shape != host.shape or value.stride() != host.stride():
            value.data = _labelled(host, _EXTENSION)

    def on_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # An operation in place returns the very object that it changed.
        return pairs[id(value)][0] if id(value) in pairs else _labelled(value, _EXTENSION)

    return _pytree.tree_map(on_device, results)


def _new(operation: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        return _labelled(operation(*args, **{**kwargs, "device": "cpu"}), _EXTENSION)

    return make


module = PocketModule()
_setup_privateuseone_for_python_backend(NAME, module)
# Kept alive: a library that is collected takes its kernels along.
_everything = Library("_", "IMPL")
_everything.fallback(_fallback, "PrivateUse1")
# Under torch.autocast nothing is cast by itself.
_everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_factories = Library("aten", "IMPL")
_factories.impl("empty.memory_format", _new(torch.ops.aten.empty.memory_format), "PrivateUse1")
_factories.impl("empty_strided", _new(torch.ops.aten.empty_strided.default), "PrivateUse1")
