"""Kernels of tests: mod graphs on lists of pairs, one thread a pair, in the Metal emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from emulator import Numerics, compile_shader
from torch import Tensor

from anyflex.plugin import CapturedFacts, ModGraph, Node, Spec
from anyflex_mps.lowering import METAL, MODS_AT, ModProgram
from anyflex_mps.mods import (
    Sums,
    captured_arguments,
    captured_buffers,
    changes_gradients,
    mods_source,
    row_sum_count,
    total_arguments,
    total_buffers,
)
from anyflex_mps.operations import EXACT_WORDS, functions_for

__all__ = ["HEADER", "ModCase", "exact_sums", "source_of_nodes", "spec_of", "values_of_nodes"]

HEADER = """\
#include <metal_stdlib>
using namespace metal;
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

"""
GROUP = 64


def spec_of(
    score: ModGraph | None = None,
    mask: ModGraph | None = None,
    captured: Sequence[Tensor] = (),
    learned: Sequence[int] = (),
) -> Spec:
    return Spec(
        "mps",
        "apple9",
        torch.float32,
        64,
        64,
        score_graph=score,
        mask_graph=mask,
        captured=tuple(
            CapturedFacts(tensor.dtype, tensor.dim(), i in learned)
            for i, tensor in enumerate(captured)
        ),
        gradients=("q",),
    )


def numbers_of(captured: Sequence[Tensor], ints: Sequence[int]) -> list[int]:
    """Return P, of which the kernels here own the first entry alone."""
    found = [0] * MODS_AT
    for tensor in captured:
        found += [*tensor.shape, *tensor.stride()]
    return [*found, *ints]


def _kernel(name: str, buffers: Sequence[str], lines: Sequence[str]) -> str:
    parameters = [
        f"    {buffer} [[buffer({i})]]"
        for i, buffer in enumerate([*buffers, "constant long* P", "constant float* F"])
    ]
    parameters.append("    uint thread_at [[thread_position_in_grid]]")
    listed = ",\n".join(parameters)
    body = "".join(f"  {line}\n" for line in lines)
    # Groups are whole, so that the last one reaches beyond the pairs.
    first = "  const int at = (int)thread_at;\n  if (at >= (int)P[0]) {\n    return;\n  }\n"
    return f"kernel void {name}(\n{listed}) {{\n{first}{body}}}\n"


def _launched(
    kernel: Any, count: int, tensors: Sequence[Tensor], ints: list[int], floats: Sequence[float]
) -> None:
    ints = [count, *ints[1:]]
    kernel(*tensors, ints, [1.0, *floats], threads=-(-count // GROUP) * GROUP, group_size=GROUP)


def source_of_nodes(
    nodes: Sequence[Node], wanted: Sequence[int], captured: Sequence[Tensor], count: int
) -> str:
    """Return the source of a kernel ``values`` that stores the nodes at `wanted` for each pair:
    floats as float, all others as long."""
    spec = spec_of(captured=captured)
    program = ModProgram.of(spec, nodes)
    values = METAL.lower(nodes, program, wanted)
    lines = ["const int q_idx = at;", "const int kv_idx = columns[at];", *program.lines]
    for slot, position in enumerate(wanted):
        real = nodes[position].dtype.is_floating_point
        out, type_ = ("reals", "float") if real else ("wholes", "long")
        lines.append(f"{out}[at + {slot * count}] = ({type_}){values[position]};")
    buffers = ["device float* reals", "device long* wholes", "device const int* columns"]
    kernel = _kernel("values", [*buffers, *captured_buffers(spec)], lines)
    return f"{HEADER}{functions_for(kernel)}\n{kernel}"


def values_of_nodes(
    nodes: Sequence[Node],
    wanted: Sequence[int],
    captured: Sequence[Tensor],
    *,
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    kv_idx: Tensor,
    numerics: Numerics | None = None,
) -> list[Tensor]:
    """Return the values of the nodes at `wanted` for each pair (i, kv_idx[i]) of head 0: float32
    for floats, int64 for integers and bools."""
    count = len(kv_idx)
    source = source_of_nodes(nodes, wanted, captured, count)
    reals = torch.full((len(wanted), count), torch.nan)
    wholes = torch.full((len(wanted), count), -77, dtype=torch.int64)
    tensors = [reals, wholes, kv_idx.int(), *captured]
    kernel = compile_shader(source, race=True, numerics=numerics).values
    _launched(kernel, count, tensors, numbers_of(captured, ints), floats)
    return [
        (reals if nodes[position].dtype.is_floating_point else wholes)[slot]
        for slot, position in enumerate(wanted)
    ]


class ModCase:
    """Spec with a list of pairs to run its mods on.

    Args:
        in_row: number of pairs that follow each other with the same b, h and q_idx: a thread takes
            them one after the other, and adds their row's sums where there are several.
    """

    def __init__(
        self,
        inputs: dict[str, Tensor],
        score: ModGraph | None = None,
        mask: ModGraph | None = None,
        captured: Sequence[Tensor] = (),
        learned: Sequence[int] = (),
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        *,
        in_row: int = 1,
    ) -> None:
        self.inputs = inputs
        self.captured, self.ints, self.floats = tuple(captured), tuple(ints), tuple(floats)
        self.learned = sorted(learned)
        self.spec = spec_of(score, mask, captured, self.learned)
        self.count = len(inputs["score"])
        self.live = inputs.get("live", torch.ones(self.count, dtype=torch.bool))
        self.in_row = in_row
        self._kernels: dict[Sums, Any] = {}

    def _kernel(self, sums: Sums) -> Any:
        if sums not in self._kernels:
            self._kernels[sums] = compile_shader(self.source(sums), race=True).pairs
        return self._kernels[sums]

    def source(self, sums: Sums) -> str:
        spec, by_row = self.spec, self.in_row > 1
        columns = [f"places[pair + {i * self.count}]" for i in range(4)]
        call, totals = ", ".join(columns) + captured_arguments(spec), total_arguments(spec, sums)
        lines = [
            f"for (int pair = at * {self.in_row}; pair < (at + 1) * {self.in_row}; pair++) {{"
        ]
        if spec.score_graph is not None:
            lines.append(f"out[pair] = score_mod(scores[pair], {call});")
        if spec.mask_graph is not None:
            lines.append(f"out[pair + {self.count}] = mask_mod({call}) ? 1.0f : 0.0f;")
        if spec.score_graph is not None:
            slope = f"score_mod_backward(grads[pair], scores[pair], {call})"
            slope = slope if changes_gradients(spec) else "grads[pair]"
            lines.append(f"out[pair + {2 * self.count}] = {slope};")
        sums_given = ", row_sums" if by_row else ""
        if self.learned:
            given = f"grads[pair], scores[pair], lives[pair] != 0, {call}"
            lines.append(f"captured_gradients({given}{totals}{sums_given});")
        lines.append("}")
        if by_row:
            count = max(row_sum_count(spec), 1)
            lines.insert(0, f"float row_sums[{count}] = {{{', '.join(['0.0f'] * count)}}};")
            first = ", ".join(columns[:3]).replace("pair", f"at * {self.in_row}")
            given = f"{first}{captured_arguments(spec)}{totals}, row_sums"
            lines.append(f"captured_row_gradients({given});")
        buffers = ["device float* out", "device const float* scores"]
        buffers += ["device const float* grads", "device const uchar* lives"]
        buffers += ["device const int* places"]
        buffers += [*captured_buffers(spec), *total_buffers(spec, sums)]
        source = mods_source(spec, "\n".join(lines), sums=sums, by_row=by_row)
        return f"{HEADER}{source}\n{_kernel('pairs', buffers, lines)}"

    def _run(self, sums: Sums, order: Tensor, totals: Sequence[Tensor]) -> Tensor:
        out = torch.full((3, self.count), torch.nan)
        given = [self.inputs[name][order] for name in ("score", "grad")]
        places = [self.inputs[name][order] for name in ("b", "h", "q_idx", "kv_idx")]
        tensors = [
            out,
            *(each.float() for each in given),
            self.live[order].to(torch.uint8),
            torch.stack(places).int(),
            *self.captured,
            *totals,
        ]
        numbers = numbers_of(self.captured, self.ints)
        threads = self.count // self.in_row
        _launched(self._kernel(sums), threads, tensors, numbers, self.floats)
        return out

    def run(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return scores, mask, gradients of scores, and the totals of atomic additions."""
        totals = [torch.zeros(self.captured[i].shape) for i in self.learned]
        out = self._run("floats", torch.arange(self.count), totals)
        return out[0], out[1], out[2], totals

    def exact_totals(self, order: Tensor | None = None) -> list[Tensor]:
        """Return the totals of exact sums of the pairs, added in an order."""
        order = torch.arange(self.count) if order is None else order
        shapes = [self.captured[i].shape for i in self.learned]
        totals = [torch.zeros(shape) for shape in shapes]
        words = [torch.zeros(*shape, EXACT_WORDS, dtype=torch.int32) for shape in shapes]
        self._run("bounds", order, words)
        both = [each for pair in zip(totals, words, strict=True) for each in pair]
        self._run("integers", order, both)
        for total, its_words in zip(totals, words, strict=True):
            total += exact_sums(its_words).view(total.shape)
        return totals


def exact_sums(words: Tensor) -> Tensor:
    """Return the numbers that the words of exact sums stand for."""
    buffers = ["device float* out", "device const uint* words"]
    line = f"out[at] = op_exact_sum(words + {EXACT_WORDS} * at);"
    kernel = _kernel("sums", buffers, [line])
    out = torch.full((words.numel() // EXACT_WORDS,), torch.nan)
    if out.numel():
        library = compile_shader(f"{HEADER}{functions_for(kernel)}\n{kernel}", race=True)
        _launched(library.sums, len(out), [out, words], [0], [])
    return out
