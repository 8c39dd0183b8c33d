"""Mods as Python functions that torch's compiler traces: mod graphs written as source text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anyflex.plugin import DTYPES, Lowering, ModGraph, Node, Spec, differentiate, simplify

__all__ = ["TORCH_FLEX", "MakeMods", "load_source", "write_source"]


class Lines(list[str]):
    """The text so far, and the graph's nodes that rules look operands up in."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        super().__init__()
        self.nodes = nodes


Mod = Callable[..., Any]
MakeMods = Callable[..., tuple[Mod | None, Mod | None]]

_UNARY = (
    "neg abs floor ceil round trunc sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos "
    "tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid erf erfc"
).split()
_BINARY = "add sub mul pow minimum maximum atan2 eq ne lt le gt ge".split()
_MOST_FACTORS = 16
# An integer divided by 0 may become anything, but must not raise: the pair may be dead.
_DIVISOR = "torch.where({1} == 0, 1, {1})"


def _emit(lines: Lines, node: Node, text: str) -> str:
    """Give the text a name, on a line of its own."""
    name = f"v{len(lines)}"
    lines.append(f"{name} = {text}")
    return name


def _const(lines: Lines, node: Node, operands: Sequence[str]) -> str:
    kind = f"dtype={node.dtype}, device=h.device"
    return _emit(lines, node, f"torch.full((), {node.value!r}, {kind})")


def _number(lines: Lines, node: Node, operands: Sequence[str]) -> str:
    slot = str(node.attribute)
    table = "ints" if slot[0] == "i" else "floats"
    return _emit(lines, node, f"{table}[{slot[1:]}].to({node.dtype})")


def _load(lines: Lines, node: Node, operands: Sequence[str]) -> str:
    """-N..-1 counts from the end; then the index is clamped: nothing outside is read."""
    table = f"c{node.attribute}"
    if not operands:
        return _emit(lines, node, f"{table}[0]")
    places = []
    for axis, operand in enumerate(operands):
        index = _emit(lines, node, f"{operand}.to(torch.int64)")
        size = f"{table}.shape[{axis}]"
        wrapped = _emit(lines, node, f"torch.where({index} < 0, {index} + {size}, {index})")
        places.append(_emit(lines, node, f"{wrapped}.clamp(0, {size} - 1)"))
    return _emit(lines, node, f"{table}[{', '.join(places)}]")


def _integer_power(lines: Lines, node: Node, operands: Sequence[str]) -> str:
    """A product where the exponent is known: torch's code generators have no power of integers."""
    base, exponent = operands
    written = lines.nodes[node.arguments[1]]
    times = written.attribute if written.operation == "const" else None
    if isinstance(times, int) and 0 < times <= _MOST_FACTORS:
        return _emit(lines, node, " * ".join([base] * times))
    return _emit(lines, node, f"torch.pow({base}, {exponent})")


TORCH_FLEX: Lowering[Lines, str] = Lowering(
    "torch flex attention",
    {
        **{name: f"torch.{name}({{0}})" for name in _UNARY},
        **{name: f"torch.{name}({{0}}, {{1}})" for name in _BINARY},
        "input": "{attribute}.to({type})",
        "number": _number,
        "const": _const,
        "load": _load,
        "pow:int": _integer_power,
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
        "detach": "{0}.detach()",
    },
    emit=_emit,
    types={dtype: str(dtype) for dtype in DTYPES.values()},
)


def write_source(spec: Spec) -> str:
    """Return the text of a module with a function.

    ``make_mods(captured, ints, floats)`` returns ``(score_mod, mask_mod)``, each None where the
    spec has none. Captured tensors of rank 0 come as [1], and no dimension is 0. ``ints`` is an
    int64 and ``floats`` a float32 tensor.
    """
    names = ", ".join(f"c{position}" for position in range(len(spec.captured)))
    lines = [f"{names}, = captured"] if names else []
    for mod, arguments, graph in (
        ("score_mod", "score, b, h, q_idx, kv_idx", spec.score_graph),
        ("mask_mod", "b, h, q_idx, kv_idx", spec.mask_graph),
    ):
        if graph is None:
            lines.append(f"{mod} = None")
            continue
        graph = simplify(graph)
        body = Lines(graph.nodes)
        result = TORCH_FLEX.lower(graph.nodes, body, [graph.output])[graph.output]
        if mod == "score_mod" and _ignores_the_score(graph):
            # torch's CPU kernel computes such a mod wrongly, and the compiler of backward fails:
            # the mod reads the score in a comparison that is never true, which the compiler can't
            # know.
            text = f"torch.where(ints[0] != ints[0], score, {result})"
            result = _emit(body, graph.nodes[graph.output], text)
        lines.append(f"def {mod}({arguments}):")
        lines += [f"    {line}" for line in (*body, f"return {result}")]
    lines.append("return score_mod, mask_mod")
    return "\n".join(
        [
            "from math import inf, nan",
            "import torch",
            "",
            "",
            "def make_mods(captured, ints, floats):",
            *(f"    {line}" for line in lines),
            "",
        ]
    )


def _ignores_the_score(graph: ModGraph) -> bool:
    """Whether no gradient passes through to the score."""
    return differentiate(graph, wanted_captured=frozenset()).score is None


def load_source(text: str) -> MakeMods:
    """Return ``make_mods`` of `write_source`."""
    functions: dict[str, Any] = {}
    exec(compile(text, "<mods>", "exec"), functions)
    make_mods: MakeMods = functions["make_mods"]
    return make_mods
