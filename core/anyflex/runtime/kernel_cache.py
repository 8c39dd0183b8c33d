"""Cache of compiled kernels by spec: asks the registry, compiles once, keeps the kernel.

It isn't on the hot path: a call with a known plan doesn't come here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress

import torch

from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.spec import Spec
from anyflex.errors import BackendRefused, GraphCaptureError, PluginError
from anyflex.registry import backend_table, cached_state, plugin_errors
from anyflex.registry.backend_choice import Choice, entry_line
from anyflex.registry.fallback import (
    warn_about_determinism,
    warn_about_fallback,
    warn_about_unused_options,
)
from anyflex.registry.freeze_options import KernelOptions
from anyflex.registry.registered_backend import Entry
from anyflex.runtime import disk_cache
from anyflex.runtime.artifact_origin import write_origin
from anyflex.runtime.compiled_kernel import CompiledKernel, summary

__all__ = ["forget", "is_capturing", "kernel_for"]

KERNELS = 512
"""Maximum number of live kernels that are kept, LRU."""

_kernels: OrderedDict[tuple[Entry, Spec], Kernel] = OrderedDict()


class _Compiling:
    """A running compile: one thread works, the others wait for it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.done = threading.Event()


_compiling: dict[tuple[Entry, Spec], _Compiling] = {}


def kernel_for(
    spec: Spec,
    names: tuple[str, ...],
    explicit: str | None,
    kernel_options: KernelOptions,
) -> CompiledKernel:
    """Return the kernel of the first candidate that takes the spec and can compile it.

    Args:
        spec: without options.
        names: from `anyflex.registry.forced_backends.names_in_force`.
        explicit: the argument ``backend=``, or None.
        kernel_options: from `anyflex.registry.freeze_options.freeze_options`.

    Raises:
        ArgumentError, ArgumentTypeError: an unknown backend name, or wrong ``kernel_options``.
        BackendRefused: the forced backend, or everybody, refuses.
        PluginError: the forced backend is broken.
        GraphCaptureError: the kernel would have to be compiled inside a graph capture.
    """
    choice = Choice(spec, names, explicit, kernel_options)
    trace = list(choice.trace)
    for entry in choice.candidates:
        answer = choice.ask(entry)
        error, line = answer.error, answer.line
        if answer.decision is not None and answer.state.backend is not None:
            try:
                kernel = _compiled_once(entry, answer.state.backend, answer.spec)
            except BackendRefused as refusal:
                line = entry_line(entry, "refuses", str(refusal))
            except PluginError as failure:
                error = failure
                line = entry_line(entry, "broken", _short(failure))
            else:
                warn_about_fallback(choice, trace, entry.name)
                warn_about_unused_options(answer)
                warn_about_determinism(answer)
                return CompiledKernel(
                    answer.state.backend,
                    kernel,
                    answer.spec,
                    answer.decision,
                    entry.distribution,
                    tuple(trace),
                )
        trace.append(line)
        if error is not None:
            if choice.forced_by:
                raise plugin_errors.again(error)
            if line.outcome in ("broken", "conflict"):
                plugin_errors.report(error, "it is skipped")
    raise choice.refused(trace)


def _short(failure: PluginError) -> str:
    # Reported without the spec: a warning comes once per reason, not once per spec.
    cause = failure.__cause__
    return str(failure) if cause is None else f"compile() raised {plugin_errors.first_line(cause)}"


def _compiled_once(entry: Entry, backend: Backend, spec: Spec) -> Kernel:
    """Return the live kernel, or compile it. Threads that come meanwhile wait; if it fails they
    try it themselves, one after the other."""
    key = (entry, spec)
    while (kernel := _live(key)) is None:
        mine = _Compiling()
        running = _compiling.setdefault(key, mine)
        if running is mine:
            try:
                # A compile may have ended between the look above and this one's beginning.
                if (kernel := _live(key)) is None:
                    kernel = _kernels[key] = _compile(entry, backend, spec)
                    if len(_kernels) > KERNELS:
                        with suppress(KeyError):  # `forget` in another thread
                            _kernels.popitem(last=False)
                return kernel
            finally:
                _compiling.pop(key, None)
                mine.done.set()
        if running.thread == mine.thread:
            raise entry.error("is broken: compile() calls anyflex for the spec that it compiles")
        running.done.wait()
    return kernel


def _live(key: tuple[Entry, Spec]) -> Kernel | None:
    """Return the kernel, which is the last one used now, or None."""
    kernel = _kernels.get(key)
    with suppress(KeyError):  # none, or another thread has dropped it since
        _kernels.move_to_end(key)
    return kernel


def is_capturing(device_type: str) -> bool:
    """Whether the current stream of this kind of device records a graph."""
    module = getattr(torch, device_type, None)
    capturing = getattr(module, "is_current_stream_capturing", None)
    if capturing is None:
        return False
    # An uninitialised device captures nothing, and asking would start it.
    initialized = getattr(module, "is_initialized", None)
    return bool((initialized is None or initialized()) and capturing())


def _compile(entry: Entry, backend: Backend, spec: Spec) -> Kernel:
    if is_capturing(spec.device_type):
        raise GraphCaptureError(
            f"backend {entry.name} would have to compile a kernel while a device graph is being "
            "captured; call anyflex.flex_attention once with the same kind of arguments (and "
            "gradients) before the capture"
        )
    with plugin_errors.plugin_code(entry.name, entry.distribution, "fingerprint()"):
        fingerprint: object = backend.fingerprint()
    if not isinstance(fingerprint, str):
        raise entry.error(f"is broken: fingerprint() must return a str, got {fingerprint!r}")
    digest = spec.digest()
    artifacts = disk_cache.artifacts_for(
        plugin=entry.name,
        package=entry.package,
        version=entry.version,
        fingerprint=fingerprint,
        spec_digest=digest,
        origin=write_origin(entry.name, entry.package, entry.version, fingerprint, spec),
        on_disk=not entry.in_process,
    )
    start = time.perf_counter()
    with plugin_errors.plugin_code(
        entry.name,
        entry.distribution,
        f"compile(spec {digest[:12]}: {summary(spec)})",
        may_refuse=True,
    ):
        kernel = backend.compile(spec, artifacts)
    if not isinstance(kernel, Kernel):
        raise entry.error(
            f"is broken: compile() must return an anyflex.plugin.Kernel, got {kernel!r} "
            f"({type(kernel).__name__})"
        )
    backend_table.current().hooks.compiled(spec, entry.name, time.perf_counter() - start)
    return kernel


def forget() -> None:
    """Drop live kernels; those in use stay valid."""
    _kernels.clear()


cached_state.on_replaced(forget)

if hasattr(os, "register_at_fork"):
    # A running compile belongs to a thread that doesn't exist in the child.
    os.register_at_fork(after_in_child=_compiling.clear)
