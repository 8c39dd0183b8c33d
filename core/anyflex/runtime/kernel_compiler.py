"""Compilation of a spec by the first candidate that takes it, once: threads that come meanwhile
wait."""

from __future__ import annotations

import os
import threading
import time

import torch

from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.spec import Spec
from anyflex.errors import BackendRefused, GraphCaptureError, PluginError
from anyflex.process.lru import Recent
from anyflex.registry import backend_table, cached_state, plugin_errors
from anyflex.registry.backend_choice import Choice, TraceLine
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

__all__ = ["decide", "forget"]

KERNELS = 512
"""Maximum number of live kernels that are kept, LRU."""


class _Compiling:
    """A running compile: one thread works, the others wait for it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.thread = threading.get_ident()
        self.kernel: Kernel | None = None
        self.error: Exception | None = None


class _State:
    """State that `forget` drops."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way: dict[tuple[Entry, Spec], _Compiling] = {}
        self.kernels: Recent[tuple[Entry, Spec], Kernel] = Recent(KERNELS)


_state = _State()


def decide(
    spec: Spec,
    names: tuple[str, ...],
    explicit: str | None,
    kernel_options: KernelOptions,
    posed: bool = False,
) -> CompiledKernel:
    """Return the kernel of the first candidate that takes the spec and can compile it. See
    `anyflex.runtime.kernel_cache.kernel_for`."""
    choice = Choice(spec, names, explicit, kernel_options, posed)
    trace = list(choice.trace)
    for entry in choice.candidates:
        answer = choice.ask(entry)
        error, line = answer.error, answer.line
        if answer.decision is not None and answer.state.backend is not None:
            try:
                kernel = _compiled_once(entry, answer.state.backend, answer.spec)
            except BackendRefused as refusal:
                line = TraceLine(entry.name, entry.distribution, "refuses", str(refusal))
            except PluginError as failure:
                error = failure
                line = TraceLine(entry.name, entry.distribution, "broken", _short(failure))
            else:
                warn_about_fallback(choice, trace, entry.name)
                warn_about_unused_options(answer)
                warn_about_determinism(answer)
                chosen = TraceLine(entry.name, entry.distribution, "chosen", "")
                return CompiledKernel(
                    answer.state.backend,
                    kernel,
                    answer.spec,
                    answer.decision,
                    entry.distribution,
                    (*trace, chosen),
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
    """Return the live kernel, or compile it; threads that come meanwhile wait for the result, and
    for the same error."""
    state = _state
    key = (entry, spec)
    while True:
        kernel = state.kernels.get(key)
        if kernel is not None:
            return kernel
        with state.lock:
            compiling = state.under_way.get(key)
            mine = compiling is None
            if compiling is None:
                # Looked up again: it may have been finished between the two looks.
                kernel = state.kernels.get(key)
                if kernel is not None:
                    return kernel
                compiling = state.under_way[key] = _Compiling()
        if mine:
            try:
                compiling.kernel = _compile(entry, backend, spec)
                state.kernels.put(key, compiling.kernel)
                return compiling.kernel
            except Exception as error:  # Raised here and in the waiting threads.
                compiling.error = error
                raise
            finally:
                with state.lock:
                    state.under_way.pop(key, None)
                compiling.done.set()
        if compiling.thread == threading.get_ident():
            raise entry.error("is broken: compile() calls anyflex for the spec that it compiles")
        compiling.done.wait()
        if compiling.kernel is not None:
            return compiling.kernel
        if isinstance(compiling.error, PluginError):
            raise plugin_errors.again(compiling.error)
        if compiling.error is not None:
            raise compiling.error
        # The thread that compiled was interrupted: try it here.


def _is_capturing(device_type: str) -> bool:
    """Whether the current stream of this kind of device records a graph."""
    module = getattr(torch, device_type, None)
    capturing = getattr(module, "is_current_stream_capturing", None)
    if capturing is None:
        return False
    # An uninitialised device captures nothing, and asking would start it.
    initialized = getattr(module, "is_initialized", None)
    return bool((initialized is None or initialized()) and capturing())


def _compile(entry: Entry, backend: Backend, spec: Spec) -> Kernel:
    if _is_capturing(spec.device_type):
        raise GraphCaptureError(
            f"backend {entry.name} would have to compile a kernel while a device graph is being "
            "captured; call anyflex.flex_attention once with the same kind of arguments (and "
            "gradients) before the capture"
        )
    with plugin_errors.plugin_code(entry.name, entry.distribution, "fingerprint()"):
        fingerprint = backend.fingerprint()
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
    global _state
    _state = _State()


cached_state.on_replaced(forget)


def _after_fork() -> None:
    # A running compile belongs to a thread that doesn't exist in the child; locks may be held by
    # one. Finished kernels stay.
    global _state
    old, _state = _state, _State()
    _state.kernels.copy_from(old.kernels)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
