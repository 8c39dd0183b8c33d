"""Evaluation of a mod on boxes of elements, for building masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.mask_function import captured_name
from anyflex.errors import BlockMaskError, ModIndexError
from anyflex.mod_graph.evaluate import Evaluator
from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.printing import expression
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod
from anyflex.tracing.vmapped_mods import apply_mask, apply_score

__all__ = ["Elements", "OpaqueElements", "TracedElements", "elements_of"]


class Elements(ABC):
    """Evaluator that tells which elements are live.

    Attributes:
        device: where the index vectors must be, and the results are.
        depends: names of the inputs that the result may depend on.
    """

    device: torch.device
    depends: frozenset[str]

    @abstractmethod
    def live(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return bool [b, h, q, k] from int64 vectors of indices; it may have stride 0."""

    def grid(self, batch: int, heads: int) -> tuple[int, int]:
        """Return B' and H' of a mask: 1 where the result doesn't depend on the index."""
        return (batch if "b" in self.depends else 1, heads if "h" in self.depends else 1)


class TracedElements(Elements):
    """A traced mask mod, or a score mod, for which an element is dead where it gives -inf.

    Args:
        traced: its captured tensors are copied to `device`, once.
        kind: ``"mask"`` or ``"score"``.
    """

    def __init__(self, traced: TracedMod, device: torch.device, kind: str = "mask") -> None:
        self.device = device
        self.kind = kind
        self._traced = traced
        numbers: dict[str, int | float] = {f"i{i}": n for i, n in enumerate(traced.ints)}
        numbers |= {f"f{i}": n for i, n in enumerate(traced.floats)}
        self.graph = simplify(parse_graph(traced.text).bind(constants=numbers))
        self.captured = [tensor.detach().to(device) for tensor in traced.captured]
        self._evaluator = Evaluator(self.graph.nodes, (self.graph.output,))
        self.depends = self.graph.inputs()

    def expression(self, position: int) -> str:
        """Return a node of the graph as the user might have written it."""
        names = [name or f"captured[{i}]" for i, name in enumerate(self._traced.names)]
        return expression(self.graph.nodes, position, names)

    def live(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return bool [b, h, q, k]. Raises as `at` does."""
        live = self.at(b[:, None, None, None], h[:, None, None], q[:, None], k)
        return live.expand(b.numel(), h.numel(), q.numel(), k.numel())

    def at(self, b: Tensor | int, h: Tensor | int, q: Tensor, k: Tensor) -> Tensor:
        """Return whether elements are live, in the broadcast shape of the indices.

        Raises:
            ModIndexError: a live element reads outside of a captured tensor.
        """
        inputs = {
            "b": torch.as_tensor(b, device=self.device),
            "h": torch.as_tensor(h, device=self.device),
            "q_idx": q,
            "kv_idx": k,
            "score": torch.zeros((), device=self.device),
        }
        outside: list[tuple[int, Tensor]] = []
        live = self._live(inputs, self.captured, outside)
        for position, where in outside:
            if not where.any():
                continue
            reads = where & live
            table = self.captured[position]
            if table.dtype is torch.bool:
                # With the other value of this read, the element might have been live.
                other = [~t if i == position else t for i, t in enumerate(self.captured)]
                reads = reads | (where & self._live(inputs, other, None))
            if reads.any():
                self._raise_out_of_range(position, reads, inputs)
        indices = (inputs["b"], inputs["h"], q, k)
        return live.expand(torch.broadcast_tensors(*indices)[0].shape)  # type: ignore[no-untyped-call]

    def _live(
        self,
        inputs: dict[str, Tensor],
        captured: list[Tensor],
        outside: list[tuple[int, Tensor]] | None,
    ) -> Tensor:
        result = self._evaluator(inputs, captured, (), (), outside)[0]
        return ~torch.isneginf(result) if self.kind == "score" else result

    def _raise_out_of_range(self, position: int, reads: Tensor, inputs: dict[str, Tensor]) -> None:
        table = self.captured[position]
        name = captured_name(self._traced, position)
        axes = ("b", "h", "q_idx", "kv_idx")
        where, *places = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
            reads, *(inputs[axis] for axis in axes)
        )
        first = tuple(where.nonzero()[0])
        element = {axis: place[first] for axis, place in zip(axes, places, strict=True)}
        at = ", ".join(f"{axis} {int(place)}" for axis, place in element.items())
        index_is = self._index_outside(position, {**inputs, **element})
        raise ModIndexError(
            f"{self.kind}_mod reads {name} of shape {list(table.shape)} outside of it: {index_is}"
            f"at the live element {at}",
            operation="indexing",
            hint="Make the tensor as long as the lengths, or mask these elements.",
        )

    def _index_outside(self, position: int, element: dict[str, Tensor]) -> str:
        """Return the part of a message that says which index leaves the tensor at one element. It
        is empty where none does: an index computed from floats may round otherwise alone."""
        nodes, sizes = self.graph.nodes, self.captured[position].shape
        for node in nodes:
            if node.operation != "load" or node.attribute != position:
                continue
            indices = Evaluator(nodes, node.arguments)(element, self.captured, (), ())
            for dimension, (index, size) in enumerate(zip(indices, sizes, strict=True)):
                if not -size <= int(index) < size:
                    return f"in dimension {dimension} of size {size} the index is {int(index)} "
        return ""


class OpaqueElements(Elements):
    """A mod that could not be traced but is pure: torch.vmap runs it."""

    def __init__(self, function: Callable[..., Any], device: torch.device, kind: str) -> None:
        self.device = device
        self.kind = kind
        self.depends = frozenset(("b", "h", "q_idx", "kv_idx"))
        self._function = function

    def live(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return bool [b, h, q, k]. Raises BlockMaskError for results of a wrong kind."""
        indices = (b, h, q, k)
        if self.kind == "score":
            score = torch.zeros([index.numel() for index in indices], device=self.device)
            return ~torch.isneginf(apply_score(self._function, score, indices))
        result = apply_mask(self._function, indices)
        if result.dtype is not torch.bool or result.dim() != 4:
            raise BlockMaskError(
                f"mask_mod returned dtype {result.dtype} and shape {list(result.shape[4:])}; it "
                "must return one bool scalar"
            )
        return result


def elements_of(
    traced: TracedMod | None, opaque: MaskMod | None, device: torch.device, kind: str = "mask"
) -> Elements:
    """Return the evaluator of a mod."""
    if traced is not None:
        return TracedElements(traced, device, kind)
    assert opaque is not None
    return OpaqueElements(opaque, device, kind)
