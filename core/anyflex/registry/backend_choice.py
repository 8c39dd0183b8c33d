"""Choice of a backend for a spec: the candidates, their order, and the answer of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from anyflex.contract.backend import Backend
from anyflex.contract.decision import Accepted, Rejected
from anyflex.contract.spec import Spec
from anyflex.errors import ArgumentError, ArgumentTypeError, BackendRefused, PluginError
from anyflex.registry import environment, install_hints, options
from anyflex.registry.backend_table import REFERENCE, Table, current
from anyflex.registry.forced_backends import check_names, source_of
from anyflex.registry.freeze_options import KernelOptions
from anyflex.registry.registered_backend import Entry, State
from anyflex.tensors.stand_in import stands_in_for

__all__ = ["Answer", "Choice", "Selection", "TraceLine", "entry_line", "explain_selection"]

Outcome = Literal[
    "chosen", "accepts", "refuses", "broken", "disabled", "conflict", "incompatible", "missing"
]


@dataclass(frozen=True, slots=True)
class TraceLine:
    """Answer of one candidate, for people.

    Args:
        backend: its name.
        distribution: ``"name version"``, or "" where it isn't installed.
        outcome: ``chosen``; ``accepts``, but another was asked first; ``refuses``; ``missing``
            for not installed; or its state in the registry.
        reason: why; where it accepts, why it wasn't asked first, or "".
    """

    backend: str
    distribution: str
    outcome: Outcome
    reason: str

    def __str__(self) -> str:
        source = f" ({self.distribution})" if self.distribution else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.backend}{source} {self.outcome}{reason}"


def entry_line(entry: Entry, outcome: Outcome, reason: str = "") -> TraceLine:
    """Return a candidate's line."""
    return TraceLine(entry.name, entry.distribution, outcome, reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """A candidate's answer to a spec.

    Args:
        line: for the trace.
        state: of the entry in the registry.
        spec: with this backend's own options filled in.
        decision: `Accepted`, or None.
        resolved: its view of ``kernel_options``, or None where it couldn't be loaded.
        error: why it is broken, or None.
    """

    line: TraceLine
    state: State
    spec: Spec
    decision: Accepted | None
    resolved: options.ResolvedOptions | None
    error: PluginError | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The registry's choice, with its reasons.

    Args:
        chosen: name of the backend, or None where every candidate refuses.
        distribution: of the chosen one, or "".
        decision: its decision, or None.
        spec: with its own options filled in.
        trace: every candidate, in the order of asking.
        forced_by: the source that forces the choice (``"backend='cuda'"``), or "".
        unused_options: keys of ``kernel_options`` that the chosen one has no use for.
    """

    chosen: str | None
    distribution: str
    decision: Accepted | None
    spec: Spec
    trace: tuple[TraceLine, ...]
    forced_by: str
    unused_options: tuple[str, ...]


class Choice:
    """The candidates for one spec.

    Attributes:
        candidates: in the order of asking. Where the choice is forced, the forced ones only.
        forced_by: the source that forces it, or "".
        trace: lines that are known before a backend is asked: forced names that aren't installed.
    """

    def __init__(
        self,
        spec: Spec,
        names: tuple[str, ...],
        explicit: str | None,
        given: KernelOptions,
    ) -> None:
        self.spec = spec
        self.given = given
        self.table: Table = current()
        # Wrong values are reported now, not when a plugin breaks or is passed over.
        environment.strict()
        environment.fallback()
        self.forced_by = ""
        self.trace: list[TraceLine] = []
        self.candidates: list[Entry] = []
        if names:
            source = source_of(names, explicit)
            check_names(names, source)
            self.candidates = self._forced(names, source, explicit)
        self._check_options()
        if not self.forced_by:
            self.candidates = self._automatic()
        self._check_own_options()

    def _forced(self, names: tuple[str, ...], source: str, explicit: str | None) -> list[Entry]:
        device = self.spec.device_type
        bound = []
        for name in names:
            entry = self.table.get(name)
            owner = name.partition(".")[0] if entry is None else entry.device_type
            if owner not in (device, "*", ""):
                if explicit is not None:
                    raise BackendRefused(
                        f"backend={name!r} computes on {owner} tensors, and query, key and value "
                        f"are on {device}; move them with .to({owner!r}), or leave backend out",
                        {name: f"computes on {owner}, the tensors are on {device}"},
                    )
                continue
            if entry is None:
                line = f"not installed; {install_hints.install_line(name)}"
                self.trace.append(TraceLine(name, "", "missing", line))
            else:
                bound.append(entry)
        if bound or self.trace:
            self.forced_by = source
        return bound

    def _automatic(self) -> list[Entry]:
        """Order the candidates: broken ones first, because each must be reported; then by priority
        (0 for those that aren't loaded), then by name; then the reference. Plugins may reorder
        those that can be used, which leaves the others in their places."""
        broken: list[Entry] = []
        ranked: dict[str, tuple[int, Entry]] = {}
        usable: list[str] = []
        for entry in self.table.of_device(self.spec.device_type):
            state = self._state(entry)
            if state.kind in ("broken", "conflict"):
                broken.append(entry)
            elif state.kind != "disabled":
                ranked[entry.name] = (
                    0 if state.backend is None else state.backend.priority,
                    entry,
                )
            if state.kind == "usable":
                usable.append(entry.name)
        ranking = sorted(ranked, key=lambda name: (-ranked[name][0], name))
        asked = tuple(name for name in ranking if name in usable)
        order = iter(self.table.hooks.order(self.spec, asked) if len(asked) > 1 else asked)
        names = [next(order) if name in usable else name for name in ranking]
        reference = self.table.get(REFERENCE)
        assert reference is not None
        return [*broken, *(ranked[name][1] for name in names), reference]

    def _check_options(self) -> None:
        if not self.given:
            return
        names = {*self.table.names(), *install_hints.known_names()}
        unknown = options.check_top_level(self.given, names)
        if unknown:
            # Finding the owner of the key is worth loading every backend.
            backends = {
                name: state.backend
                for name in self.table.names()
                if (entry := self.table.get(name)) is not None
                and (state := entry.state()).backend is not None
            }
            raise options.unknown_key(unknown[0][0], backends, names)

    def _check_own_options(self) -> None:
        """Check options of backends that won't compute this call. Backends that aren't loaded, as
        those of other devices usually aren't, are not loaded for it."""
        for name, value in self.given:
            entry = self.table.get(name)
            if entry is None or not (entry.loaded or name == REFERENCE):
                continue
            backend = entry.state().backend
            if backend is not None:
                options.resolve(((name, value),), backend, self._loaded_beside(entry))

    def _loaded_beside(self, entry: Entry) -> dict[str, Backend]:
        return {
            other.name: loaded
            for other in self.table.of_device(self.spec.device_type)
            if other is not entry
            and other.loaded
            and (loaded := other.state().backend) is not None
        }

    def _state(self, entry: Entry) -> State:
        state = entry.state()
        present = state.kind != "rejected" or state.backend is None
        if present or not stands_in_for(self.spec.device_type):
            return state
        # A probe doesn't find a device that CPU tensors stand in for.
        return State("usable", backend=state.backend)

    def ask(self, entry: Entry) -> Answer:
        """Ask one candidate. Raises only for wrong ``kernel_options``."""
        state = self._state(entry)
        backend = state.backend
        if state.kind != "usable" or backend is None:
            outcome: Outcome = "refuses"
            if state.kind != "rejected" and state.kind != "usable":
                outcome = state.kind
            line = entry_line(entry, outcome, state.reason)
            return Answer(line, state, self.spec, None, None, state.error)
        others = self._loaded_beside(entry) if self.given else {}
        resolved = options.resolve(self.given, backend, others)
        spec = self.spec
        if resolved.values:
            spec = dataclasses.replace(spec, options=resolved.values)
        try:
            decision = entry.supports(backend, spec)
        except PluginError as error:
            line = entry_line(entry, "broken", str(error))
            return Answer(line, state, spec, None, resolved, error)
        if isinstance(decision, Rejected):
            line = entry_line(entry, "refuses", decision.reason)
            return Answer(line, state, spec, None, resolved)
        return Answer(entry_line(entry, "accepts"), state, spec, decision, resolved)

    def refused(self, trace: list[TraceLine]) -> BackendRefused:
        """Return the error for a call that no backend takes. Where the choice is forced, all
        others are asked too."""
        if not self.forced_by:
            return self._refused_by_all(trace)
        others = self.others(trace)
        reasons = {line.backend: line.reason for line in (*trace, *others) if line.reason}
        own = "; ".join(f"{line.backend}: {line.reason}" for line in trace)
        takers = [line.backend for line in others if line.outcome == "accepts"]
        refusing = [f"{line.backend}: {line.reason}" for line in others if line.reason]
        text = f"{self.forced_by} is refused. {own}."
        if takers:
            text += f" These take the call: {', '.join(takers)}."
        if refusing:
            text += f" The others: {'; '.join(refusing)}."
        return BackendRefused(text, reasons)

    def others(self, trace: list[TraceLine]) -> list[TraceLine]:
        """Ask every candidate of the device that isn't in `trace`."""
        asked = {line.backend for line in trace}
        return [self._ask_safely(entry) for entry in self._automatic() if entry.name not in asked]

    def _ask_safely(self, entry: Entry) -> TraceLine:
        try:
            return self.ask(entry).line
        except (ArgumentError, ArgumentTypeError) as error:
            return entry_line(entry, "refuses", str(error))

    def _refused_by_all(self, trace: list[TraceLine]) -> BackendRefused:
        reasons = {line.backend: line.reason for line in trace}
        disabled = [
            entry
            for entry in self.table.of_device(self.spec.device_type)
            if entry.state().kind == "disabled"
        ]
        reasons |= {entry.name: entry.state().reason for entry in disabled}
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        device = self.spec.device_type
        return BackendRefused(f"no backend takes this call on {device}. {text}", reasons)

    def missing(self) -> TraceLine | None:
        """Return a line with the cure if no backend of the device is installed, else None."""
        device = self.spec.device_type
        if self.table.of_device(device):
            return None
        return TraceLine(device, "", "missing", install_hints.install_line(device))


def explain_selection(
    spec: Spec,
    names: tuple[str, ...],
    explicit: str | None,
    kernel_options: KernelOptions,
    failed: Mapping[str, TraceLine] | None = None,
) -> Selection:
    """Return what would be chosen, and every candidate's answer, without compiling.

    Args:
        spec, names, explicit, kernel_options: as for
            `anyflex.runtime.kernel_cache.kernel_for`.
        failed: lines of candidates that did not compute the call, by name: one that takes the spec
            may refuse it late, when it compiles.

    Raises:
        ArgumentError, ArgumentTypeError: an unknown backend name, or wrong ``kernel_options``.
        Refusals, and forced backends that can't be used, don't raise: they are in the trace.
    """
    try:
        choice = Choice(spec, names, explicit, kernel_options)
    except BackendRefused as error:
        lines = tuple(TraceLine(n, "", "refuses", r) for n, r in error.reasons.items())
        source = source_of(names, explicit)
        return Selection(None, "", None, spec, lines, source, ())
    chosen: Answer | None = None
    trace = list(choice.trace)
    missing = choice.missing()
    if missing is not None and not choice.forced_by:
        trace.append(missing)
    for entry in choice.candidates:
        answer = choice.ask(entry)
        line = answer.line
        if failed is not None and entry.name in failed and answer.decision is not None:
            late = failed[entry.name]
            line = dataclasses.replace(line, outcome=late.outcome, reason=late.reason)
        elif chosen is None and answer.decision is not None:
            chosen = answer
            line = dataclasses.replace(line, outcome="chosen")
        elif chosen is not None and answer.decision is not None and entry.name != REFERENCE:
            earlier = f"{chosen.line.backend} is asked first: by priority, then by name"
            line = dataclasses.replace(line, reason=earlier)
        trace.append(line)
        if choice.forced_by and answer.error is not None:
            break
    if choice.forced_by:
        trace += choice.others(trace)
    if chosen is None:
        return Selection(None, "", None, spec, tuple(trace), choice.forced_by, ())
    unused = chosen.resolved.unused if chosen.resolved is not None else ()
    return Selection(
        chosen.line.backend,
        chosen.line.distribution,
        chosen.decision,
        chosen.spec,
        tuple(trace),
        choice.forced_by,
        unused,
    )
