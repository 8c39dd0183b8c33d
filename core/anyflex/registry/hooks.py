"""Hooks: pluggy marks, checks and orders the implementations; the loop over them is here, because
pluggy's own stops at the first that raises."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from anyflex.errors import PluginError
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.registry.plugin_errors import load_object, plugin_code, plugin_error, report

if TYPE_CHECKING:
    import pluggy

    from anyflex.contract.spec import Spec

__all__ = ["Hooks", "load_plugin"]


def load_plugin(name: str, value: str, distribution: str) -> object:
    """Import a hook plugin. Raises `PluginError`."""
    target = load_object(name, distribution, value)
    with plugin_code(name, distribution, f"creating {value}"):
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
        # Reentrant: what is registered may register more when it is read.
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
                owner = self._distributions[name]
                raise plugin_error(name, distribution, f"has hooks already, registered by {owner}")
            manager = self._manager or _new_manager()
            with plugin_code(name, distribution, "reading its hooks"):
                problem = _register(manager, plugin, name)
            if problem:
                cure = f"Upgrade {distribution.split(' ')[0]}, or set ANYFLEX_DISABLE={name}"
                raise plugin_error(name, distribution, f"is broken: {problem}. {cure}")
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
                problem = (
                    "is broken: anyflex_order_candidates must return names out of "
                    f"{list(candidates)}, each once, got {answer!r}"
                )
                self._drop(name, plugin_error(name, distribution, problem))
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
            # Another thread may have dropped it.
            if self._distributions.pop(name, None) is not None:
                assert self._manager is not None
                self._manager.unregister(name=name)
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
    """Register with pluggy, or return what doesn't fit; then nothing is registered."""
    from pluggy import PluginValidationError

    from anyflex.registry import hook_specs

    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (PluginValidationError, ValueError) as error:
        known = [getattr(hook_specs, name) for name in hook_specs.__all__ if name != "hookimpl"]
        hooks = [f"{hook.__name__}({', '.join(signature(hook).parameters)})" for hook in known]
        problem = f"{' '.join(str(error).split())}; the hooks are {', '.join(hooks)}"
    else:
        implementations = [
            implementation
            for caller in manager.get_hookcallers(plugin) or ()
            for implementation in caller.get_hookimpls()
            if implementation.plugin is plugin
        ]
        if not implementations:
            problem = "it has no function marked with anyflex.plugin.hookimpl"
        elif any(each.wrapper or each.hookwrapper for each in implementations):
            problem = "it has a wrapper; anyflex's hooks take plain implementations only"
        else:
            return None
    if manager.has_plugin(name):
        manager.unregister(name=name)
    return problem


def _order_of(answer: Any, candidates: tuple[str, ...]) -> bool:
    try:
        names = list(answer)
    except TypeError:
        return False
    return len(set(names)) == len(names) and all(name in candidates for name in names)
