"""Inspector: a backend in front of the one under test that checks both sides of each contract.

It passes every question and every call on. Memory that a kernel must fill is guarded and poisoned;
memory that it must only read is compared afterwards, bit for bit.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from anyflex.plugin import (
    Accepted,
    Artifacts,
    Backend,
    Call,
    Decision,
    GradInputs,
    Grads,
    Kernel,
    Option,
    Outputs,
    Rejected,
    Saved,
    Spec,
    TensorSpec,
)
from anyflex.registry.registered_backend import saved_bytes_problem
from anyflex.testing.guarded_tensors import Guarded, raw_bytes

__all__ = ["Journal", "KeptArtifacts", "ask", "inspected", "promised_bytes"]


@dataclass
class KeptArtifacts:
    """Artifacts of one spec, kept in a dictionary."""

    stored: dict[str, bytes] = field(default_factory=dict)

    def get(self, name: str) -> bytes | None:
        """See `anyflex.plugin.Artifacts`."""
        return self.stored.get(name)

    def put(self, name: str, data: bytes) -> None:
        """See `anyflex.plugin.Artifacts`."""
        self.stored[name] = bytes(data)


@dataclass
class Journal:
    """Record of an inspector since it was last cleared.

    Attributes:
        violations: broken promises, a sentence each.
        decisions: (spec, decision) of each `supports`.
        forwards, backwards: specs whose kernels ran, in order.
        compiled: specs that were compiled.
        launches: (backend, variant) of each launch that the registry knows of, by any backend.
        workspaces: (direction, specs) of each launch that asked for workspace.
        artifacts: used for compiling, in place of the registry's.
        watching: False lets kernels run on core's own memory, unchecked: the checks read values,
            and the host waits for them.
        poisons: False lets saved outputs and workspaces hold zeros, not NaN, before a launch.
        index_offsets: of each call, None for core's.
    """

    violations: list[str] = field(default_factory=list)
    decisions: list[tuple[Spec, Decision]] = field(default_factory=list)
    forwards: list[Spec] = field(default_factory=list)
    backwards: list[Spec] = field(default_factory=list)
    compiled: list[Spec] = field(default_factory=list)
    launches: list[tuple[str, str]] = field(default_factory=list)
    workspaces: list[tuple[str, tuple[TensorSpec, ...]]] = field(default_factory=list)
    artifacts: Artifacts | None = None
    watching: bool = True
    poisons: bool = True
    index_offsets: tuple[int, int, int, int] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, violation: str) -> None:
        """Record a broken promise, once."""
        with self.lock:
            if violation not in self.violations:
                self.violations.append(violation)

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            for held in vars(self).values():
                if isinstance(held, list):
                    held.clear()


def inspected(backend: Backend, journal: Journal) -> type[Backend]:
    """Return a backend class that inspects `backend`, to be registered under its name."""

    class Inspector(Backend):
        priority = backend.priority
        capabilities = backend.capabilities
        options: Mapping[str, Option] = backend.options  # type: ignore[misc]

        def probe(self) -> Decision:
            return backend.probe()

        def fingerprint(self) -> str:
            return backend.fingerprint()

        def supports(self, spec: Spec) -> Decision:
            return ask(backend, spec, journal)

        def saved_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
            return backend.saved_bytes(dtype)

        def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
            journal.compiled.append(spec)
            kernel = backend.compile(spec, journal.artifacts or artifacts)
            return _InspectedKernel(
                kernel, spec, journal, promised_bytes(backend, spec.dtype, journal)
            )

    return Inspector


def promised_bytes(backend: Backend, dtype: torch.dtype, journal: Journal) -> tuple[int, int]:
    """Ask `saved_bytes`; an answer without a size is a violation, and promises nothing."""
    found = backend.saved_bytes(dtype)
    problem = saved_bytes_problem(found)
    if problem is None:
        return found
    journal.note(problem)
    return 0, 0


def ask(backend: Backend, spec: Spec, journal: Journal) -> Decision:
    """Ask `supports`, and compare its answer with itself and with the declaration.

    Raises whatever `supports` raises, which is a violation too.
    """
    try:
        decision, again = backend.supports(spec), backend.supports(spec)
    except Exception as error:
        journal.note(f"supports() raised {type(error).__name__} instead of refusing: {error}")
        raise
    if decision != again:
        journal.note(f"supports() answered {decision} and, asked again, {again}")
    if not isinstance(decision, (Accepted, Rejected)):
        journal.note(f"supports() answered {decision!r}: neither Accepted() nor Rejected(reason)")
    if isinstance(decision, Rejected) and not decision.reason.strip():
        journal.note("supports() refused without a reason")
    refusal = spec.unsupported_by(backend.capabilities)
    if isinstance(decision, Rejected) and refusal is None:
        journal.note(f"supports() refuses what the capabilities declare: {decision.reason}")
    if isinstance(decision, Accepted):
        if refusal is not None:
            journal.note(f"supports() accepts what the capabilities don't declare: {refusal}")
        elif spec.needs_backward and decision.backward == "own":
            undeclared = backend.capabilities.gradient_refusal(spec)
            if undeclared is not None:
                journal.note(
                    f"supports() accepts a backward that the capabilities don't declare: "
                    f"{undeclared}"
                )
    journal.decisions.append((spec, decision))
    return decision


class _InspectedKernel(Kernel):
    def __init__(
        self, kernel: Kernel, spec: Spec, journal: Journal, saved_bytes: tuple[int, int]
    ) -> None:
        self._kernel = kernel
        self._spec = spec
        self._journal = journal
        self._saved_bytes = saved_bytes

    def describe(self, call: Call) -> str:
        # Calls accept such values, with a warning.
        try:
            variant: object = self._kernel.describe(call)
        except Exception as error:
            self._journal.note(f"describe() raised {type(error).__name__}: {error}")
            raise
        if not isinstance(variant, str):
            self._journal.note(f"describe() must return a str, got {variant!r}")
        return str(variant)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        return self._tensors("workspace", self._kernel.workspace(call, direction))

    def _tensors(self, method: str, found: object) -> tuple[TensorSpec, ...]:
        if isinstance(found, tuple) and all(isinstance(spec, TensorSpec) for spec in found):
            return found
        self._journal.note(f"{method}() must return a tuple of TensorSpec objects, got {found!r}")
        return ()

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        specs = self._tensors("saved_outputs", self._kernel.saved_outputs(call))
        values, rest = self._saved_bytes
        rows = call.query.shape[:3].numel()
        most = rows * (values * call.value.shape[3] + rest)
        if self._saved_bytes != (0, 0):
            asked = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
            if asked > most:
                self._journal.note(
                    f"saved_outputs() asks for {asked} bytes, saved_bytes() promises {most}"
                )
        return specs

    def forward(self, call: Call, out: Outputs) -> None:
        call = _moved(call, self._journal.index_offsets)
        forward: Callable[..., object] = self._kernel.forward
        if not self._journal.watching:
            self._ran(self._journal.forwards, forward(call, out))
            return
        watch = _Watch("forward", self._journal, call)
        given = Outputs(
            watch.output("out", out.out),
            watch.optional("lse", out.lse),
            watch.optional("max_scores", out.max_scores),
            tuple(watch.scratch("a saved output", t, s) for t, s in zip(
                out.saved, self.saved_outputs(call) if out.saved else (), strict=True)),
            self._workspace(watch, call, "forward", out.workspace),
        )  # fmt: skip
        self._ran(self._journal.forwards, forward(call, given))
        watch.close()

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        call = _moved(call, self._journal.index_offsets)
        backward: Callable[..., object] = self._kernel.backward
        if not self._journal.watching:
            self._ran(self._journal.backwards, backward(call, saved, grad, grads))
            return
        reads: dict[str, Tensor | None] = {"out": saved.out, "lse": saved.lse}
        reads |= {"dout": grad.dout, "dlse": grad.dlse, "delta": grad.delta}
        reads |= {f"saved output {i}": tensor for i, tensor in enumerate(saved.extras)}
        watch = _Watch("backward", self._journal, call, reads)
        given = Grads(
            watch.optional("dq", grads.dq),
            watch.optional("dk", grads.dk),
            watch.optional("dv", grads.dv),
            tuple(
                watch.optional(f"the gradient of captured tensor {i}", t, accumulated=True)
                for i, t in enumerate(grads.captured)
            ),
            self._workspace(watch, call, "backward", grads.workspace),
        )
        self._ran(self._journal.backwards, backward(call, saved, grad, given))
        watch.close()

    def _ran(self, log: list[Spec], returned: object) -> None:
        if returned is not None:
            self._journal.note(f"a kernel must return None, got a {type(returned).__name__}")
        with self._journal.lock:
            log.append(self._spec)

    def _workspace(
        self,
        watch: _Watch,
        call: Call,
        direction: Literal["forward", "backward"],
        tensors: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        specs = self.workspace(call, direction)
        if specs:
            with self._journal.lock:
                self._journal.workspaces.append((direction, specs))
        return tuple(
            watch.scratch("a workspace", tensor, spec)
            for tensor, spec in zip(tensors, specs, strict=True)
        )


def _moved(call: Call, offsets: tuple[int, int, int, int] | None) -> Call:
    """Return the call with other index offsets: contract 1 has no argument that sets them."""
    if offsets is not None:
        call = copy.copy(call)
        object.__setattr__(call, "index_offsets", offsets)
    return call


class _Watch:
    """Watches one launch."""

    def __init__(
        self,
        direction: str,
        journal: Journal,
        call: Call,
        reads: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        self._direction = direction
        self._journal = journal
        named: dict[str, Tensor | None] = {"query": call.query, "key": call.key, **(reads or {})}
        named["value"] = call.value
        named |= {f"captured tensor {i}": tensor for i, tensor in enumerate(call.captured)}
        named["sinks"] = call.sinks
        if call.packed is not None:
            rows = vars(call.packed)
            named |= {name: each for name, each in rows.items() if isinstance(each, Tensor)}
        if call.mask is not None:
            columns = call.mask.transposed()
            named |= {"the mask's offsets": call.mask.offsets, "the mask's runs": call.mask.runs}
            named |= {"the transposed mask's offsets": columns.offsets}
            named |= {"the transposed mask's runs": columns.runs}
        self._before = {
            name: (tensor, raw_bytes(tensor).clone())
            for name, tensor in named.items()
            if tensor is not None
        }
        self._outputs: list[tuple[str, Tensor, Guarded, bool]] = []
        self._scratch: list[tuple[str, Tensor, Guarded]] = []

    def output(self, name: str, tensor: Tensor, *, accumulated: bool = False) -> Tensor:
        """Return guarded memory to be filled in place of an output."""
        guarded = Guarded(tensor, poison=not accumulated)
        self._outputs.append((name, tensor, guarded, accumulated))
        return guarded.tensor

    def optional(
        self, name: str, tensor: Tensor | None, *, accumulated: bool = False
    ) -> Tensor | None:
        """Return the same, or None for an output that isn't asked for."""
        return None if tensor is None else self.output(name, tensor, accumulated=accumulated)

    def scratch(self, name: str, tensor: Tensor, spec: TensorSpec) -> Tensor:
        """Return guarded memory in place of a workspace or a saved output."""
        guarded = Guarded(tensor, poison=self._journal.poisons and not spec.zeroed)
        self._scratch.append((name, tensor, guarded))
        return guarded.tensor

    def close(self) -> None:
        """Check everything, and hand the outputs over."""
        for name, tensor, guarded, accumulated in self._outputs:
            self._check_guards(name, guarded)
            if (replaced := guarded.replaced()) is not None:
                self._note(f"{name}: {replaced}")
            if not accumulated and (unwritten := guarded.unwritten()):
                self._note(f"{unwritten} of {tensor.numel()} elements of {name} were not written")
            tensor.copy_(guarded.content())
        for name, tensor, guarded in self._scratch:
            self._check_guards(name, guarded)
            tensor.copy_(guarded.content())
        for name, (tensor, before) in self._before.items():
            if not raw_bytes(tensor).equal(before):
                self._note(f"{name} was written to")

    def _check_guards(self, name: str, guarded: Guarded) -> None:
        trespass = guarded.trespass()
        if trespass is not None:
            self._note(f"{name}: {trespass}")

    def _note(self, what: str) -> None:
        self._journal.note(f"{self._direction}: {what}")
