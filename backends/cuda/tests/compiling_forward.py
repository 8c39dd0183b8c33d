"""Compiles forward for a Hopper GPU that needn't be there; `test_compiled_forward` runs this.

Prints one line of JSON per kernel: bytes of spills, accesses to local memory and waits of
warpgroups within the loops over keys, a step's loads, shared memory, ptxas' warnings of products
that wait for each other.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from compiling import NAMED
from scripts_beside import SOAK
from with_ptxas import compiled, compiling, sass_of, spills_of

from anyflex.plugin import CapturedFacts, Spec, parse_graph
from anyflex_cuda.forward_call import Tiles, program_for, small_tiles_for, tiles_for
from anyflex_cuda.gluon_kernels import GluonPrograms, gluon_source
from anyflex_cuda.packed_forward_call import tiles_of_packed
from anyflex_triton.building import (
    Mods,
    load_module,
    mask_scores_source,
    pair_reads_source,
    source_for,
    write_source,
)

CAUSAL = NAMED["causal"][1]
MODS: dict[str, tuple[str | None, str | None, tuple[CapturedFacts, ...]]] = {
    "full": (None, None, ()),
    "causal": NAMED["causal"],
    "documents": NAMED["documents"],
    "window": NAMED["window"],
    "alibi": (NAMED["alibi"][0], CAUSAL, NAMED["alibi"][2]),
    "softcap": (NAMED["softcap"][0], CAUSAL, ()),
    "full image": (
        "input f32 - score;input i64 - b;input i64 - h;input i64 - q_idx;input i64 - kv_idx;"
        "const i64 - 64;floordiv i64 4,5 -;load bf16 1,2,3,6 0;cast f32 7 -;add f32 0,8 -;"
        "mod i64 4,5 -;load bf16 1,2,3,10 1;cast f32 11 -;add f32 9,12 -;=13",
        None, (CapturedFacts(torch.bfloat16, 4, False),) * 2,
    ),
    "full dense": (
        "input f32 - score;input i64 - q_idx;input i64 - kv_idx;load bf16 1,2 0;cast f32 3 -;"
        "add f32 0,4 -;=5",
        None, (CapturedFacts(torch.bfloat16, 2, False),),
    ),
    "dense": (
        "input f32 - score;input i64 - h;input i64 - q_idx;input i64 - kv_idx;load f32 1,2,3 0;"
        "add f32 0,4 -;=5",
        CAUSAL, (CapturedFacts(torch.float32, 3, False),),
    ),
    "distances": (
        "input f32 - score;input i64 - h;input i64 - q_idx;input i64 - kv_idx;sub i64 3,2 -;"
        "const i64 - 4096;add i64 4,5 -;load f32 1,6 0;add f32 0,7 -;=8",
        CAUSAL, (CapturedFacts(torch.float32, 2, False),),
    ),
    "distances twice": (
        "input f32 - score;input i64 - h;input i64 - q_idx;input i64 - kv_idx;sub i64 3,2 -;"
        "const i64 - 4096;add i64 4,5 -;load f32 1,6 0;mul f32 0,7 -;sub i64 2,3 -;add i64 9,5 -;"
        "load f32 1,10 1;add f32 8,11 -;=12",
        CAUSAL, (CapturedFacts(torch.float32, 2, False),) * 2,
    ),
}  # fmt: skip


def spec_of(name: str, dim: int, dtype: torch.dtype = torch.bfloat16, block: int = 128) -> Spec:
    score, mask, captured = MODS[name]
    return Spec(
        "cuda", "sm_90", dtype, dim, dim,
        score_graph=parse_graph(score) if score else None,
        mask_graph=parse_graph(mask) if mask else None,
        captured=tuple(replace(facts, needs_grad=False) for facts in captured),
        mask_kind="runs" if mask else "none", block_size=(block, 128) if mask else (0, 0),
    )  # fmt: skip


def packed_spec_of(name: str, dim: int, page: int) -> Spec:
    """Return the spec of packed queries whose keys are in pages, or packed where `page` is 0."""
    layout: Any = "paged" if page else "packed"
    spec = replace(spec_of(name, dim), gqa_ratio=4, q_layout="packed", kv_layout=layout)
    return replace(spec, page_size=page)


def functions_of(spec: Spec, source: str, even: bool) -> dict[str, Any]:
    """Return a spec's mods as kernels in Gluon call them, given the text for portable kernels."""
    text = gluon_source(source + mask_scores_source(spec) + pair_reads_source(spec))
    text = source_for(
        text, within=even, coarse=True, short=even, sums="floats", steady=even, dense=True
    )
    return vars(load_module(text))


def facts_of(spec: Spec, even: bool, rest: bool, tiles: Tiles) -> dict[str, Any]:
    """Compile the kernel of a class of calls, and return facts about its code."""
    source = write_source(spec)
    made = GluonPrograms(spec, source)
    functions = functions_of(spec, source, even)
    mods = Mods.of(None, functions)
    wanted = {"WANT_LSE": True, "WANT_MAX": False, "WANT_REST": rest}
    program = program_for(made, tiles, mods, even, wanted)
    found, told = compiled(program)
    loops = loops_of(sass_of(found))
    return {
        "spills": spills_of(told),
        "serialized": sorted(set(re.findall(r"C75\d\d", told))),
        "shared": found.metadata.shared,
        "loops": len(loops),
        "local": sum(loop.count("LDL") + loop.count("STL") for loop in loops),
        "reads": max(loop.count("LDG") for loop in loops),
        "barriers": max(loop.count("BAR.SYNC") for loop in loops),
    }


def loops_of(sass: str, product: str = "HGMMA") -> list[str]:
    """Return the innermost loops with products, of warpgroups unless `product` says others."""
    lines = sass.splitlines()
    labels = {
        line.split(":")[0].strip(): i for i, line in enumerate(lines) if line.startswith(".L")
    }
    found = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        begin = labels.get(jump[1], i) if jump else i
        if begin < i:
            found.append((begin, i))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    texts = ["\n".join(lines[begin : end + 1]) for begin, end in inner]
    return [text for text in texts if product in text]


def cases() -> Iterator[tuple[str, Spec, bool, bool, Tiles]]:
    """Yield (name, spec, even, rest, tiles): one consumer and two; where Triton isn't the pinned
    one, which is `make test-newest-triton`, three; with `SOAK`, each shape of tiles with each kind
    of mod."""
    pinned = triton.__version__.startswith("3.6.")
    calls = [("documents", 128, True, False)] if SOAK or pinned else []
    small = [("causal", 128, True, True)] if SOAK or pinned else []
    others, packed = [], []
    if SOAK or not pinned:
        others = [("softcap 64 of 192", spec_of("softcap", 64, block=192), True, False)]
    if SOAK:
        calls += [
            ("full image", 64, True, False),
            ("full", 128, False, False), ("causal", 128, True, True),
            ("softcap", 128, True, False), ("full", 64, True, False),
            ("causal", 64, True, False), ("alibi", 128, True, False),
            ("window", 64, False, True), ("causal", 256, True, False),
            ("distances", 64, False, False), ("distances", 128, True, True),
            ("full image", 128, True, True), ("full dense", 64, False, False),
            ("dense", 64, True, False),
            ("dense", 128, False, True),
        ]  # fmt: skip
        small += [("causal", 64, False, False), ("full", 256, True, True)]
        packed += [
            ("causal", 128, 64), ("causal", 128, 0), ("causal", 128, 16), ("full", 128, 256),
            ("full", 64, 0), ("documents", 128, 64), ("alibi", 64, 48), ("softcap", 128, 128),
            ("full", 96, 64),
        ]  # fmt: skip
        others += [
            (
                "causal of 192 and 128",
                replace(spec_of("causal", 192), value_head_dim=128),
                True,
                True,
            ),
            ("distances twice", spec_of("distances twice", 64, block=384), True, False),
            (
                "full dense in training",
                replace(spec_of("full dense", 128), gradients=("q", "k", "v")),
                True,
                True,
            ),
            ("softcap of 96", spec_of("softcap", 96), True, True),
            ("alibi of 96, float16", spec_of("alibi", 96, torch.float16), True, True),
            ("documents of 96", spec_of("documents", 96), False, True),
            (
                "documents of 256 and 128",
                replace(spec_of("documents", 256), value_head_dim=128),
                False,
                True,
            ),
            (
                "softcap of 192 and 96",
                replace(spec_of("softcap", 192), value_head_dim=96),
                False,
                True,
            ),
            ("full of 192", spec_of("full", 192), True, True),
            ("causal of 192", spec_of("causal", 192), False, False),
            ("causal 64 of 192", spec_of("causal", 64, block=192), True, False),
        ]
    for name, dim, even, rest in calls:
        spec = spec_of(name, dim)
        yield f"{name} {dim}", spec, even, rest, tiles_for(spec)
    for name, dim, even, rest in small:
        spec = spec_of(name, dim)
        yield f"small {name} {dim}", spec, even, rest, small_tiles_for(spec)
    for name, spec, even, rest in others:
        yield name, spec, even, rest, tiles_for(spec)
    for mod, dim, page in packed:
        spec = packed_spec_of(mod, dim, page)
        yield f"{mod} {dim}, pages of {page}", spec, False, False, tiles_of_packed(spec)


def main() -> int:
    with compiling():
        for name, spec, even, rest, tiles in cases():
            found = facts_of(spec, even, rest, tiles)
            print(json.dumps({"name": name, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
