"""What ``anyflex doctor`` says about plugins: plain data, everything loaded and probed."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from anyflex.registry.discovery import Copy, hidden_copies
from anyflex.registry.isolation import first_line
from anyflex.registry.options import option_rows
from anyflex.registry.table import current

__all__ = ["BackendRow", "Copy", "HookRow", "backend_rows", "hidden_copies", "hook_rows"]


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend.

    Args:
        name: string for ``backend=``.
        device_type: ``"*"`` for the reference.
        distribution, version: of the plugin.
        value: ``"module:Class"``.
        contract: version of the group it was found in.
        state: ``usable``, ``rejected``, ``broken``, ``disabled``, ``conflict`` or
            ``incompatible``.
        reason: why it isn't usable, with the cure; "".
        cause: first line of what it raised; "".
        traceback: of what it raised; "".
        priority: None where it couldn't be loaded.
        options: its own options: name, type, default, doc, choices, torch_key.
    """

    name: str
    device_type: str
    distribution: str
    version: str
    value: str
    contract: int
    state: str
    reason: str
    cause: str
    traceback: str
    priority: int | None
    options: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True)
class HookRow:
    """One hook plugin: `state` is ``usable`` or ``broken``, `reason` why."""

    name: str
    distribution: str
    state: str
    reason: str


def backend_rows() -> list[BackendRow]:
    """Load and probe every backend; return a row for each, both sides of a conflict included.
    Raises only under ANYFLEX_STRICT=1, or for a variable with a value that isn't allowed."""
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
                "".join(traceback.format_exception(cause)) if cause is not None else "",
                state.backend.priority if state.backend is not None else None,
                tuple(option_rows(state.backend)) if state.backend is not None else (),
            )
        )
    return rows


def hook_rows() -> list[HookRow]:
    """Return a row for each hook plugin that is installed or registered."""
    table = current()
    found = {item.name: f"{item.distribution} {item.version}" for item in table.hooks_found()}
    rows = [HookRow(e.plugin, e.distribution, "broken", str(e)) for e in table.problems]
    broken = {row.name for row in rows}
    used = table.hooks.names()
    rows += [HookRow(name, found.get(name, "in process"), "usable", "") for name in used]
    rows += [
        HookRow(name, distribution, "disabled", "by ANYFLEX_DISABLE or ANYFLEX_PLUGINS")
        for name, distribution in found.items()
        if name not in broken and name not in used
    ]
    return rows
