"""Generated text of a spec's mods: functions in Metal, and the parameters that they share.

A kernel's source is a header, `mods_source`, and the kernel. Each function takes the captured
tensors ``t0``, ``t1``, ..., then ``P``: from `lowering.MODS_AT` on, each captured tensor's sizes,
then its strides in elements, and after the last one the call's ints; then ``F``: the scale and
the call's floats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from anyflex.plugin import Derivative, Node, Scatter, Spec, differentiate, simplify
from anyflex_mps.lowering import ARGUMENTS, HELD, METAL, ModProgram, dependences
from anyflex_mps.operations import EXACT_WORDS, functions_for

__all__ = [
    "Sums",
    "captured_arguments",
    "captured_buffers",
    "captured_parameters",
    "changes_gradients",
    "mods_source",
    "row_sum_count",
    "sums_by_key",
    "total_arguments",
    "total_buffers",
    "total_parameters",
]

Sums = Literal["floats", "bounds", "integers"]
"""Numbers that captured tensors' gradients add up: floats, by atomic additions whose order decides
the rounding; or integers, whose sum is the same in any order. These take two passes: "bounds"
measures and counts the additions of each element, "integers" adds multiples of a power of two that
is as small as these allow. The element's words (`operations.EXACT_WORDS`) begin as 0;
``op_exact_sum`` returns the number that they stand for, and the float total is to be added: it
holds the sum of non-finite additions."""

_INDICES = ", ".join(f"{type_} {name}" for name, type_ in ARGUMENTS.items())


# Parameters

_STORED = {**HELD, torch.bool: "uchar", torch.float16: "half", torch.bfloat16: "bfloat"}
"""Element type of a captured tensor."""


def captured_buffers(spec: Spec) -> tuple[str, ...]:
    """Return a kernel's parameters for the captured tensors, in order, without attributes."""
    return tuple(
        f"device const {_STORED[facts.dtype]}* t{i}" for i, facts in enumerate(spec.captured)
    )


def total_buffers(spec: Spec, sums: Sums = "floats") -> tuple[str, ...]:
    """Return a kernel's parameters for the accumulators of captured tensors' gradients: ``g0``,
    float32, and ``s0``, `operations.EXACT_WORDS` uints per element, of captured tensor 0. Both
    are contiguous."""
    found = []
    for i in _learned(spec):
        if sums != "bounds":
            found.append(f"device atomic_float* g{i}")
        if sums != "floats":
            found.append(f"device atomic_uint* s{i}")
    return tuple(found)


def _name(parameter: str) -> str:
    return parameter.split()[-1]


def captured_parameters(spec: Spec) -> str:
    """Return the parameters that each function ends with; begins with a comma."""
    return ", " + ", ".join([*captured_buffers(spec), "constant long* P", "constant float* F"])


def captured_arguments(spec: Spec) -> str:
    """Return the arguments for `captured_parameters`, by the parameters' names."""
    return ", " + ", ".join([*map(_name, captured_buffers(spec)), "P", "F"])


def total_parameters(spec: Spec, sums: Sums = "floats") -> str:
    """Return the parameters of ``captured_gradients`` after `captured_parameters`."""
    return "".join(f", {parameter}" for parameter in total_buffers(spec, sums))


def total_arguments(spec: Spec, sums: Sums = "floats") -> str:
    """Return the arguments for `total_parameters`, by the parameters' names."""
    return "".join(f", {_name(parameter)}" for parameter in total_buffers(spec, sums))


# Gradients


def _learned(spec: Spec) -> list[int]:
    return [i for i, facts in enumerate(spec.captured) if facts.needs_grad]


def _derivative(spec: Spec) -> Derivative:
    assert spec.score_graph is not None
    learned = frozenset(_learned(spec))
    return differentiate(simplify(spec.score_graph), wanted_captured=learned)


def changes_gradients(spec: Spec) -> bool:
    """Return whether the gradient of a score differs from that of the modified score: it is the
    same for everything that is added to a score."""
    if spec.score_graph is None:
        return False
    slope = _derivative(spec)
    if slope.score is None:
        return True
    node = slope.nodes[slope.score]
    return node.operation != "input" or node.attribute != "grad"


# The functions


def _function(head: str, parameters: str, lines: Sequence[str]) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"static inline {head}({parameters}) {{\n{body}}}\n"


def _mod_function(
    spec: Spec, name: str, nodes: Sequence[Node], output: int | None, given: str, type_: str
) -> str:
    """Return the text of a mod.

    Args:
        output: position of its result; None is 0.
        given: parameters before the indices.
    """
    program = ModProgram.of(spec, nodes)
    result = "0.0f"
    if output is not None:
        result = program.cast(METAL.lower(nodes, program, [output])[output], type_)
    parameters = f"{given}{_INDICES}{captured_parameters(spec)}"
    return _function(f"{type_} {name}", parameters, [*program.lines, f"return {result};"])


def _offset(program: ModProgram, scatter: Scatter, values: dict[int, str]) -> str:
    """Emit the place of an addition in its contiguous accumulator."""
    first = program.first_size[scatter.captured]
    offset = "0L"
    for axis, position in enumerate(scatter.indices):
        place = program.place(scatter.captured, axis, position, values[position])
        text = f"(long){place}" if axis == 0 else f"{offset} * P[{first + axis}] + (long){place}"
        offset = program.emit(text, "long")
    return offset


def _add(
    spec: Spec,
    program: ModProgram,
    scatter: Scatter,
    values: dict[int, str],
    value: str,
    sums: Sums,
    conditions: Sequence[str],
) -> None:
    """Emit an addition to a captured tensor's accumulator on some conditions."""
    i = scatter.captured
    offset = _offset(program, scatter, values)
    total, words = f"g{i} + {offset}", f"s{i} + {EXACT_WORDS} * {offset}"
    call = {
        "floats": f"op_add_float({total}, {value})",
        "bounds": f"op_bound_addition({words}, {value})",
        "integers": f"op_add_exactly({words}, {total}, {value})",
    }[sums]
    conditions = [*conditions, *program.nonempty(i, len(scatter.indices))]
    if conditions:
        program.lines += [f"if ({' && '.join(conditions)}) {{", f"  {call};", "}"]
    else:
        program.lines.append(f"{call};")


def _scatters(derivative: Derivative) -> Iterator[tuple[Scatter, frozenset[str]]]:
    """Yield each addition, with what its place depends on."""
    nodes = derivative.nodes
    needs = dependences(nodes)
    for scatter in derivative.scatters:
        yield scatter, frozenset().union(*(needs[nodes[index]] for index in scatter.indices))


def _by_row(derivative: Derivative) -> list[Scatter]:
    """Return the additions whose place neither the key nor the score decides."""
    return [scatter for scatter, needed in _scatters(derivative) if needed <= {"q_idx"}]


def _by_key(derivative: Derivative) -> list[Scatter]:
    """Return the additions whose place the key decides, and neither the row nor the score."""
    return [scatter for scatter, needed in _scatters(derivative) if needed == {"kv_idx"}]


def _captured_gradients(
    spec: Spec, derivative: Derivative, sums: Sums, by_row: bool, by_key: bool
) -> str:
    nodes, rows = derivative.nodes, _by_row(derivative) if by_row else []
    keys = _by_key(derivative) if by_key else []
    program = ModProgram.of(spec, nodes)
    wanted = [scatter.value for scatter in derivative.scatters]
    wanted += [index for s in derivative.scatters if s not in rows for index in s.indices]
    values = METAL.lower(nodes, program, wanted)
    for scatter in derivative.scatters:
        value = program.cast(values[scatter.value], "float")
        if scatter in rows:
            program.lines.append(f"row_sums[{rows.index(scatter)}] += live ? {value} : 0.0f;")
        elif scatter in keys:
            total = program.emit(f"op_sum_of_rows(live ? {value} : 0.0f)", "float")
            _add(spec, program, scatter, values, total, sums, ["adds"])
        else:
            _add(spec, program, scatter, values, value, sums, ["live"])
    parameters = f"float grad, float score, bool live, {_INDICES}"
    parameters += captured_parameters(spec) + total_parameters(spec, sums)
    parameters += ", bool adds" if keys else ""
    parameters += ", thread float* row_sums" if by_row else ""
    text = _function("void captured_gradients", parameters, program.lines)
    return f"{text}\n{_row_gradients(spec, derivative, sums)}" if by_row else text


def _row_gradients(spec: Spec, derivative: Derivative, sums: Sums) -> str:
    rows, program = _by_row(derivative), ModProgram.of(spec, derivative.nodes)
    wanted = [index for scatter in rows for index in scatter.indices]
    values = METAL.lower(derivative.nodes, program, wanted)
    for place, scatter in enumerate(rows):
        _add(spec, program, scatter, values, f"row_sums[{place}]", sums, [])
    parameters = f"int b, int h, int q_idx{captured_parameters(spec)}"
    parameters += f"{total_parameters(spec, sums)}, thread const float* row_sums"
    return _function("void captured_row_gradients", parameters, program.lines)


def row_sum_count(spec: Spec) -> int:
    """Return the number of sums that ``captured_row_gradients`` takes."""
    return len(_by_row(_derivative(spec))) if spec.score_graph is not None else 0


def sums_by_key(spec: Spec) -> bool:
    """Return whether ``captured_gradients`` has additions that it sums over rows first."""
    return spec.score_graph is not None and bool(_by_key(_derivative(spec)))


def mods_source(
    spec: Spec,
    body: str,
    *,
    sums: Sums = "floats",
    by_row: bool = False,
    by_key: bool = False,
) -> str:
    """Return the text of those of the functions below that `spec` has and `body`, a kernel's
    statements, calls, after the functions of `operations` that they call. ``CAPTURED`` stands for
    `captured_parameters`, ``TOTALS`` for `total_parameters`.

    ``float score_mod(float score, int b, int h, int q_idx, int kv_idx CAPTURED)``
        Returns the new score.
    ``bool mask_mod(int b, int h, int q_idx, int kv_idx CAPTURED)``
        Returns whether the pair is live.
    ``float score_mod_backward(float grad, float score, int b, ... CAPTURED)``
        Returns the gradient of the incoming score. Absent where it equals ``grad``.
    ``void captured_gradients(float grad, float score, bool live, int b, ... CAPTURED TOTALS)``
        Adds a live pair's gradients of the captured tensors to their accumulators. Where `by_key`
        and `sums_by_key`, ``bool adds`` follows: all lanes call it with the places that an 8x8
        fragment gives them, and what belongs to a key as a whole is summed over the fragment's
        rows and added by the lanes that say so, which are those of one row. Where `by_row`,
        ``thread float* row_sums`` follows: `row_sum_count` numbers, 0 at first, to which it adds
        what belongs to the row as a whole.
    ``void captured_row_gradients(int b, int h, int q_idx CAPTURED TOTALS, ... row_sums)``
        Adds the sums of a row, or of a part of it, to the accumulators. Present where `by_row`: a
        kernel that walks along rows makes one atomic addition a row, and not one a pair.
    """
    functions, called = [], set(re.findall(r"\w+(?=\()", body))
    if spec.score_graph is not None and "score_mod" in called:
        graph = simplify(spec.score_graph)
        functions.append(
            _mod_function(spec, "score_mod", graph.nodes, graph.output, "float score, ", "float")
        )
    if called & {"score_mod_backward", "captured_gradients"}:
        slope, given = _derivative(spec), "float grad, float score, "
        if "score_mod_backward" in called:
            functions.append(
                _mod_function(spec, "score_mod_backward", slope.nodes, slope.score, given, "float")
            )
        if "captured_gradients" in called:
            functions.append(_captured_gradients(spec, slope, sums, by_row, by_key))
    if spec.mask_graph is not None and "mask_mod" in called:
        graph = simplify(spec.mask_graph)
        functions.append(_mod_function(spec, "mask_mod", graph.nodes, graph.output, "", "bool"))
    text = "\n".join(functions)
    operations = functions_for(text)
    return f"{operations}\n{text}" if operations else text
