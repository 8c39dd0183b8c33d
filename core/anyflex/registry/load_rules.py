"""Rules that keep a registered backend from being loaded: disabled by a variable, written for
another contract, badly named, or one of several with one name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from anyflex.errors import BackendConflict
from anyflex.process.user_frames import user_stacklevel
from anyflex.registry import environment, install_hints
from anyflex.registry.discovery import Found, normalized
from anyflex.registry.registered_backend import Entry, State, contract_mismatch, name_problem

__all__ = [
    "REFERENCE",
    "blocked_state",
    "conflict_state",
    "switched_off",
    "warn_about_unknown_names",
]

REFERENCE = "reference"
"""Name of the backend in core that defines correctness: last candidate everywhere."""


def _package(name: str) -> str | None:
    return normalized(name[5:]) if name.startswith("dist:") else None


def _names_one(names: tuple[str, ...], name: str, package: str) -> str | None:
    """Return which of `names` means this plugin."""
    for item in names:
        if item == name or _package(item) == normalized(package):
            return item
    return None


def switched_off(name: str, package: str) -> str | None:
    """Return the variable, with its value, that disables a plugin, or None."""
    disabled = environment.disabled()
    if _names_one(disabled, name, package):
        return f"ANYFLEX_DISABLE={','.join(disabled)}"
    plugins = environment.plugins()
    if plugins is not None and name != REFERENCE and not _names_one(plugins, name, package):
        return f"ANYFLEX_PLUGINS={','.join(plugins) or 'none'}"
    return None


def blocked_state(entry: Entry) -> State | None:
    """Return why an entry isn't even loaded, or None."""
    switch = switched_off(entry.name, entry.package)
    if switch is not None:
        return State("disabled", f"it is disabled by {switch}")
    mismatch = contract_mismatch(entry.contract)
    if mismatch is not None:
        error = entry.error(f"can't be used: it is {mismatch}")
        return State("incompatible", mismatch, error)
    problem = name_problem(entry.name)
    if problem is None and entry.name == REFERENCE and entry.device_type != "*":
        problem = f"has the name {REFERENCE!r}, which is core's own; it must choose another"
    if problem is not None:
        error = entry.error(problem)
        return State("broken", str(error), error)
    return None


def conflict_state(entries: list[Entry]) -> State:
    """Return the state of entries that share one name."""
    name = entries[0].name
    packages = sorted({entry.package for entry in entries})
    owners = sorted({f"{entry.distribution} ({entry.value})" for entry in entries})
    if len(packages) == 1:
        error = entries[0].error(f"is registered twice by its distribution: {', '.join(owners)}")
        return State("broken", str(error), error)
    cures = " or ".join(f"ANYFLEX_DISABLE=dist:{package}" for package in packages)
    reason = (
        f"backend {name!r} is registered by {len(packages)} distributions, {' and '.join(owners)}:"
        f" neither is used. Uninstall one, or set {cures}"
    )
    conflict = BackendConflict(
        reason, plugin=name, distribution=" and ".join(e.distribution for e in entries)
    )
    return State("conflict", reason, conflict)


def warn_about_unknown_names(found: Iterable[Found], entries: Iterable[Entry]) -> None:
    """Warn of names in ANYFLEX_DISABLE or ANYFLEX_PLUGINS that no plugin has: typing errors."""
    found, entries = list(found), list(entries)
    known = {entry.name for entry in entries} | {item.name for item in found}
    known |= install_hints.known_names()
    packages = {normalized(item.distribution) for item in found}
    packages |= {normalized(entry.package) for entry in entries}
    for variable, names in (
        ("ANYFLEX_DISABLE", environment.disabled()),
        ("ANYFLEX_PLUGINS", environment.plugins() or ()),
    ):
        for name in names:
            package = _package(name)
            if (package in packages) if package is not None else (name in known):
                continue
            kind = "plugin distribution" if package is not None else "backend or hook plugin"
            listed = sorted(packages) if package is not None else sorted(known)
            warnings.warn(
                f"{variable} names {name!r}, and no {kind} of that name is installed; there are: "
                f"{', '.join(listed) or 'none'}",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
