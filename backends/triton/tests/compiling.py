"""Compilation of generated functions with every operation for three targets, without a device.

Run as a script, without TRITON_INTERPRET, by `test_compiled_mods`. It prints a line per target and
kernel, and fails at the first that doesn't compile.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
from anyflex_triton.mods import Sums, load_module, source_for, write_source

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
GROUPS = [("f32", "f16"), ("f64", "bf16"), ("i64", "i8", "bool"), ("i32", "u8", "i16")]
"""Types whose operations share a kernel."""

POINTERS = {
    "bool": "*i8", "u8": "*u8", "i8": "*i8", "i16": "*i16", "i32": "*i32", "i64": "*i64",
    "f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "f64": "*fp64",
}  # fmt: skip


@triton.jit
def on_a_tile(
    scores, grads, out, b, h, first_q, first_k, tables, ints, floats, totals,
    SCORE: tl.constexpr, MASK: tl.constexpr, BACKWARD: tl.constexpr, CAPTURED: tl.constexpr,
):  # fmt: skip
    """Run all functions of a module on scores [16, 8], one for each thread."""
    q_idx = first_q + tl.arange(0, 16)[:, None]
    kv_idx = first_k + tl.arange(0, 8)[None, :]
    places = tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :]
    score = tl.load(scores + places)
    grad = tl.load(grads + places)
    live = q_idx >= kv_idx
    if MASK is not None:
        live = live & MASK(b, h, q_idx, kv_idx, tables, ints, floats)
    found = SCORE(score, b, h, q_idx, kv_idx, tables, ints, floats)
    tl.store(out + places, tl.where(live, found, float("-inf")))
    if BACKWARD is not None:
        slope = BACKWARD(grad, score, b, h, q_idx, kv_idx, tables, ints, floats)
        tl.store(out + 128 + places, slope)
    if CAPTURED is not None:
        CAPTURED(grad, score, live, b, h, q_idx, kv_idx, tables, ints, floats, totals)


def every_operation(names: tuple[str, ...]) -> tuple[ModGraph, tuple[CapturedFacts, ...]]:
    """Return score + each operation of each type, for two captured tensors read at q_idx and
    kv_idx."""
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
        if name == "i64":
            # y isn't read from memory, so that the rules of constants and indices are compiled as
            # well.
            y = add("mod", dtype, add("sub", dtype, 1, 2), add("const", dtype, attribute=7))
        for operation, count in OPERATIONS.items():
            if count is None or count == 0 or type_class(dtype) not in operand_classes(operation):
                continue
            if operation == "cast":
                found = [add("cast", other, x) for other in DTYPES.values()]
            else:
                operands = (condition, x, y) if count == 3 else (x, y)[:count]
                compared = operation in ("eq", "ne", "lt", "le", "gt", "ge")
                found = [add(operation, torch.bool if compared else dtype, *operands)]
            for value in found:
                total = add("add", torch.float32, total, add("cast", torch.float32, value))
    for slot, dtype in (("i0", torch.int64), ("f0", torch.float32)):
        value = add("cast", torch.float32, add("number", dtype, attribute=slot))
        total = add("mul", torch.float32, total, value)
    return ModGraph(tuple(nodes), total), tuple(captured)


MASK = "input i64 - q_idx;input i64 - kv_idx;const i64 - 3;floordiv i64 0,2 -;floordiv i64 1,2 -"
READS = (
    # The captured tensors are read by a scalar, a row, a column and a pair; the last has no
    # dimension.
    "input f32 - score;input i64 - h;input i64 - q_idx;input i64 - kv_idx;load f32 1 0;"
    "load f32 2 1;load f32 3 1;load bf16 1,2,3 2;cast f32 7 -;load f32 - 3;add f32 4,5 -;"
    "mul f32 10,6 -;add f32 11,8 -;mul f32 12,9 -;tanh f32 0 -;mul f32 13,14 -;=15"
)


def specs() -> list[tuple[str, Spec]]:
    made = []
    mask = parse_graph(f"{MASK};le bool 4,3 -;=5")
    for names in GROUPS:
        score, captured = every_operation(names)
        made.append((" ".join(names), score, captured))
    f32, bf16 = torch.float32, torch.bfloat16
    facts = tuple(CapturedFacts(*fact, True) for fact in ((f32, 1), (f32, 1), (bf16, 3), (f32, 0)))
    made.append(("reads", parse_graph(READS), facts))
    return [
        (
            name,
            Spec(
                "cuda", "sm_90", torch.float32, 64, 64, score_graph=score, mask_graph=mask,
                captured=captured, gradients=("q",),
            ),
        )
        for name, score, captured in made
    ]  # fmt: skip


def source(spec: Spec, sums: Sums) -> ASTSource:
    """Return the kernel with the functions of a spec."""
    module = load_module(source_for(write_source(spec), within=False, coarse=False, sums=sums))
    names = {torch_type: name for name, torch_type in DTYPES.items()}
    learned = [facts for facts in spec.captured if facts.needs_grad]
    signature = dict.fromkeys(("scores", "grads", "out"), "*fp32")
    signature |= dict.fromkeys(("b", "h", "first_q", "first_k"), "i32")
    signature |= {
        "tables": tuple(POINTERS[names[facts.dtype]] for facts in spec.captured),
        "ints": ("i64",) * (2 * sum(facts.rank for facts in spec.captured) + 1),
        "floats": ("fp32",),
        "totals": (
            *("*fp64" if facts.dtype is torch.float64 else "*fp32" for facts in learned),
            *(() if sums == "floats" else (p for p in ("*i64", "*i32", "*i64") for _ in learned)),
        ),
    }
    functions = {
        "SCORE": module.score_mod,
        "MASK": module.mask_mod,
        "BACKWARD": getattr(module, "score_mod_backward", None),
        "CAPTURED": getattr(module, "captured_gradients", None),
    }
    signature |= dict.fromkeys(functions, "constexpr")
    return ASTSource(on_a_tile, signature, constexprs=functions)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        each: list[tuple[str, Spec, Sums]] = [(name, spec, "floats") for name, spec in specs()]
        name, spec, _ = each[-1]
        each += [(f"{name}, bounds", spec, "bounds"), (f"{name}, integers", spec, "integers")]
        for name, spec, sums in each:
            for target_name, target in TARGETS.items():
                start = time.perf_counter()
                compiled = triton.compile(source(spec, sums), target=target)
                seconds = time.perf_counter() - start
                binary = compiled.asm["hsaco" if target.backend == "hip" else "cubin"]
                print(f"{target_name} {name}: {len(binary)} bytes, {seconds:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
