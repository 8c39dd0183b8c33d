"""Environment variables that this version of anyflex reads: one table, read once.

Each variable is read at its first need and keeps that value for the process, so that a decision
never depends on when somebody changed ``os.environ``. An empty value is the same as unset.
`anyflex doctor` prints `in_force`, and the documentation's table comes from `markdown_table`.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from anyflex.errors import ArgumentError
from anyflex.registry import cached_state

__all__ = [
    "VARIABLES",
    "Variable",
    "VariableInForce",
    "backend_names",
    "cache_dir",
    "check_indices",
    "disabled",
    "fallback",
    "in_force",
    "markdown_table",
    "plugins",
    "reset",
    "strict",
    "torch_devices",
    "unknown_variables",
    "variables_of_others",
]


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Variable(Generic[Value]):
    """One row of the table. Called, it returns the value in force.

    Args:
        name: of the variable.
        meaning: one sentence for the user.
        default: the behaviour when it is unset, in words.
        allowed: the allowed values, in words.
        read_when: when it is read.
        parse: turns a non-empty text into the value; raises ValueError for a text that isn't
            allowed.
        unset: the value when it is unset.
    """

    name: str
    meaning: str
    default: str
    allowed: str
    read_when: str
    parse: Callable[[str], Value]
    unset: Value

    def __call__(self) -> Value:
        found = _read.get(self.name)
        if found is None:
            found = _read.setdefault(self.name, self._parsed())
        value: Value = found[1]
        return value

    def _parsed(self) -> tuple[str | None, Value]:
        text = os.environ.get(self.name) or None
        if text is None:
            return None, self.unset
        try:
            return text, self.parse(text)
        except ValueError as error:
            raise ArgumentError(
                f"environment variable {self.name}={text!r} is {error}; allowed: "
                f"{self.allowed.replace('`', '')}; unset: {self.default.replace('`', '')}"
            ) from None


@dataclass(frozen=True, slots=True)
class VariableInForce:
    """State of a variable for `anyflex doctor`.

    Args:
        name: of the variable.
        value: the text that is in force, or None for unset.
        now: the text that ``os.environ`` holds now: differs from `value` where somebody changed
            the variable after it was read.
        read: whether it has been read yet.
        problem: why the text isn't allowed, or None.
    """

    name: str
    value: str | None
    now: str | None
    read: bool
    problem: str | None


def _list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _plugin_list(text: str) -> tuple[str, ...]:
    return () if text.strip() == "none" else _list(text)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("not 0 or 1")
    return text == "1"


def _fallback(text: str) -> str:
    if text not in ("error", "warn", "quiet"):
        raise ValueError("not error, warn or quiet")
    return text


def _device_types(text: str) -> tuple[str, ...] | None:
    if text == "0":
        return None
    names = () if text == "1" else _list(text)
    if text != "1" and not names:
        raise ValueError("without a device type")
    return names


def _folder(text: str) -> pathlib.Path:
    try:
        path = pathlib.Path(text).expanduser()
    except RuntimeError:
        raise ValueError("in the home folder of an unknown user") from None
    if not path.is_absolute():
        raise ValueError("not an absolute path")
    return path


_FIRST_CALL = "first call that selects a backend"

backend_names: Variable[tuple[str, ...]] = Variable(
    "ANYFLEX_BACKEND",
    "Forces backends, in this order; each binds the calls of its own device type, and "
    "`reference` binds all. Weaker than `backend=` and `use_backend`.",
    "the registry chooses",
    "backend names, comma-separated: `cuda.triton,cpu`",
    _FIRST_CALL,
    _list,
    (),
)
disabled: Variable[tuple[str, ...]] = Variable(
    "ANYFLEX_DISABLE",
    "Takes plugins out of the registry: they are neither loaded nor chosen.",
    "nothing is disabled",
    "backend names and `dist:<distribution>`, comma-separated",
    _FIRST_CALL,
    _list,
    (),
)
plugins: Variable[tuple[str, ...] | None] = Variable(
    "ANYFLEX_PLUGINS",
    "Lets in only the plugins that it names.",
    "every installed plugin",
    "backend names and `dist:<distribution>`, comma-separated; or `none`",
    _FIRST_CALL,
    _plugin_list,
    None,
)
strict = Variable(
    "ANYFLEX_STRICT",
    "Raises `PluginError` for a broken plugin, instead of reporting it once and going on "
    "without it.",
    "`0`",
    "`0` or `1`",
    _FIRST_CALL,
    _switch,
    False,
)
fallback = Variable(
    "ANYFLEX_FALLBACK",
    "What happens when an installed backend is passed over, or an accelerator's call is "
    "computed on the reference: an error, a `PerformanceWarning` once per reason, or nothing.",
    "`warn`",
    "`error`, `warn` or `quiet`",
    _FIRST_CALL,
    _fallback,
    "warn",
)
cache_dir: Variable[pathlib.Path | None] = Variable(
    "ANYFLEX_CACHE_DIR",
    "Folder of the disk cache for compiled kernels.",
    "`anyflex` in the user's cache folder",
    "an absolute path; `~` is the home folder",
    "first compile that keeps an artifact",
    _folder,
    None,
)
check_indices = Variable(
    "ANYFLEX_CHECK_INDICES",
    "Raises `ModIndexError` for an out-of-range read of a captured tensor also on devices "
    "that must synchronise to find it.",
    "`0`",
    "`0` or `1`",
    "first call on such a device",
    _switch,
    False,
)
torch_devices: Variable[tuple[str, ...] | None] = Variable(
    "ANYFLEX_TORCH",
    "Re-routes [torch's flex attention](torch.md) to anyflex, as `reroute_torch` does.",
    "`0`",
    "`1` for the devices that have a backend, or device types, comma-separated: `cpu,cuda`; `0`",
    "import of torch's flex attention",
    _device_types,
    None,
)
"""Device types, none for the default ones; None without a re-routing."""

VARIABLES: tuple[Variable[Any], ...] = (
    backend_names,
    disabled,
    plugins,
    strict,
    fallback,
    cache_dir,
    check_indices,
    torch_devices,
)

# name -> (the text that was read or None, its value)
_read: dict[str, tuple[str | None, Any]] = {}
_by_name = {variable.name: variable for variable in VARIABLES}


reset = _read.clear
"""Forgets what was read: for tests, which change variables in one process."""


def in_force() -> list[VariableInForce]:
    """Return every variable with the value in force. Never raises: a text that isn't allowed is
    in `problem`."""
    rows = []
    for variable in VARIABLES:
        now = os.environ.get(variable.name) or None
        read = _read.get(variable.name)
        problem = None
        if read is None and now is not None:
            try:
                variable.parse(now)
            except ValueError as error:
                problem = f"{error}; allowed: {variable.allowed.replace('`', '')}"
        value = now if read is None else read[0]
        rows.append(VariableInForce(variable.name, value, now, read is not None, problem))
    return rows


_OTHERS = (
    "ANYFLEX_CPU_ISA",
    "ANYFLEX_CPU_REQUIRE_LIBRARY",
    "ANYFLEX_CUDA_BLACKWELL",
    "ANYFLEX_RELEASE",
    "ANYFLEX_XPU_IPEX",
)
"""Variables of other parts of the project: builds and backends."""


def variables_of_others() -> list[tuple[str, str]]:
    """Return the name and the text of each set variable that another part of the project reads;
    that part knows whether it is allowed."""
    return [(name, os.environ[name]) for name in _OTHERS if os.environ.get(name)]


def unknown_variables() -> list[tuple[str, str | None]]:
    """Return each set variable ``ANYFLEX_*`` that nothing reads, with the nearest known name or
    None. Names that other parts of the project read (builds, backends) are known."""
    import difflib

    found = []
    for name in sorted(os.environ):
        if name.startswith("ANYFLEX_") and name not in (*_by_name, *_OTHERS):
            near = difflib.get_close_matches(name, _by_name, n=1, cutoff=0.7)
            found.append((name, near[0] if near else None))
    return found


def markdown_table() -> str:
    """Return the table of variables as markdown, for the documentation."""
    lines = [
        "| Variable | Meaning | Default | Allowed values | Read at |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{v.name}` | {v.meaning} | {v.default} | {v.allowed} | {v.read_when} |"
        for v in VARIABLES
    ]
    return "\n".join(lines) + "\n"


cached_state.on_replaced(reset)
