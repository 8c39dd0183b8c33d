"""Capabilities: what a backend declares that it can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyflex.contract.spec import Spec
from anyflex.mod_graph.dtypes import DTYPES
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import OPERATIONS

__all__ = ["CONTRACT_1_FIELDS", "Capabilities"]

CONTRACT_1_FIELDS = frozenset(
    (
        "device_type arch dtype head_dim value_head_dim gqa_ratio kv_broadcast score_graph "
        "mask_graph mask_kind block_size captured aux needs_lse gradients dlse determinism "
        "fp32_precision q_class alignment index_width options"
    ).split()
)
"""Spec fields that every backend of contract 1 knows."""
_AUX = frozenset(("lse", "max_scores"))
_GRADIENTS = frozenset(("q", "k", "v", "captured", "lse"))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A declaration that the conformance kit holds a backend to: declared calls must pass, all
    others must be refused with a reason. The defaults are the least useful set.

    Args:
        dtypes: of query, key and value.
        head_dim_min, head_dim_max, head_dim_multiple: rule for E, and for Ev.
        different_value_head_dim: Ev may differ from E.
        gqa: several query heads may share a KV head.
        kv_broadcast: key and value of batch 1 may serve a larger query batch.
        scattered: tensors whose last stride is not 1 are read in place.
        aux: auxiliary outputs, subset of ("lse", "max_scores").
        gradients: of ("q", "k", "v", "captured", "lse").
        core_backward: where `gradients` doesn't reach, core computes them from out and lse, in
            chunked torch operations on the same device.
        captured_dtypes: dtypes of captured tensors that can be read.
        decode: a q_class of "one" or "short".
        deterministic: gradients repeat bit for bit. Without it determinism "on" is refused, and
            "warn" warns.
        operations: names of mod-graph operations that can be lowered, in mods and, for gradients
            of its own, in their derivatives.
        known_fields: names of the spec fields that the backend looks at; all others must have
            their defaults. A backend that can drop weights names ``dropout`` here, one that takes
            packed sequences ``q_layout`` and ``kv_layout``, and ``page_size`` with pages, and
            ``batch_invariant`` where a sequence's bits depend on it alone when a call asks for
            that, one whose kernels have sinks ``sinks``: for the others core applies these to out.
        node_dtypes: types of mod-graph nodes that can be lowered, in mods and in their
            derivatives as `operations`. Indices are int64 nodes.
    """

    dtypes: frozenset[torch.dtype]
    head_dim_min: int = 1
    head_dim_max: int = 256
    head_dim_multiple: int = 1
    different_value_head_dim: bool = False
    gqa: bool = False
    kv_broadcast: bool = False
    scattered: bool = False
    aux: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    core_backward: bool = False
    captured_dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.int32, torch.int64})
    decode: bool = True
    deterministic: bool = False
    operations: frozenset[str] = frozenset(OPERATIONS)
    known_fields: frozenset[str] = CONTRACT_1_FIELDS
    node_dtypes: frozenset[torch.dtype] = frozenset(DTYPES.values())

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a declaration that can't be meant."""
        for name in ("dtypes", "captured_dtypes", "node_dtypes"):
            _check_set(name, getattr(self, name), torch.dtype, "torch.dtype")
        for name in ("aux", "gradients", "operations", "known_fields"):
            _check_set(name, getattr(self, name), str, "str")
        for name, known in (("aux", _AUX), ("gradients", _GRADIENTS)):
            if strange := getattr(self, name) - known:
                raise ValueError(
                    f"Capabilities({name}=...) has {sorted(strange)}; there are {sorted(known)}"
                )
        low, high, step = self.head_dim_min, self.head_dim_max, self.head_dim_multiple
        if not all(type(dim) is int for dim in (low, high, step)):
            raise TypeError(
                "Capabilities(head_dim_min, head_dim_max, head_dim_multiple) must be int, got "
                f"{low!r}, {high!r}, {step!r}"
            )
        if step < 1 or low < 1 or high // step * step < low:
            raise ValueError(
                f"Capabilities(head_dim_min={low}, head_dim_max={high}, head_dim_multiple={step}) "
                "allow no head dim"
            )

    def refusal(self, spec: Spec) -> str | None:
        """Return the first reason why `spec` is outside of these capabilities, or None."""
        if spec.dtype not in self.dtypes:
            return f"dtype {_name(spec.dtype)} is not supported (it is: {_names(self.dtypes)})"
        for what, dim in (("E", spec.head_dim), ("Ev", spec.value_head_dim)):
            if not self.head_dim_min <= dim <= self.head_dim_max or dim % self.head_dim_multiple:
                return (
                    f"head dim {what} = {dim} is not supported (it is: {self.head_dim_min} to "
                    f"{self.head_dim_max}, multiples of {self.head_dim_multiple})"
                )
        if spec.value_head_dim != spec.head_dim and not self.different_value_head_dim:
            return f"Ev = {spec.value_head_dim} differs from E = {spec.head_dim}"
        if spec.gqa_ratio != 1 and not self.gqa:
            return f"grouped query attention (ratio {spec.gqa_ratio}) is not supported"
        if spec.kv_broadcast and not self.kv_broadcast:
            return "key and value of batch 1 for a larger query batch are not supported"
        if "scattered" in spec.alignment and not self.scattered:
            return "a tensor whose last stride is not 1 is not supported; call .contiguous() on it"
        missing_aux = [name for name in spec.aux if name not in self.aux]
        if missing_aux:
            return f"auxiliary output {', '.join(missing_aux)} is not supported"
        if spec.q_class != "long" and not self.decode:
            return "decoding (64 query rows or fewer) is not supported"
        return self._mod_refusal(spec) or (
            None if self.core_backward else self.gradient_refusal(spec)
        )

    def _mod_refusal(self, spec: Spec) -> str | None:
        for facts in spec.captured:
            if facts.dtype not in self.captured_dtypes:
                return f"a captured tensor of dtype {_name(facts.dtype)} is not supported"
        for name, graph in (("score_mod", spec.score_graph), ("mask_mod", spec.mask_graph)):
            reason = None if graph is None else self._node_refusal(graph.nodes, "a mod", name)
            if reason is not None:
                return reason
        return None

    def _node_refusal(self, nodes: Sequence[Node], where: str, function: str) -> str | None:
        for node in nodes:
            if node.operation not in self.operations:
                return f"operation {node.operation} in {where} is not supported"
            if node.dtype not in self.node_dtypes:
                return (
                    f"{function} computes in {_name(node.dtype)}, which is not supported: convert "
                    f"to another type in it (there are: {_names(self.node_dtypes)})"
                )
        return None

    def gradient_refusal(self, spec: Spec) -> str | None:
        """Return why the backend's own backward can't serve `spec`, or None."""
        wanted = [*spec.gradients]
        if any(facts.needs_grad for facts in spec.captured):
            wanted.append("captured")
        if spec.dlse and wanted:
            wanted.append("lse")
        for name in wanted:
            if name not in self.gradients:
                return f"the gradient of {name} is not supported"
        if spec.determinism == "on" and wanted and not self.deterministic:
            return (
                "gradients that repeat bit for bit (torch.use_deterministic_algorithms) are not "
                "supported"
            )
        return self._derivative_refusal(spec) if wanted else None

    def _derivative_refusal(self, spec: Spec) -> str | None:
        every_type = self.node_dtypes >= set(DTYPES.values())
        if spec.score_graph is None or (every_type and self.operations >= OPERATIONS.keys()):
            return None
        from anyflex.mod_graph.differentiate import differentiate

        learned = (i for i, facts in enumerate(spec.captured) if facts.needs_grad)
        derivative = differentiate(spec.score_graph, wanted_captured=frozenset(learned))
        where = "the derivative of a mod"
        return self._node_refusal(derivative.nodes, where, "the derivative of score_mod")


def _check_set(name: str, found: object, kind: type, called: str) -> None:
    if not isinstance(found, (frozenset, set)) or not all(isinstance(i, kind) for i in found):
        raise TypeError(f"Capabilities({name}=...) must be a frozenset of {called}, got {found!r}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(_name(dtype) for dtype in dtypes))
