"""Report of ``anyflex doctor`` about plugins: plain data, everything loaded and probed."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from anyflex.errors import PluginError
from anyflex.registry.backend_table import current
from anyflex.registry.load_rules import switched_off
from anyflex.registry.options import option_rows
from anyflex.registry.plugin_errors import first_line
from anyflex.registry.registered_backend import contract_mismatch

__all__ = ["BackendRow", "HookRow", "backend_rows", "hook_rows", "traceback_lines"]


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend.

    Args:
        name: string for ``backend=``.
        device_type: ``"*"`` for the reference.
        distribution, version: of the plugin.
        entry_point: ``"module:Class"``.
        contract: version of the group it was found in.
        state: ``usable``, ``rejected``, ``broken``, ``disabled``, ``conflict`` or
            ``incompatible``.
        reason: why it isn't usable, with the cure; "".
        cause: first line of what it raised; "".
        traceback: lines of what it raised.
        priority: None where it couldn't be loaded.
        options: its own options: name, type, default, doc, choices, torch_key.
    """

    name: str
    device_type: str
    distribution: str
    version: str
    entry_point: str
    contract: int
    state: str
    reason: str
    cause: str
    traceback: tuple[str, ...]
    priority: int | None
    options: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True)
class HookRow:
    """One hook plugin.

    Args:
        name: of the entry point.
        distribution: ``"name version"``.
        state: ``usable``, ``broken``, ``disabled`` or ``incompatible``.
        reason: why its hooks are not called; "".
        traceback: lines of what it raised.
    """

    name: str
    distribution: str
    state: str
    reason: str
    traceback: tuple[str, ...]


def backend_rows() -> list[BackendRow]:
    """Load and probe every backend; return a row for each, both sides of a conflict included, by
    device type in the order in which they are asked, those that can't be used and the reference
    last. Raises only under ANYFLEX_STRICT=1, or for a variable with a value that isn't allowed."""
    rows = []
    for entry in current().every():
        state = entry.state()
        cause = state.error.__cause__ if state.error is not None else None
        rows.append(
            BackendRow(
                entry.name,
                entry.device_type,
                entry.package,
                entry.version,
                entry.value,
                entry.contract,
                state.kind,
                state.reason,
                first_line(cause) if cause is not None else "",
                traceback_lines(cause),
                state.backend.priority if state.backend is not None else None,
                tuple(option_rows(state.backend)) if state.backend is not None else (),
            )
        )
    return sorted(
        rows,
        key=lambda row: (
            row.device_type == "*",
            row.device_type,
            row.state != "usable",
            -(row.priority or 0),
            row.name,
        ),
    )


def hook_rows() -> list[HookRow]:
    """Return a row for each hook plugin that is installed or registered, including those that were
    removed because they raised."""
    table = current()
    broken = {(e.plugin, e.distribution): e for e in (*table.problems, *table.hooks.dropped)}
    rows = []
    for item in table.hooks_found():
        distribution = f"{item.distribution} {item.version}"
        error = broken.pop((item.name, distribution), None)
        mismatch = contract_mismatch(item.contract)
        switch = switched_off(item.name, item.distribution)
        if switch is not None:
            row = HookRow(item.name, distribution, "disabled", f"it is disabled by {switch}", ())
        elif mismatch is not None:
            row = HookRow(item.name, distribution, "incompatible", mismatch, ())
        elif error is not None:
            row = _broken(error)
        else:
            row = HookRow(item.name, distribution, "usable", "", ())
        rows.append(row)
    rows += map(_broken, broken.values())
    listed = {row.name for row in rows}
    rows += [
        HookRow(name, f"{name} in process", "usable", "", ())
        for name in table.hooks.names()
        if name not in listed
    ]
    return rows


def _broken(error: PluginError) -> HookRow:
    lines = traceback_lines(error.__cause__)
    return HookRow(error.plugin, error.distribution, "broken", str(error), lines)


def traceback_lines(cause: BaseException | None) -> tuple[str, ...]:
    """Return the lines of a plugin's exception; none for None."""
    if cause is None:
        return ()
    return tuple("".join(traceback.format_exception(cause)).splitlines())
