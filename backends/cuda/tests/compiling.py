"""Compiles generated functions for a kernel in Gluon; no device is needed.

Run as a script by `test_gluon_mods`. It prints one line per kernel, and fails at the first that
doesn't compile.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace

import torch
import triton
from scripts_beside import SOAK
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex.plugin import (
    DTYPES,
    OPERATIONS,
    CapturedFacts,
    ModGraph,
    Node,
    Spec,
    operand_classes,
    parse_graph,
    type_class,
)
from anyflex_cuda.gluon_kernels import gluon_source
from anyflex_cuda.gluon_launch import GluonProgram
from anyflex_triton.building import (
    Options,
    Types,
    load_module,
    pointer_type,
    source_for,
    write_source,
)

HOPPER = GPUTarget("cuda", 90, 32)
GROUPS = [("f32", "f16"), ("f64", "bf16"), ("i64", "i8", "bool"), ("i32", "u8", "i16")]
"""Groups of types whose operations share a kernel."""


# fmt: off
@gluon.jit
def on_a_tile(
    scores, grads, out, b, h, first_q, first_k, tables, ints, floats, totals,
    SCORE: gl.constexpr, MASK: gl.constexpr, BACKWARD: gl.constexpr, CAPTURED: gl.constexpr,
):
    """Call all functions of a module on scores [64, 8] in the layout of wgmma's result."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16],
    )
    q_idx = gl.expand_dims(first_q + gl.arange(0, 64, layout=gl.SliceLayout(1, L)), 1)
    kv_idx = gl.expand_dims(first_k + gl.arange(0, 8, layout=gl.SliceLayout(0, L)), 0)
    places = (q_idx - first_q) * 8 + (kv_idx - first_k)
    score = gl.load(scores + places)
    grad = gl.load(grads + places)
    live = q_idx >= kv_idx
    if MASK is not None:
        live = live & MASK(b, h, q_idx, kv_idx, tables, ints, floats)
    found = score
    if SCORE is not None:
        found = SCORE(score, b, h, q_idx, kv_idx, tables, ints, floats)
    gl.store(out + places, gl.where(live, found, float("-inf")))
    if BACKWARD is not None:
        slope = BACKWARD(grad, score, b, h, q_idx, kv_idx, tables, ints, floats)
        gl.store(out + 512 + places, slope)
    if CAPTURED is not None:
        CAPTURED(grad, score, live, b, h, q_idx, kv_idx, tables, ints, floats, totals)
# fmt: on


def every_operation(names: tuple[str, ...]) -> tuple[ModGraph, tuple[CapturedFacts, ...]]:
    """Return a graph that adds to the score each operation of each type, on two captured tensors
    read at q_idx and kv_idx."""
    nodes = list(parse_graph("input f32 - score;input i64 - q_idx;input i64 - kv_idx;=0").nodes)

    def add(operation: str, dtype: torch.dtype, *arguments: int, attribute: object = None) -> int:
        nodes.append(Node(operation, dtype, arguments, attribute))  # type: ignore[arg-type]
        return len(nodes) - 1

    total, captured = 0, []
    for name in names:
        dtype = DTYPES[name]
        x = add("load", dtype, 1, attribute=len(captured))
        y = add("load", dtype, 2, attribute=len(captured) + 1)
        captured += [CapturedFacts(dtype, 1, dtype.is_floating_point)] * 2
        condition = add("lt", torch.bool, x, y)
        for operation, count in OPERATIONS.items():
            if not count or type_class(dtype) not in operand_classes(operation):
                continue
            if operation == "cast":
                found = [add("cast", other, x) for other in DTYPES.values()]
            else:
                operands = (condition, x, y) if count == 3 else (x, y)[:count]
                compared = operation in ("eq", "ne", "lt", "le", "gt", "ge")
                found = [add(operation, torch.bool if compared else dtype, *operands)]
            for value in found:
                total = add("add", torch.float32, total, add("cast", torch.float32, value))
    return ModGraph(tuple(nodes), total), tuple(captured)


NAMED = {
    # Common mods as (score graph, mask graph, captured tensors).
    "causal": (None, "input i64 - q_idx;input i64 - kv_idx;ge bool 0,1 -;=2", ()),
    "softcap": (
        "input f32 - score;number f32 - f0;truediv f32 0,1 -;tanh f32 2 -;mul f32 3,1 -;=4",
        None, (),
    ),
    "alibi": (
        "input f32 - score;input i64 - h;load f32 1 0;input i64 - kv_idx;input i64 - q_idx;"
        "sub i64 3,4 -;cast f32 5 -;mul f32 2,6 -;add f32 0,7 -;=8",
        None, (CapturedFacts(torch.float32, 1, True),),
    ),
    "documents": (
        None,
        "input i64 - q_idx;input i64 - kv_idx;load i32 0 0;load i32 1 0;eq bool 2,3 -;"
        "ge bool 0,1 -;and bool 4,5 -;=6",
        (CapturedFacts(torch.int32, 1, False),),
    ),
    "window": (
        None,
        "input i64 - q_idx;input i64 - kv_idx;sub i64 0,1 -;number i64 - i0;le bool 2,3 -;"
        "ge bool 0,1 -;and bool 4,5 -;=6",
        (),
    ),
    "constants": ("const f32 - 0.5;=0", "input i64 - h;const i64 - 3;lt bool 0,1 -;=2", ()),
    "reads": (
        # Reads of a scalar, a row, a column, a pair, and a tensor without dimensions.
        "input f32 - score;input i64 - h;input i64 - q_idx;input i64 - kv_idx;load f32 1 0;"
        "load f32 2 1;load f32 3 1;load bf16 1,2,3 2;cast f32 7 -;load f32 - 3;add f32 4,5 -;"
        "mul f32 10,6 -;add f32 11,8 -;mul f32 12,9 -;tanh f32 0 -;mul f32 13,14 -;=15",
        None,
        tuple(
            CapturedFacts(*fact, True)
            for fact in (
                (torch.float32, 1), (torch.float32, 1), (torch.bfloat16, 3), (torch.float32, 0),
            )
        ),
    ),
}  # fmt: skip


def specs() -> dict[str, Spec]:
    graphs = {
        name: (score and parse_graph(score), mask and parse_graph(mask), captured)
        for name, (score, mask, captured) in NAMED.items()
    }
    for names in GROUPS:
        score, captured = every_operation(names)
        graphs[" ".join(names)] = (score, None, captured)
    return {
        name: Spec(
            "cuda", "sm_90", torch.float32, 64, 64, score_graph=score or None,
            mask_graph=mask or None, captured=captured, gradients=("q",),
        )
        for name, (score, mask, captured) in graphs.items()
    }  # fmt: skip


def program(spec: Spec, coarse: bool = False, fast_tanh: bool = False) -> GluonProgram:
    """Return the kernel with the functions of a spec."""
    source = source_for(write_source(spec), within=False, coarse=coarse)
    text = gluon_source(source, fast_tanh)
    functions = vars(load_module(text))
    floats = [f for f in spec.captured if f.needs_grad]
    wide = [torch.float64 if f.dtype is torch.float64 else torch.float32 for f in floats]
    types: dict[str, Types] = {
        **dict.fromkeys(("scores", "grads", "out"), "*fp32"),
        **dict.fromkeys(("b", "h", "first_q", "first_k"), "i32"),
        "tables": tuple(pointer_type(facts.dtype) for facts in spec.captured),
        "ints": ("i64",) * (2 * sum(facts.rank for facts in spec.captured) + 1),
        "floats": ("fp32",),
        "totals": tuple(map(pointer_type, wide)),
    }
    constants = {
        "SCORE": functions.get("score_mod"),
        "MASK": functions.get("mask_mod"),
        "BACKWARD": functions.get("score_mod_backward"),
        "CAPTURED": functions.get("captured_gradients"),
    }
    return GluonProgram(on_a_tile, types, constants, {}, Options(4, 1))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        made_of = [(name, program(spec)) for name, spec in specs().items()]
        # 16-bit types have a soft cap function of their own.
        softcap = replace(specs()["softcap"], dtype=torch.bfloat16)
        made_of += [
            (f"softcap, fast {fast}", program(softcap, True, fast)) for fast in (False, True)
        ]
        # Reads, and half of the operations.
        for name, made in made_of if SOAK else (made_of[6], made_of[7], made_of[10]):
            compiled = triton.compile(
                made.source(), target=HOPPER, options=made.options.keywords()
            )
            print(f"{name}: {len(compiled.asm['cubin'])} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
