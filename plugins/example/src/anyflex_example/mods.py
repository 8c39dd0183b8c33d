"""Mods as source text: a table from operations to torch, and the functions made with it.

A backend for another target keeps this file's shape and changes the text: Metal, C++, Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anyflex import ModIndexError
from anyflex.plugin import DTYPES, Call, Lowering, Node, Spec, differentiate, simplify

__all__ = ["TORCH", "Pairs", "load_source", "write_function", "write_source"]

Lines = list[str]
Indices = tuple[Tensor, ...]

_UNARY = (
    "neg abs floor ceil round trunc sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos "
    "tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid erf erfc"
).split()
_BINARY = "add sub mul pow minimum maximum atan2 eq ne lt le gt ge".split()
# An integer divided by 0 may become anything, but must not raise: the pair may be dead.
_DIVISOR = "{1}.masked_fill({1} == 0, 1)"


def _load(lines: Lines, node: Node, operands: Sequence[str]) -> str:
    return _emit(lines, node, f"pairs.load({', '.join([str(node.attribute), *operands])})")


def _emit(lines: Lines, node: Node, text: str) -> str:
    """Give the text a name, on a line of its own."""
    name = f"v{len(lines)}"
    lines.append(f"{name} = {text}")
    return name


TORCH: Lowering[Lines, str] = Lowering(
    "torch",
    {
        **{name: f"torch.{name}({{0}})" for name in _UNARY},
        **{name: f"torch.{name}({{0}}, {{1}})" for name in _BINARY},
        "input": "pairs.input({attribute!r}, {type})",
        "number": "pairs.slot({attribute!r}, {type})",
        "const": "pairs.number({attribute}, {type})",
        "load": _load,
        "truediv": "torch.true_divide({0}, {1})",
        "floordiv:float": "torch.floor_divide({0}, {1})",
        "floordiv:int": f"torch.floor_divide({{0}}, {_DIVISOR})",
        "mod:float": "torch.remainder({0}, {1})",
        "mod:int": f"torch.remainder({{0}}, {_DIVISOR})",
        "fmod:float": "torch.fmod({0}, {1})",
        "fmod:int": f"torch.fmod({{0}}, {_DIVISOR})",
        "and": "torch.bitwise_and({0}, {1})",
        "or": "torch.bitwise_or({0}, {1})",
        "xor": "torch.bitwise_xor({0}, {1})",
        "not": "torch.bitwise_not({0})",
        "shl": "torch.bitwise_left_shift({0}, {1})",
        "shr": "torch.bitwise_right_shift({0}, {1})",
        "where": "torch.where({0}, {1}, {2})",
        "cast": "{0}.to({type})",
        "detach": "{0}",
    },
    emit=_emit,
    # Leave out what the target lacks: `Capabilities.node_dtypes` is made of it.
    types={dtype: str(dtype) for dtype in DTYPES.values()},
)


def write_source(spec: Spec) -> str:
    """Return the text of up to three functions, each of a `Pairs`.

    ``score_mod`` and ``mask_mod`` return a tensor that broadcasts to the pairs.
    ``score_mod_backward`` returns the gradient of the score, or None where that is 0, and
    ``(captured position, indices, gradient)`` for each read of a captured tensor that learns.
    """
    parts = ["from math import inf, nan\nimport torch"]
    for name, graph in (("score_mod", spec.score_graph), ("mask_mod", spec.mask_graph)):
        if graph is not None:
            graph = simplify(graph)
            parts.append(write_function(name, graph.nodes, graph.output))
    if spec.score_graph is not None and spec.needs_backward:
        wanted = frozenset(i for i, facts in enumerate(spec.captured) if facts.needs_grad)
        derivative = differentiate(spec.score_graph, wanted_captured=wanted)
        roots = [] if derivative.score is None else [derivative.score]
        for scatter in derivative.scatters:
            roots += [scatter.value, *scatter.indices]
        lines: Lines = []
        values = TORCH.lower(derivative.nodes, lines, roots)
        scatters = [
            f"({s.captured}, ({''.join(values[i] + ', ' for i in s.indices)}), {values[s.value]})"
            for s in derivative.scatters
        ]
        score = "None" if derivative.score is None else values[derivative.score]
        parts.append(_function("score_mod_backward", lines, f"{score}, [{', '.join(scatters)}]"))
    return "\n\n\n".join(parts) + "\n"


def write_function(name: str, nodes: Sequence[Node], wanted: int) -> str:
    """Return the text of a function that returns the value of one node."""
    lines: Lines = []
    values = TORCH.lower(nodes, lines, [wanted])
    return _function(name, lines, values[wanted])


def _function(name: str, lines: Lines, result: str) -> str:
    return "\n    ".join([f"def {name}(pairs):", *lines, f"return {result}"])


def load_source(text: str) -> dict[str, Callable[[Pairs], Any]]:
    """Return the functions of `write_source` by name. A compiler runs here in other backends."""
    functions: dict[str, Callable[[Pairs], Any]] = {}
    exec(compile(text, "<mods>", "exec"), functions)
    return functions


class Pairs:
    """Inputs of mods at one piece of pairs.

    Args:
        call: for captured tensors and numbers.
        inputs: by name, of shapes that broadcast to the pairs'.
        check: note reads outside of captured tensors, for `raise_for_reads_outside`.
    """

    def __init__(self, call: Call, inputs: dict[str, Tensor], *, check: bool) -> None:
        self.call = call
        self.inputs = inputs
        self.device = call.query.device
        # Reading a device's values would make the host wait for it.
        self.check = check and self.device.type == "cpu"
        self.outside: list[tuple[int, Tensor]] = []

    def input(self, name: str, dtype: torch.dtype) -> Tensor:
        """One of score, b, h, q_idx, kv_idx, and grad in a derivative."""
        return self.inputs[name].to(dtype)

    def slot(self, slot: str, dtype: torch.dtype) -> Tensor:
        """A number that may change from call to call: ``"i0"``, ``"f2"``."""
        numbers: Sequence[float] = self.call.ints if slot[0] == "i" else self.call.floats
        return self.number(numbers[int(slot[1:])], dtype)

    def number(self, value: float, dtype: torch.dtype) -> Tensor:
        """A 0-d tensor of a number: values beyond the type's range wrap, or become infinite."""
        if not dtype.is_floating_point:
            return torch.full((), value, dtype=torch.int64, device=self.device).to(dtype)
        if abs(value) > torch.finfo(dtype).max:
            value = math.copysign(math.inf, value)
        return torch.full((), value, dtype=dtype, device=self.device)

    def load(self, position: int, *indices: Tensor) -> Tensor:
        """Read a captured tensor at one index a dimension. Never reads outside of it."""
        table = self.call.captured[position]
        if table.numel() == 0:
            table = table.new_zeros([max(1, size) for size in table.shape])
        if not indices:
            return table
        # To torch a narrow index is a mask, and a 0-d one is a number to be read on the host.
        wide = [index.long().expand(index.shape or (1,)) for index in indices]
        if self.check:
            sizes = self.call.captured[position].shape
            for index, size in zip(wide, sizes, strict=True):
                self.outside.append((position, (index < -size) | (index >= size)))
        return table[self.places(wide, table.shape)]

    def places(self, indices: Sequence[Tensor], shape: Sequence[int]) -> Indices:
        """Clamp indices; one in -N..-1 counts from the end first."""
        return tuple(
            torch.where(index < 0, index + size, index).clamp(0, size - 1)
            for index, size in zip(indices, shape, strict=True)
        )

    def scatter(self, total: Tensor, indices: Sequence[Tensor], gradient: Tensor) -> None:
        """Add the gradient of reads to a captured tensor's; all shapes are the pairs'."""
        if not indices:
            total += gradient.sum(dtype=total.dtype)
        elif total.numel() > 0:
            wide = [index.long().expand(gradient.shape) for index in indices]
            places = self.places(wide, total.shape)
            total.index_put_(places, gradient.to(total.dtype), accumulate=True)

    def raise_for_reads_outside(self, mod: str, live: Tensor) -> None:
        """Raise ModIndexError if a live pair has read outside of a captured tensor."""
        for position, where in self.outside:
            if bool((where & live).any()):
                shape = list(self.call.captured[position].shape)
                raise ModIndexError(
                    f"{mod} reads captured tensor {position}, shape {shape}, outside of it",
                    operation="captured[...]",
                    hint="An index lies in -N..N-1: clamp it, or mask these pairs.",
                )
        self.outside.clear()
