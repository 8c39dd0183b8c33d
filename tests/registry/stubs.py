"""Backends that accept, refuse or break as a test wants, and hand-made specs."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any, ClassVar

import torch

from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, Outputs
from anyflex.contract.capabilities import Capabilities
from anyflex.contract.decision import Accepted, Decision, Rejected
from anyflex.contract.option import Option
from anyflex.contract.spec import Spec

__all__ = ["EVERYTHING", "NullKernel", "Reference", "Stub", "make_spec", "make_stub"]

EVERYTHING = Capabilities(
    dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64}),
    head_dim_max=1024,
    different_value_head_dim=True,
    gqa=True,
    kv_broadcast=True,
    scattered=True,
    aux=frozenset({"lse", "max_scores"}),
    gradients=frozenset({"q", "k", "v", "captured", "lse"}),
    deterministic=True,
)


class NullKernel(Kernel):
    def forward(self, call: Call, out: Outputs) -> None:
        out.out.zero_()


class Stub(Backend):
    """Accepts everything; counts its compiles."""

    capabilities: ClassVar[Capabilities] = EVERYTHING
    compiled: ClassVar[list[Spec]] = []

    def probe(self) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        self.compiled.append(spec)
        return NullKernel()


class Reference(Stub):
    """Stands in for the reference: takes mods that can't be traced, too."""

    capabilities = dataclasses.replace(
        EVERYTHING, known_fields=EVERYTHING.known_fields | {"opaque"}
    )


def make_stub(
    *,
    priority: int = 0,
    refuses: str | None = None,
    rejects: str | None = None,
    options: dict[str, Option] | None = None,
    module: str = "stubs",
    compile_seconds: float = 0.0,
    raises: dict[str, BaseException] | None = None,
    answers: dict[str, Any] | None = None,
    **attributes: Any,
) -> type[Stub]:
    """Return a backend class.

    Args:
        priority: of the backend.
        refuses: reason of ``supports``.
        rejects: reason of ``probe``.
        options: its own options.
        module: in which it claims to be.
        compile_seconds: what a compile takes.
        raises: method name -> what it raises.
        answers: method name -> what it returns instead.
        attributes: more class attributes.
    """
    raises, answers = raises or {}, answers or {}

    def step(method: str, answer: Any) -> Any:
        if method in raises:
            raise raises[method]
        return answers.get(method, answer)

    class Made(Stub):
        compiled: ClassVar[list[Spec]] = []
        lock = threading.Lock()

        def probe(self) -> Decision:
            return step("probe", Rejected(rejects) if rejects else Accepted())

        def supports(self, spec: Spec) -> Decision:
            return step("supports", Rejected(refuses) if refuses else Accepted())

        def fingerprint(self) -> str:
            return step("fingerprint", "stub")

        def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
            with self.lock:
                self.compiled.append(spec)
            time.sleep(compile_seconds)
            return step("compile", NullKernel())

    Made.priority = priority
    Made.options = options or {}
    Made.__module__ = module
    for name, value in attributes.items():
        setattr(Made, name, value)
    return Made


def make_spec(device_type: str = "cpu", **changes: Any) -> Spec:
    """Return a plain forward spec, with `changes`."""
    spec = Spec(
        device_type=device_type,
        arch="",
        dtype=torch.float32,
        head_dim=16,
        value_head_dim=16,
        gqa_ratio=1,
        kv_broadcast=False,
        score_graph=None,
        mask_graph=None,
        mask_kind="none",
        block_size=(0, 0),
        captured=(),
        aux=(),
        needs_lse=False,
        gradients=(),
        dlse=False,
        determinism="off",
        fp32_precision="highest",
        q_class="long",
        alignment=("aligned", "aligned", "aligned"),
        index_width=32,
    )
    return dataclasses.replace(spec, **changes)
