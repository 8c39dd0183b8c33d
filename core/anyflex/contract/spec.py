"""Spec: everything about a call that selects and compiles a kernel."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.tensors.tensor_facts import Alignment

__all__ = ["STORED", "CapturedFacts", "Declared", "Spec"]

STORED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3"}
"""`Spec.kv_storage` by the type of stored keys and values; others have the call's type."""


@dataclass(frozen=True, slots=True)
class CapturedFacts:
    """Fixed properties of a captured tensor; its values, shape and strides are run-time."""

    dtype: torch.dtype
    rank: int
    needs_grad: bool


class Declared(Protocol):
    """The part of `anyflex.contract.capabilities.Capabilities` that a spec is held against."""

    @property
    def known_fields(self) -> frozenset[str]:
        """Names of the spec fields that the backend looks at."""
        ...

    def refusal(self, spec: Spec, /) -> str | None:
        """Return why the backend can't take the spec, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Spec:
    """Frozen, hashable and serialisable (`to_text`, `from_text`).

    Batch, heads, lengths, strides, captured values and scale are run-time and no part of it. A
    field's default is that of the plainest call: a backend may leave fields that it doesn't
    support out of ``Capabilities.known_fields``.

    Args:
        device_type: torch's device type, for example ``"cuda"``.
        arch: the device's architecture (``"sm_90"``, ``"apple9"``), or "" where torch has no name
            for it.
        dtype: of query, key, value and out.
        head_dim: E, last dimension of query and key.
        value_head_dim: Ev, last dimension of value and out.
        gqa_ratio: query heads per KV head.
        kv_broadcast: key and value have batch 1 and query has more.
        score_graph: the score mod after simplification, or None for none. Loads count into
            ``Call.captured``, number slots into ``Call.ints`` and ``Call.floats``.
        mask_graph: the mask mod that PARTIAL blocks apply, or None where there is none.
        mask_kind: ``"none"`` or ``"runs"``.
        block_size: (q, kv) block size of the mask; (0, 0) without mask.
        captured: facts of each captured tensor, the score mod's first.
        aux: which auxiliary outputs are asked for: subset of ``("lse", "max_scores")``.
        needs_lse: ``Outputs.lse`` is given and must be filled (aux, or kept for backward).
        gradients: which of ("q", "k", "v") need a gradient; captured tensors say it themselves.
        dlse: a gradient may arrive at lse.
        determinism: torch's mode when the call ran: ``"off"``, ``"warn"`` or ``"on"``.
        fp32_precision: for float32 inputs what torch allows products to be rounded to when the
            call runs, in the words of `torch.set_float32_matmul_precision`: ``"highest"`` to
            nothing, ``"high"`` to TF32's 10 bits, ``"medium"`` to bfloat16; else "".
        q_class: ``"one"`` query row, ``"short"`` (2 to 64) or ``"long"``.
        alignment: class of query, key and value.
        index_width: 32 if every element offset of query, key and value fits int32, else 64.
        options: the backend's own options that were given, by name, sorted.

    Advanced: a backend that leaves these out of ``known_fields`` needs none of them.
        opaque: a mod could not be traced and is run through vmap: reference only.
        dropout: weights are dropped as ``Call.dropout`` says. The probability and the seed are
            run-time.
        q_layout: ``"packed"`` where many sequences lie one after the other (``Call.packed``);
            q_class is then that of the longest one. Such a call asks for no gradients.
        kv_layout: of a packed call, ``"packed"`` or ``"paged"``.
        page_size: rows of a page, 0 where there are none.
        kv_storage: of a packed call, ``"plain"`` where key and value have `dtype`; or they are
            stored as ``"int8"`` or ``"fp8_e4m3"`` and multiplied by scales. Mods see scores after
            that.
        index_map: reserved; contract 1 knows its default only.
        sinks: each row's softmax has one more score, ``Call.sinks[h]``, whose value is 0.
            ``Outputs.lse`` and ``max_scores`` leave it out. Core computes its gradient.
        batch_invariant: of a packed call: the bits of a sequence's results depend on it alone, not
            on other sequences, bounds or padding rows of the call, nor on where its pages lie.
    """

    device_type: str
    arch: str
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    gqa_ratio: int = 1
    kv_broadcast: bool = False
    score_graph: ModGraph | None = None
    mask_graph: ModGraph | None = None
    mask_kind: Literal["none", "runs"] = "none"
    block_size: tuple[int, int] = (0, 0)
    captured: tuple[CapturedFacts, ...] = ()
    aux: tuple[str, ...] = ()
    needs_lse: bool = False
    gradients: tuple[str, ...] = ()
    dlse: bool = False
    determinism: Literal["off", "warn", "on"] = "off"
    fp32_precision: str = ""
    q_class: Literal["one", "short", "long"] = "long"
    alignment: tuple[Alignment, Alignment, Alignment] = ("aligned", "aligned", "aligned")
    index_width: Literal[32, 64] = 32
    options: tuple[tuple[str, int | float | bool | str], ...] = ()
    opaque: bool = False
    q_layout: Literal["dense", "packed"] = "dense"
    kv_layout: Literal["dense", "packed", "paged"] = "dense"
    page_size: int = 0
    index_map: Literal["identity", "offset", "per_row"] = "identity"
    kv_storage: Literal["plain", "int8", "fp8_e4m3"] = "plain"
    dropout: bool = False
    sinks: bool = False
    batch_invariant: bool = False

    @property
    def needs_backward(self) -> bool:
        """Whether some input needs a gradient."""
        return bool(self.gradients) or any(facts.needs_grad for facts in self.captured)

    def to_text(self) -> str:
        """Canonical text: equal specs have equal texts, in any process."""
        return repr({f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)})

    @classmethod
    def from_text(cls, text: str) -> Spec:
        """Read `to_text` back. Raises ValueError if the text is not a spec of this contract."""
        try:
            values: dict[str, Any] = dict(ast.literal_eval(text))
            if values.keys() != (names := {f.name for f in dataclasses.fields(cls)}):
                raise ValueError(f"its fields differ: {sorted(values.keys() ^ names)}")
            values["dtype"] = _dtype(values["dtype"])
            values["captured"] = tuple(
                CapturedFacts(_dtype(name), rank, needs_grad)
                for name, rank, needs_grad in values["captured"]
            )
            values["options"] = tuple(
                (name, float(*value) if isinstance(value, tuple) else value)
                for name, value in values["options"]
            )
            for name in ("score_graph", "mask_graph"):
                if values[name] is not None:
                    values[name] = parse_graph(values[name])
        except (SyntaxError, TypeError, ValueError) as error:
            raise ValueError(f"a damaged spec text: {error}") from error
        return cls(**values)

    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal: the spec's name in the disk cache."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    def unsupported_by(self, capabilities: Declared) -> str | None:
        """Return why a backend with these capabilities can't take this spec, or None if it can.

        A field that is reserved, or newer than the backend, must have its default, so that a new
        field never makes an old backend compute wrong results.
        """
        for field_ in dataclasses.fields(self):
            if field_.name not in capabilities.known_fields:
                value = getattr(self, field_.name)
                if value != field_.default:
                    said = _SAID.get(field_.name, f"{field_.name}={value!r}")
                    return f"{said} is not supported"
        return capabilities.refusal(self)


_SAID = {
    "kv_broadcast": "key and value of batch 1 for a larger query batch",
    "score_graph": "a score mod",
    "mask_graph": "a block mask with a mask mod",
    "mask_kind": "a block mask",
    "block_size": "a block mask",
    "captured": "a mod that reads a captured tensor",
    "dropout": "attention dropout (dropout_p)",
    "q_layout": "a call of packed sequences",
    "sinks": "an attention sink (sinks)",
    "opaque": "a mod that could not be traced (it runs on the reference only)",
}
"""Phrases for fields in refusals, where the value alone would tell a user nothing."""


def _plain(value: object) -> object:
    """Return a field's value as a literal of Python's."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, ModGraph):
        return value.text
    if isinstance(value, CapturedFacts):
        return _plain((value.dtype, value.rank, value.needs_grad))
    if isinstance(value, float) and not math.isfinite(value):
        return (str(value),)  # inf and nan are no literals
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"an unknown dtype {name!r}")
    return dtype
