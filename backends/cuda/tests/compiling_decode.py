"""Compiles decoding for a Hopper GPU that needn't be there; `test_compiled_decode` runs this.

Prints one line of JSON per kernel, as `compiling_forward` does, with the number of TMA loads and
of instructions of the loop over a unit's steps; then one for each kernel of packed calls, and for
each that a call with a mask launches.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from compiling_forward import loops_of, spec_of
from recording import OnHopper, recording
from scripts_beside import SOAK
from torch import Tensor
from with_ptxas import compiled, compiling, sass_of, spills_of

import anyflex
from anyflex.plugin import Spec, isolated, register
from anyflex_cuda.decode_call import DecodeTiles, decode_program, decode_tiles
from anyflex_cuda.decode_steps import ALL, EACH, NONE
from anyflex_cuda.gluon_kernels import GluonPrograms, gluon_source
from anyflex_triton.building import Mods, Program, load_module, source_for, write_source


def decode_of(
    spec: Spec, tiles: DecodeTiles, plan: int, within: bool, adds: bool = True, rows: int = 64
) -> Program:
    """Return the program of a class of calls, whose tiles have `rows` query rows."""
    source = write_source(spec)
    made = GluonPrograms(spec, source)
    functions = vars(
        load_module(source_for(gluon_source(source), within=within, coarse=True, sums="floats"))
    )
    mods = Mods.of(None, functions)
    wanted = {"WANT_LSE": True, "WANT_MAX": False, "WANT_REST": False}
    is_packed = spec.q_layout == "packed"
    return decode_program(made, tiles, plan, mods, adds, 8, wanted, is_packed, rows)


def facts_of(
    spec: Spec, tiles: DecodeTiles, plan: int, within: bool, adds: bool
) -> dict[str, Any]:
    """Compile the kernel of a class of calls, and return facts about its code."""
    made, told = compiled(decode_of(spec, tiles, plan, within, adds))
    sass, ptx = sass_of(made), made.asm["ptx"]
    registers = re.search(r"\.maxnreg (\d+)", ptx)
    (loop,) = loops_of(sass)
    return {
        "spills": spills_of(told),
        "serialized": sorted(set(re.findall(r"C75\d\d", told))),
        "shared": made.metadata.shared,
        "registers": int(registers[1]) if registers else 0,
        "local": loop.count("LDL") + loop.count("STL"),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", loop, re.MULTILINE)),
        "products": loop.count("HGMMA"),
        "barriers": loop.count("BAR.SYNC"),
        "loads": len(re.findall(r"UTMALDG", sass)),
        "atomics": re.findall(r"\b(?:atom|red)\.\S+", ptx),
        # Number of loads that bypass L1, by width.
        "past_first_cache": [
            len(re.findall(rf"ld\.global\.cg\.{kind}", ptx)) for kind in ("v4.b32", "b32")
        ],
    }


def packed_facts(spec: Spec, page: int, plan: int, adds: bool) -> dict[str, Any]:
    """Compile the kernel of packed calls, whose loops have loops within."""
    layout: Any = "paged" if page else "packed"
    spec = replace(spec, q_layout="packed", kv_layout=layout, page_size=page, q_class="one")
    made, told = compiled(decode_of(spec, decode_tiles(spec), plan, False, adds))
    sass = sass_of(made)
    return {
        "spills": spills_of(told),
        "serialized": sorted(set(re.findall(r"C75\d\d", told))),
        "shared": made.metadata.shared,
        "local": sass.count("LDL") + sass.count("STL"),
        "loads": len(re.findall(r"UTMALDG", sass)),
    }


def stored_facts(spec: Spec, page: int, plan: int, rows: int) -> dict[str, Any]:
    """Compile the kernel of packed calls whose keys are stored in 8 bits, and return facts about
    its loop over a unit's steps."""
    layout: Any = "paged" if page else "packed"
    spec = replace(spec, q_layout="packed", kv_layout=layout, page_size=page, q_class="one")
    made, told = compiled(decode_of(spec, decode_tiles(spec), plan, False, True, rows))
    # The loops that look for non-finite values have products too, in the queries' type.
    (loop,) = (
        text
        for text in loops_of(sass_of(made), "HMMA")
        if "HMMA.16816.F32 " in text and "SYNCS" in text and "BF16" not in text
    )
    return {
        "spills": spills_of(told),
        "shared": made.metadata.shared,
        "local": loop.count("LDL") + loop.count("STL"),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", loop, re.MULTILINE)),
        "products": loop.count("HMMA"),
        "conversions": loop.count("HADD2") + loop.count("UNPACK_B"),
        "wide_loads": loop.count("LDS.128"),
    }


def launched() -> Iterator[dict[str, Any]]:
    """Compile all kernels of a call with a mask and more rows than one program adds up."""
    q, k, v = (torch.zeros(2, h, n, 128).bfloat16() for h, n in ((64, 1), (1, 9000), (1, 9000)))

    def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < 100 + 100 * b

    mask = anyflex.create_block_mask(documents, 2, None, 1, 9000)
    with isolated():
        register("cuda", OnHopper)
        with recording() as launches:
            anyflex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, backend="cuda")
    for program, grid, _ in launches:
        _, told = compiled(program)
        yield {
            "name": program.function.__name__,
            "grid": grid,
            "spills": spills_of(told),
        }


def main() -> int:
    none, one, each = (plan.value for plan in (NONE, ALL, EACH))
    cases = [("documents", 128, each, True, True)]
    if SOAK:
        cases += [
            ("full", 128, none, True, False), ("full", 128, none, True, True),
            ("softcap", 128, one, True, True),
            ("window", 64, each, False, True),
            ("causal", 128, one, False, True), ("alibi", 128, each, False, True),
            ("full", 64, none, True, True), ("documents", 64, each, False, False),
        ]  # fmt: skip
    with compiling():
        for name, dim, plan, within, adds in cases:
            spec = spec_of(name, dim, torch.float16 if dim == 64 else torch.bfloat16)
            spec = replace(spec, gqa_ratio=4)
            found = facts_of(spec, decode_tiles(spec), plan, within, adds)
            name = f"{name} {dim} {plan} {within} {adds}"
            print(json.dumps({"name": name, "adds": adds, **found}), flush=True)
        packed = [("full", 128, 64, none, True)]
        if SOAK:
            packed += [
                ("documents", 128, 16, each, False), ("full", 128, 16, none, True),
                ("softcap", 128, 0, none, True),
                ("full", 128, 256, none, False), ("full", 64, 48, none, True),
                ("documents", 64, 64, each, True), ("full", 64, 0, none, False),
                ("alibi", 128, 32, none, True),
            ]  # fmt: skip
        for name, dim, page, plan, adds in packed:
            spec = replace(spec_of(name, dim, torch.bfloat16), gqa_ratio=4)
            facts = packed_facts(spec, page, plan, adds)
            print(
                json.dumps({"name": name, "dim": dim, "page": page, "plan": plan, **facts}),
                flush=True,
            )
        stored = [("full", "int8", 64, none, 16)]
        if SOAK:
            stored += [
                ("full", "fp8_e4m3", 16, none, 16), ("softcap", "int8", 0, none, 32),
                ("documents", "fp8_e4m3", 48, each, 16), ("full", "fp8_e4m3", 256, none, 32),
            ]  # fmt: skip
        for name, kind, page, plan, rows in stored:
            spec = replace(spec_of(name, 128, torch.bfloat16), gqa_ratio=4, kv_storage=kind)
            facts = stored_facts(spec, page, plan, rows)
            print(json.dumps({"stored": kind, "name": name, "rows": rows, **facts}), flush=True)
        for found in launched():
            print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
