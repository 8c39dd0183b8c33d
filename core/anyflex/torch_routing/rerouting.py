"""Switch of the re-routing: on, off, and on which devices.

Nothing is replaced: torch's functions stay the objects that everybody has imported, and run other
code until `restore_torch`. torch's compiler guards its graphs by that code, so a function that was
compiled before is compiled again, and no cache can confuse the two: graphs hold anyflex's
operation, or torch's.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from anyflex.errors import ArgumentError, ArgumentTypeError, BackendRefused
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.registry import backend_table, environment

__all__ = [
    "reroute_from_environment",
    "reroute_torch",
    "rerouted_devices",
    "restore_torch",
    "unrouted_flex_attention",
]

_lock = threading.Lock()
free_in_child(sys.modules[__name__])


def reroute_torch(devices: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """Send calls of torch's ``flex_attention`` and ``create_block_mask`` to anyflex, in code that
    has imported them from ``torch.nn.attention.flex_attention``, before or after.

    It holds for the process, eager calls and torch.compile, forward and backward, until
    `restore_torch`. Tensors on other devices stay torch's. A second call names all devices anew.

    Args:
        devices: device types, for example ``["cpu"]``. None means those for which a backend is
            usable here, but for the reference and for backends of negative priority, which are
            there to compare with.

    Returns:
        The device types that are re-routed now.

    Raises:
        ArgumentError, ArgumentTypeError: an unknown device type, a device with an index, or none.
        BackendRefused: with `devices` None, no such backend is usable; or torch's functions aren't
            those of torch 2.11 to 2.15.

    Examples:
        >>> import torch, anyflex
        >>> from torch.nn.attention.flex_attention import flex_attention
        >>> anyflex.reroute_torch(["cpu"])
        ('cpu',)
        >>> q = torch.randn(1, 2, 64, 16, requires_grad=True)
        >>> flex_attention(q, q, q).sum().backward()  # torch refuses gradients on a CPU
        >>> anyflex.restore_torch()
    """
    wanted = _usable_devices() if devices is None else _checked(devices)
    from anyflex.torch_routing import stand_ins

    originals = _originals()
    with _lock:
        codes = {
            name: stand_ins.stand_in(name, function)
            for name, function in originals.FUNCTIONS.items()
        }
        originals.rerouted = wanted
        for name, code in codes.items():
            originals.FUNCTIONS[name].__code__ = code
    return wanted


def restore_torch() -> None:
    """Give torch's functions their own code back; without a re-routing it does nothing."""
    originals = _originals()
    with _lock:
        if originals.rerouted:
            for name, function in originals.FUNCTIONS.items():
                function.__code__ = getattr(originals, name).__code__
        originals.rerouted = ()


def rerouted_devices() -> tuple[str, ...]:
    """Return the device types that are re-routed now."""
    devices: tuple[str, ...] = _originals().rerouted
    return devices


def reroute_from_environment() -> None:
    """Re-route as ANYFLEX_TORCH says. Raises as `reroute_torch`."""
    devices = environment.torch_devices()
    if devices is not None:
        reroute_torch(devices or None)


def unrouted_flex_attention() -> Callable[..., Any]:
    """Return torch's own flex_attention, re-routed or not: a backend that computes by it would
    otherwise be called by itself."""
    function: Callable[..., Any] = _originals().flex_attention
    return function


def _originals() -> Any:
    # ANYFLEX_TORCH takes effect when torch's module is imported, and needs the other one: were
    # that imported first, it would still be without its names.
    importlib.import_module("torch.nn.attention.flex_attention")
    from anyflex.torch_routing import originals

    return originals


def _usable_devices() -> tuple[str, ...]:
    usable = set()
    for entry in backend_table.current().every():
        if entry.device_type not in ("", "*"):
            state = entry.state()
            if (
                state.kind == "usable"
                and state.backend is not None
                and state.backend.priority >= 0
            ):
                usable.add(entry.device_type)
    if not usable:
        raise BackendRefused(
            "reroute_torch(): no backend but the reference is usable here, see `anyflex doctor`: "
            "install one, for example anyflex[cpu], or name the devices that the reference shall "
            "serve, as reroute_torch(['cpu'])"
        )
    return tuple(sorted(usable))


def _checked(devices: Any) -> tuple[str, ...]:
    names = (devices,) if isinstance(devices, str) else devices
    if not isinstance(names, Iterable):
        raise ArgumentTypeError(
            f"devices must be device types, for example ['cpu'], got {type(devices).__name__}"
        )
    checked: list[str] = []
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"devices: a device type must be a str, for example 'cpu', got {name!r}"
            )
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ArgumentError(f"devices: torch knows no device type {name!r}") from error
        if device.index is not None or device.type == "meta":
            cure = "holds no numbers" if device.type == "meta" else f"say {device.type!r}"
            raise ArgumentError(f"devices: {name!r} can't be re-routed by itself: {cure}")
        checked.append(device.type)
    if not checked:
        raise ArgumentError("devices is empty: name a device type, or call restore_torch()")
    return tuple(sorted(set(checked)))
