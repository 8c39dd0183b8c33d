"""Table of registered backends: those in installed metadata, those registered in this process, and
which of them may be used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from anyflex.contract.backend import Backend
from anyflex.errors import ArgumentTypeError, PluginError
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.process.version import VERSION
from anyflex.registry import cached_state, discovery, plugin_errors
from anyflex.registry.hooks import Hooks, load_plugin
from anyflex.registry.load_rules import (
    REFERENCE,
    blocked_state,
    conflict_state,
    switched_off,
    warn_about_unknown_names,
)
from anyflex.registry.registered_backend import Entry, contract_mismatch, name_problem

__all__ = [
    "REFERENCE",
    "Table",
    "current",
    "isolated",
    "register",
    "register_hooks",
    "reset",
]

_REFERENCE_TARGET = "anyflex.reference.backend:ReferenceBackend"


class Table:
    """All backends that this process knows.

    Attributes:
        hooks: the hook plugins.
        problems: hook plugins and groups that can't be used, for ``anyflex doctor``.
    """

    def __init__(
        self, *, scan: bool = True, reference: str | type[Backend] = _REFERENCE_TARGET
    ) -> None:
        self.hooks = Hooks()
        self.problems: list[PluginError] = []
        self._scan = scan
        self._reference = reference
        self._found: tuple[discovery.Found, ...] = ()
        self._installed: list[Entry] = []
        self._in_process: list[Entry] = []
        self._by_name: dict[str, Entry] = {}
        self._ready = False
        # Under ANYFLEX_STRICT=1: the error that every call raises.
        self._fatal: PluginError | None = None
        self._lock = threading.RLock()
        free_in_child(self)

    def ready(self) -> None:
        """Scan the metadata and load the hook plugins, at the first call."""
        if self._ready:
            if self._fatal is not None:
                raise plugin_errors.again(self._fatal)
            return
        found = discovery.scan() if self._scan else ()
        hooks, problems = self._load_hooks(found)
        with self._lock:
            if self._ready:
                return
            self._found = found
            for plugin, item in hooks:
                try:
                    self.hooks.add(plugin, item.name, f"{item.distribution} {item.version}")
                except PluginError as error:
                    problems.append(error)
            self.problems += problems
            self._installed = [
                Entry(
                    item.name,
                    item.value,
                    package=item.distribution,
                    version=item.version,
                    contract=item.contract,
                )
                for item in found
                if item.kind == "backends" and not _is_own_reference(item)
            ]
            self._build()
            self._ready = True
        warn_about_unknown_names(found, [*self._by_name.values(), *self._in_process])
        unusable = [
            entry.blocked.error
            for entry in self._installed
            if entry.blocked is not None and entry.blocked.kind == "broken"
        ]
        try:
            for problem in problems:
                plugin_errors.report(problem, "its hooks are not called")
            for problem in filter(None, unusable):
                plugin_errors.report(problem, "it is not registered")
        except PluginError as error:
            self._fatal = error
            raise

    def _load_hooks(
        self, found: tuple[discovery.Found, ...]
    ) -> tuple[list[tuple[object, discovery.Found]], list[PluginError]]:
        loaded: list[tuple[object, discovery.Found]] = []
        problems: list[PluginError] = []
        for item in found:
            if item.kind != "hooks" or switched_off(item.name, item.distribution):
                continue
            distribution = f"{item.distribution} {item.version}"
            if contract_mismatch(item.contract):
                continue  # doctor lists it; as backends of another contract, it isn't loaded
            try:
                loaded.append((load_plugin(item.name, item.value, distribution), item))
            except PluginError as error:
                problems.append(error)
        return loaded, problems

    def _build(self) -> None:
        """Decide for every entry whether it is blocked, and which entries share a name."""
        by_name: dict[str, list[Entry]] = {}
        incompatible: list[Entry] = []
        for entry in (*self._installed, *self._in_process):
            entry.blocked = blocked_state(entry)
            if entry.blocked is not None and entry.blocked.kind in ("incompatible", "disabled"):
                incompatible.append(entry)
            else:
                by_name.setdefault(entry.name, []).append(entry)
        for entries in by_name.values():
            if len(entries) > 1:
                conflict = conflict_state(entries)
                for entry in entries:
                    entry.blocked = conflict
        table = {name: entries[0] for name, entries in by_name.items()}
        for entry in incompatible:
            # A plugin may offer a name for this contract and for another.
            table.setdefault(entry.name, entry)
        reference = self._by_name.get(REFERENCE) or Entry(
            REFERENCE, self._reference, package="anyflex", version=VERSION, device_type="*"
        )
        reference.blocked = blocked_state(reference)
        table[REFERENCE] = reference
        self._by_name = table

    def register(self, name: str, backend_class: type[Backend]) -> None:
        """See `anyflex.registry.register`."""
        package = getattr(backend_class, "__module__", "unknown").partition(".")[0]
        entry = Entry(name, backend_class, package=package, version="in process", in_process=True)
        problem = name_problem(name)
        if problem is None and name == REFERENCE:
            problem = f"has the name {name!r}, which is core's own"
        if problem is not None:
            raise entry.error(problem)
        if not (isinstance(backend_class, type) and issubclass(backend_class, Backend)):
            raise entry.error(f"must be a subclass of Backend, got {backend_class!r}")
        with self._lock:
            for other in self._in_process:
                if (other.name, other.package) == (name, package):
                    raise entry.error(f"is registered twice: {other.value} and {entry.value}")
            self._in_process.append(entry)
            self._build()

    def get(self, name: str) -> Entry | None:
        """Return the entry of `name`: one of the two where there is a conflict."""
        self.ready()
        return self._by_name.get(name)

    def names(self) -> list[str]:
        """Return every registered name, blocked ones included, the reference last."""
        self.ready()
        return sorted(self._by_name, key=lambda name: (name == REFERENCE, name))

    def of_device(self, device_type: str) -> list[Entry]:
        """Return the entries with names of a device type, without the reference."""
        self.ready()
        return [
            entry for _, entry in sorted(self._by_name.items()) if entry.device_type == device_type
        ]

    def every(self) -> list[Entry]:
        """Return all entries, both sides of a conflict and blocked ones included."""
        self.ready()
        with self._lock:
            return [*self._installed, *self._in_process, self._by_name[REFERENCE]]

    def hooks_found(self) -> list[discovery.Found]:
        """Return the entry points of hook plugins."""
        self.ready()
        return [item for item in self._found if item.kind == "hooks"]


def _is_own_reference(item: discovery.Found) -> bool:
    return item.name == REFERENCE and discovery.normalized(item.distribution) == "anyflex"


_table = Table()
cached_state.STATE.hooks = _table.hooks


def current() -> Table:
    """Return the table in force."""
    return _table


def register(name: str, backend_class: type[Backend]) -> None:
    """Register a backend in this process, without an installed plugin.

    It takes part like an installed one, and earlier decisions are made again.

    Args:
        name: ``"<device type>"`` or ``"<device type>.<variant>"``.
        backend_class: a subclass of `anyflex.plugin.Backend`.

    Raises:
        PluginError: the name breaks the rule, or the same top-level package registered it
            already. Another package under the same name is a `BackendConflict`, raised by the
            call that asks for the name.
    """
    _table.register(name, backend_class)
    cached_state.changed()


def register_hooks(plugin: object, name: str) -> None:
    """Register a hook plugin in this process.

    Args:
        plugin: a module or an object with functions marked by `anyflex.plugin.hookimpl`.
        name: of the plugin, for messages.

    Raises:
        PluginError: an implementation doesn't fit the hook, or the name is taken.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(f"name must be a non-empty str, got {name!r}")
    _table.hooks.add(plugin, name, f"{name} in process")
    cached_state.changed()


def reset() -> None:
    """Forget everything: registrations, the scan, variables, compiled kernels and past reports.
    For tests; kernels in use stay valid."""
    _replace(Table())


@contextmanager
def isolated(
    *, scan: bool = False, reference: str | type[Backend] = _REFERENCE_TARGET
) -> Iterator[Table]:
    """Work with an empty registry in the body, and restore the present one. For tests: it changes
    the process, not only this thread.

    Args:
        scan: whether installed plugins are seen.
        reference: stands in for the reference backend.
    """
    before = _table
    _replace(Table(scan=scan, reference=reference))
    try:
        yield _table
    finally:
        _replace(before)


def _replace(table: Table) -> None:
    global _table
    _table = table
    cached_state.STATE.hooks = table.hooks
    cached_state.replaced()
