"""Hooks: pluggy marks, checks and orders the implementations; the loop over them is here, because
pluggy's own stops at the first that raises."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anyflex.errors import PluginError
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.registry.plugin_errors import plugin_code, report

if TYPE_CHECKING:
    import pluggy

    from anyflex.contract.spec import Spec

__all__ = ["Hooks", "load_plugin"]


def load_plugin(name: str, value: str, distribution: str) -> object:
    """Import a hook plugin. Raises `PluginError`."""
    module_name, _, attribute = value.partition(":")
    with plugin_code(name, distribution, f"importing {module_name}"):
        target: Any = importlib.import_module(module_name.strip())
    with plugin_code(name, distribution, f"loading {value}"):
        for part in filter(None, attribute.split("[")[0].strip().split(".")):
            target = getattr(target, part)
        return target() if isinstance(target, type) else target


class Hooks:
    """The hook plugins of a registry.

    Attributes:
        listening: whether a plugin implements ``anyflex_launched``. Read on the hot path.
        dropped: faults of removed plugins, for ``anyflex doctor``.
    """

    def __init__(self) -> None:
        self.listening = False
        self.dropped: list[PluginError] = []
        self._manager: pluggy.PluginManager | None = None
        self._distributions: dict[str, str] = {}
        self._lock = threading.RLock()
        free_in_child(self)

    def names(self) -> list[str]:
        """Return the names of the plugins in use."""
        return sorted(self._distributions)

    def add(self, plugin: object, name: str, distribution: str) -> None:
        """Register a plugin. Raises `PluginError` if it doesn't fit the hooks' specification, or
        if one of that name is there."""
        with self._lock:
            if name in self._distributions:
                raise PluginError(
                    f"hook plugin {name!r} of {distribution} is already registered, by "
                    f"{self._distributions[name]}",
                    plugin=name,
                    distribution=distribution,
                )
            manager = self._manager or _new_manager()
            with plugin_code(name, distribution, "reading its hooks"):
                problem = _register(manager, plugin, name)
            if problem:
                raise PluginError(
                    f"hook plugin {name!r} of {distribution} is broken: {problem}. Upgrade "
                    f"{distribution.split(' ')[0]}, or set ANYFLEX_DISABLE={name}",
                    plugin=name,
                    distribution=distribution,
                )
            self._manager = manager
            self._distributions[name] = distribution
            self._update()

    def order(self, spec: Spec, candidates: tuple[str, ...]) -> tuple[str, ...]:
        """Let plugins reorder `candidates`. An answer that isn't a reordering is ignored."""
        for name, answer in self._call(
            "anyflex_order_candidates", {"spec": spec, "candidates": candidates}
        ):
            if answer is None:
                continue
            if isinstance(answer, str) or not _order_of(answer, candidates):
                distribution = self._distributions.get(name, "unknown")
                problem = PluginError(
                    f"hook plugin {name!r} of {distribution} is broken: anyflex_order_candidates "
                    f"must return names out of {list(candidates)}, each once, got {answer!r}",
                    plugin=name,
                    distribution=distribution,
                )
                self._drop(name, problem)
                continue
            candidates = (*answer, *(c for c in candidates if c not in answer))
        return candidates

    def compiled(self, spec: Spec, backend: str, seconds: float) -> None:
        """Tell the listeners."""
        self._call("anyflex_compiled", {"spec": spec, "backend": backend, "seconds": seconds})

    def launched(self, spec: Spec, backend: str, variant: str) -> None:
        """Tell the listeners."""
        self._call("anyflex_launched", {"spec": spec, "backend": backend, "variant": variant})

    def _call(self, hook: str, arguments: Mapping[str, object]) -> list[tuple[str, Any]]:
        """Call every implementation in pluggy's order. One that raises is reported once and
        removed, so that the others go on and the hot path doesn't pay for it again."""
        if self._manager is None:
            return []
        answers = []
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            name = implementation.plugin_name
            distribution = self._distributions.get(name, "unknown")
            try:
                with plugin_code(name, distribution, f"{hook}()"):
                    values = [arguments[argument] for argument in implementation.argnames]
                    answers.append((name, implementation.function(*values)))
            except PluginError as error:
                self._drop(name, error)
        return answers

    def _drop(self, name: str, error: PluginError) -> None:
        with self._lock:
            if self._manager is not None and self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            if self._distributions.pop(name, None) is not None:
                self.dropped.append(error)
            self._update()
        report(error, "its hooks are not called any more")

    def _update(self) -> None:
        manager = self._manager
        self.listening = manager is not None and bool(
            manager.hook.anyflex_launched.get_hookimpls()
        )


def _new_manager() -> pluggy.PluginManager:
    import pluggy

    from anyflex.registry import hook_specs

    manager = pluggy.PluginManager("anyflex")
    manager.add_hookspecs(hook_specs)
    return manager


def _register(manager: pluggy.PluginManager, plugin: object, name: str) -> str | None:
    """Register with pluggy, or return the mismatch; then nothing is registered."""
    from pluggy import PluginValidationError

    from anyflex.registry import hook_specs

    functions = {
        attribute: function
        for attribute in dir(plugin)
        if callable(function := getattr(plugin, attribute, None))
        and hasattr(function, "anyflex_impl")
    }
    for attribute, function in functions.items():
        options = function.anyflex_impl
        specification = getattr(hook_specs, options.get("specname") or attribute, None)
        if specification is None or not hasattr(specification, "anyflex_spec"):
            import difflib

            known = [n for n in dir(hook_specs) if n.startswith("anyflex_")]
            near = difflib.get_close_matches(attribute, known, n=1)
            return f"there is no hook {attribute!r}; " + (
                f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
            )
        if options.get("wrapper") or options.get("hookwrapper"):
            return f"{attribute} is a wrapper; anyflex's hooks take plain implementations only"
        try:
            wanted = set(inspect.signature(specification).parameters)
            if set(inspect.signature(function).parameters) <= wanted:
                continue
        except (TypeError, ValueError) as error:
            return f"the signature of {attribute} can't be read ({error})"
        return (
            f"its {attribute}{_signature(function)} doesn't fit the hook "
            f"{attribute}{_signature(specification)}"
        )
    if not functions:
        return "it has no function marked with anyflex.plugin.hookimpl"
    try:
        manager.register(plugin, name)
    except (PluginValidationError, ValueError) as error:
        return str(error).replace("\n", " ")
    return None


def _signature(function: Any) -> str:
    return "(" + ", ".join(inspect.signature(function).parameters) + ")"


def _order_of(answer: Any, candidates: tuple[str, ...]) -> bool:
    try:
        names = list(answer)
    except TypeError:
        return False
    return len(set(names)) == len(names) and all(name in candidates for name in names)
