"""Facts that ``anyflex doctor`` prints, ready for JSON."""

from __future__ import annotations

import dataclasses
import platform
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import anyflex
from anyflex.cli.device_argument import seen_device_types
from anyflex.cli.self_test import ATTEMPTS, SLOW_S, Attempt, SelfTest, self_test
from anyflex.contract import CONTRACT, CONTRACT_MIN
from anyflex.contract.capabilities import Capabilities
from anyflex.errors import AnyflexError, ArgumentError
from anyflex.process.progress_line import ProgressLine
from anyflex.registry import backend_table, environment, install_hints, plugin_errors
from anyflex.registry.discovery import hidden_copies
from anyflex.registry.doctor_report import BackendRow, backend_rows, hook_rows
from anyflex.registry.plugin_errors import first_line
from anyflex.runtime import disk_cache
from anyflex.tensors import torch_versions
from anyflex.torch_routing.rerouting import rerouted_devices

__all__ = ["collect"]

_FAILING_STATES = {"broken": "is broken", "conflict": "is registered by two distributions"}


def collect() -> dict[str, Any]:
    """Look at everything once. Loads every backend and runs a self-test on each usable one.

    Raises:
        PluginError: under ANYFLEX_STRICT=1, for a plugin that can't be registered.
    """
    device_types = seen_device_types()
    for entry in backend_table.current().every():
        with _told_if_slow(f"backend {entry.name}: importing and probing it"):
            entry.state()
    backends = [_backend(row, device_types) for row in backend_rows()]
    facts: dict[str, Any] = {
        "versions": _versions(),
        "devices": [_device(device_type, backends) for device_type in device_types],
        "backends": backends,
        # After the self-tests, which call the hooks.
        "hooks": [dataclasses.asdict(row) for row in hook_rows()],
        "stale_copies": [
            [dataclasses.asdict(copy) for copy in copies] for copies in hidden_copies()
        ],
        "variables": [dataclasses.asdict(variable) for variable in environment.in_force()],
        "variables_of_others": [
            {"name": name, "value": value} for name, value in environment.variables_of_others()
        ],
        "unknown_variables": [
            {"name": name, "nearest": nearest} for name, nearest in environment.unknown_variables()
        ],
        "torch_routing": _torch_routing(),
        "cache": _cache(),
    }
    facts["failures"] = _failures(facts)
    return facts


def _versions() -> dict[str, Any]:
    return {
        "anyflex": anyflex.__version__,
        "contracts": [CONTRACT_MIN, CONTRACT],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_tested": list(torch_versions.TESTED),
        "torch_in_tested_range": torch_versions.is_tested(torch.__version__),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _device(device_type: str, backends: list[dict[str, Any]]) -> dict[str, Any]:
    usable = [
        backend["name"]
        for backend in backends
        if backend["device_type"] == device_type and backend["state"] == "usable"
    ]
    installed = any(backend["device_type"] == device_type for backend in backends)
    return {
        "type": device_type,
        "count": 1 if device_type == "cpu" else torch.accelerator.device_count(),
        "name": _device_name(device_type),
        "backends": usable,
        "hint": None if installed else install_hints.install_line(device_type),
    }


def _device_name(device_type: str) -> str:
    if device_type == "cpu":
        threads = torch.get_num_threads()
        return f"{torch.backends.cpu.get_cpu_capability()}, {threads} threads"
    module = getattr(torch, device_type, None)
    name = getattr(module, "get_device_name", None)
    return str(name()) if callable(name) else ""


def _backend(row: BackendRow, device_types: list[str]) -> dict[str, Any]:
    facts = dataclasses.asdict(row)
    facts["requires"] = _requirements(row.distribution)
    facts["self_tests"] = []
    facts["fingerprint"] = ""
    facts["notes"] = []
    facts["layouts"] = []
    entry = backend_table.current().get(row.name)
    backend = entry.state().backend if entry is not None else None
    if row.state == "usable" and entry is not None and backend is not None:
        facts["fingerprint"] = "".join(_texts(row, backend.fingerprint))
        fields = backend.capabilities.known_fields
        named = (
            ("packed sequences", "q_layout"),
            ("keys in pages", "page_size"),
            ("sinks", "sinks"),
        )
        facts["layouts"] = [layout for layout, field in named if field in fields]
        wanted = device_types if row.device_type == "*" else [row.device_type]
        tests = [
            _timed(row.name, entry.distribution, backend.capabilities, device_type, attempts)
            for device_type in wanted
            if device_type in device_types
            for attempts in ATTEMPTS
        ]
        facts["self_tests"] = [dataclasses.asdict(test) | {"text": str(test)} for test in tests]
    if backend is not None:
        facts["notes"] = _texts(row, backend.notes)
    return facts


def _timed(
    name: str,
    distribution: str,
    can: Capabilities,
    device_type: str,
    attempts: tuple[Attempt, ...],
) -> SelfTest:
    begin = time.perf_counter()
    with _told_if_slow(f"backend {name}: its self-test of {attempts[0].what}"):
        test = self_test(name, distribution, can, device_type, attempts)
    return dataclasses.replace(test, seconds=round(time.perf_counter() - begin, 1))


def _texts(row: BackendRow, method: Callable[[], str | Iterable[str]]) -> list[str]:
    """Call a method of the backend and return its text or texts; where it raises, a line with the
    error and its location: the message of a `PluginError` refers to doctor."""
    what = f"{method.__name__}()"
    try:
        with plugin_errors.plugin_code(row.name, row.distribution, what):
            told = method()
            return [told] if isinstance(told, str) else [str(each) for each in told]
    except AnyflexError as error:
        cause = error.__cause__ or error
        *_, (frame, line) = traceback.walk_tb(cause.__traceback__)
        return [f"{what} raised {first_line(cause)} ({frame.f_code.co_filename}:{line})"]


@contextmanager
def _told_if_slow(what: str) -> Iterator[None]:
    """Show a line on stderr while the body takes long, because a hang prints nothing itself. On a
    terminal it disappears afterwards: the facts tell how long a self-test took."""
    progress = ProgressLine(sys.stderr, 0.0)
    text = f"{what} takes more than {SLOW_S:g} s"
    timer = threading.Timer(SLOW_S, progress.show, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        progress.clear()


def _requirements(package: str) -> list[str]:
    """Return which torch and triton the distribution asks for."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return []
    return [
        line
        for line in lines
        if line.startswith(("torch", "triton", "pytorch")) and "extra ==" not in line
    ]


def _cache() -> dict[str, Any]:
    folder: str | None
    problem: str | None
    sizes: list[int] = []
    try:
        store = disk_cache.store()
    except ArgumentError as error:
        values = {variable.name: variable.value for variable in environment.in_force()}
        folder, problem = values["ANYFLEX_CACHE_DIR"], str(error)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the facts have its message
            store.usable(create=True)
        folder, problem = str(store.folder), store.problem
        sizes = [item.size for item in store.items()]
    return {
        "folder": folder,
        "artifacts": len(sizes),
        "bytes": sum(sizes),
        "problem": problem,
    }


def _torch_routing() -> dict[str, Any]:
    """Return the devices on which torch's flex attention goes to anyflex in a process with these
    variables, and what hinders ANYFLEX_TORCH."""
    devices: tuple[str, ...] = ()
    problem = None
    try:
        # It imports torch's module, at which the variable takes effect.
        devices = rerouted_devices()
        if not devices and environment.torch_devices() is not None:
            problem = (
                "torch didn't call anyflex's entry point: unset TORCH_DEVICE_BACKEND_AUTOLOAD, or "
                "install anyflex again"
            )
    except AnyflexError as error:
        problem = first_line(error)
    return {"devices": list(devices), "problem": problem}


def _failures(facts: dict[str, Any]) -> list[str]:
    """Return one line for everything that makes ``doctor`` fail."""
    failures = [hook["reason"] for hook in facts["hooks"] if hook["state"] == "broken"]
    for backend in facts["backends"]:
        if backend["state"] in _FAILING_STATES:
            failures.append(f"backend {backend['name']} {_FAILING_STATES[backend['state']]}")
        elif backend["state"] == "incompatible" and not _serves(backend, facts["backends"]):
            failures.append(f"backend {backend['name']} is {backend['reason']}")
        failures += [
            f"backend {backend['name']}: {test['text']}"
            for test in backend["self_tests"]
            if test["passed"] is False
        ]
    failures += [
        f"{variable['name']}={variable['now']}: {variable['problem']}"
        for variable in facts["variables"]
        if variable["problem"] is not None
    ]
    if facts["torch_routing"]["problem"] is not None:
        failures.append(f"ANYFLEX_TORCH: {facts['torch_routing']['problem']}")
    registered = {backend["name"] for backend in facts["backends"]}
    forced = environment.backend_names()
    failures += [
        f"ANYFLEX_BACKEND={','.join(forced)}: there is no backend {name!r}"
        for name in forced
        if name not in registered
    ]
    # Without a folder that the user chose, having none is no fault.
    chosen = any(
        variable["name"] == "ANYFLEX_CACHE_DIR"
        and variable["value"] is not None
        and variable["problem"] is None
        for variable in facts["variables"]
    )
    if chosen and facts["cache"]["problem"] is not None:
        failures.append(
            f"ANYFLEX_CACHE_DIR: {facts['cache']['folder']} can't be used "
            f"({facts['cache']['problem']}): name a writable folder of your own"
        )
    # Both sides of a conflict report the same.
    return list(dict.fromkeys(failures))


def _serves(incompatible: dict[str, Any], backends: list[dict[str, Any]]) -> bool:
    """Whether the same distribution offers the backend for a contract of this anyflex too."""
    return any(
        backend["state"] != "incompatible"
        and (backend["name"], backend["distribution"])
        == (incompatible["name"], incompatible["distribution"])
        for backend in backends
    )
