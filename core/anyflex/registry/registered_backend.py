"""Registered backends: where each comes from, whether it can be used, and its object, which is
loaded at the first use."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from anyflex.contract import CONTRACT, CONTRACT_MIN
from anyflex.contract.backend import Backend
from anyflex.contract.capabilities import Capabilities
from anyflex.contract.decision import Accepted, Decision, Rejected
from anyflex.contract.option import Option
from anyflex.contract.spec import Spec
from anyflex.errors import PluginError
from anyflex.registry import cached_state
from anyflex.registry.plugin_errors import load_object, plugin_code, plugin_error

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "State", "contract_mismatch", "name_problem", "saved_bytes_problem"]

_MOST_SAVED = 2**20
"""Maximum bytes of a query row, beyond which sizes would exceed an int64."""
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9][a-z0-9_-]*)?")
NAME_RULE = (
    'a backend name is "<device type>" or "<device type>.<variant>", in lower case: letters, '
    'digits, "_", in the variant also "-"'
)


@dataclass(frozen=True, slots=True)
class State:
    """Whether a backend can be used on this machine.

    Args:
        kind: ``usable``; ``rejected`` by its own probe; ``broken``; ``disabled`` by a variable;
            ``conflict`` between distributions; ``incompatible`` contract version.
        reason: why it isn't usable, with the cure; "" for usable.
        error: what a call that forces the backend raises, where that is a `PluginError`.
        backend: the object, if it could be created.
    """

    kind: Literal["usable", "rejected", "broken", "disabled", "conflict", "incompatible"]
    reason: str = ""
    error: PluginError | None = None
    backend: Backend | None = None


class Entry:
    """A registered backend.

    Attributes:
        name: identity, and the string for ``backend=``.
        device_type: torch's device type, ``"*"`` for the reference, "" for an invalid name.
        distribution: ``"name version"`` of what carries it.
        package, version: the two parts of it.
        contract: the version that its entry-point group names.
        value: ``"module:Class"``.
        in_process: registered by a call, so that a version says nothing about its code.
        blocked: why it isn't even loaded, or None. Set by the table.
    """

    def __init__(
        self,
        name: str,
        target: str | type[Backend],
        *,
        package: str,
        version: str,
        contract: int = CONTRACT,
        device_type: str | None = None,
        in_process: bool = False,
    ) -> None:
        self.name = name
        valid = name_problem(name) is None
        self.device_type = device_type or (name.partition(".")[0] if valid else "")
        self.package = package
        self.version = version
        self.distribution = f"{package} {version}"
        self.contract = contract
        self.in_process = in_process
        self.blocked: State | None = None
        self._target = target
        self._state: State | None = None
        self._asked_while_loading = False
        self._loading = threading.local()

    @property
    def value(self) -> str:
        if isinstance(self._target, str):
            return self._target
        return f"{self._target.__module__}:{self._target.__qualname__}"

    @property
    def loaded(self) -> bool:
        return self._state is not None

    def error(self, problem: str) -> PluginError:
        """Return a `PluginError` of this plugin."""
        return plugin_error(self.name, self.distribution, problem)

    def state(self) -> State:
        """Load and probe the backend at the first call; return whether it can be used."""
        state = self.blocked or self._state
        if state is not None:
            return state
        # No lock is held while plugin code runs: a module that calls anyflex at its import, in
        # another thread, would deadlock with the interpreter's import lock. The first result wins.
        if getattr(self._loading, "here", False):
            self._asked_while_loading = True
            return State("rejected", "it is being imported by this very call")
        self._loading.here = True
        try:
            state = self._load()
        finally:
            self._loading.here = False
        if self._state is None:
            self._state = state
        if self._asked_while_loading:
            # Decisions were made without this backend meanwhile.
            self._asked_while_loading = False
            cached_state.changed()
        return self._state

    def _load(self) -> State:
        try:
            backend_class = self._import()
            mismatch = contract_mismatch(getattr(backend_class, "contract", self.contract))
            if mismatch:
                return State(
                    "incompatible", mismatch, self.error(f"can't be used: it is {mismatch}")
                )
            with plugin_code(self.name, self.distribution, f"creating {self.value}"):
                backend = backend_class(self.name, self.device_type)
            with plugin_code(self.name, self.distribution, "reading its declarations"):
                declared = (
                    getattr(backend, "capabilities", None), backend.priority, backend.options
                )  # fmt: skip
            self._check(*declared)
            with plugin_code(self.name, self.distribution, "probe()"):
                decision: Decision = backend.probe()
            self.check_decision(decision, "probe()")
        except PluginError as error:
            return State("broken", str(error), error)
        if isinstance(decision, Rejected):
            return State("rejected", decision.reason, backend=backend)
        return State("usable", backend=backend)

    def _import(self) -> type[Backend]:
        target: Any = self._target
        if isinstance(target, str):
            target = load_object(self.name, self.distribution, target)
        if not (isinstance(target, type) and issubclass(target, Backend)):
            raise self.error(
                f"is broken: {self._target} is not a subclass of anyflex.plugin.Backend but "
                f"{target!r}"
            )
        return target

    def _check(self, capabilities: object, priority: object, options: object) -> None:
        """Check the declarations against the contract: a wrong type shows here, not in a call."""
        if not isinstance(capabilities, Capabilities):
            raise self.error(
                "is broken: its `capabilities` must be an anyflex.plugin.Capabilities"
            )
        if not isinstance(priority, int):
            raise self.error(f"is broken: its `priority` must be an int, got {priority!r}")
        if not isinstance(options, Mapping) or not all(
            isinstance(key, str) and isinstance(option, Option) for key, option in options.items()
        ):
            raise self.error(
                "is broken: its `options` must map names to anyflex.plugin.Option objects"
            )

    def check_decision(self, decision: object, method: str) -> None:
        """Raise `PluginError` if a plugin's answer isn't a Decision."""
        if not isinstance(decision, (Accepted, Rejected)):
            raise self.error(
                f"is broken: {method} must return Accepted() or Rejected(reason), got "
                f"{decision!r} ({type(decision).__name__})"
            )

    def supports(self, backend: Backend, spec: Spec) -> Decision:
        """Ask the backend. Raises `PluginError` if it raises or its answer isn't a Decision."""
        with plugin_code(self.name, self.distribution, "supports(spec)"):
            decision = backend.supports(spec)
        self.check_decision(decision, "supports(spec)")
        return decision

    def saved_bytes(self, backend: Backend, dtype: torch.dtype) -> tuple[int, int]:
        """Ask the backend. Raises `PluginError` if it raises or its answer isn't a pair of
        sizes."""
        with plugin_code(self.name, self.distribution, "saved_bytes(dtype)"):
            found: object = backend.saved_bytes(dtype)
        problem = saved_bytes_problem(found)
        if problem is not None:
            raise self.error(f"is broken: {problem}")
        return cast("tuple[int, int]", found)


def name_problem(name: object) -> str | None:
    """Return why `name` can't be a backend's name, or None."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return None
    if isinstance(name, str) and not name.partition(".")[0]:
        return f"has the name {name!r}, whose device type is empty: {NAME_RULE}"
    return f"has the name {name!r}: {NAME_RULE}"


def saved_bytes_problem(found: object) -> str | None:
    """Return why this can't be an answer of `Backend.saved_bytes`, or None."""
    if (
        isinstance(found, tuple)
        and len(found) == 2
        and all(type(number) is int and 0 <= number <= _MOST_SAVED for number in found)
    ):
        return None
    return f"saved_bytes(dtype) must return two ints from 0 to {_MOST_SAVED}, got {found!r}"


def contract_mismatch(contract: object) -> str | None:
    """Return what is wrong with a plugin's contract version and what to upgrade, or None."""
    if not isinstance(contract, int):
        return f"written for contract {contract!r}, which is not an int"
    if CONTRACT_MIN <= contract <= CONTRACT:
        return None
    spoken = str(CONTRACT) if CONTRACT == CONTRACT_MIN else f"{CONTRACT_MIN} to {CONTRACT}"
    which = "anyflex" if contract > CONTRACT else "the plugin"
    return f"written for contract {contract}, this is {spoken}; upgrade {which}"
