"""Compiles decoding for a Hopper GPU that needn't be there; `test_compiled_decode` runs this.

Prints a line of JSON a kernel, as `compiling_forward`, with the copies by TMA of one step, and the
instructions of the loop over a unit's steps.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from compiling import HOPPER
from compiling_forward import BINARIES, loops_of, spec_of

from anyflex.plugin import Spec
from anyflex_cuda.decode_call import DecodeTiles, decode_program, decode_tiles
from anyflex_cuda.decode_steps import ALL, EACH, NONE
from anyflex_cuda.gluon_mods import gluon_source
from anyflex_cuda.gluon_programs import GluonPrograms
from anyflex_triton.mods import source_for, write_source
from anyflex_triton.module_files import load_module


def compiled_decode(spec: Spec, tiles: DecodeTiles, plan: int, even: bool) -> Any:
    """What Triton makes of a class of calls."""
    source = write_source(spec)
    made = GluonPrograms(spec, source, {})
    functions = vars(
        load_module(source_for(gluon_source(source), within=even, coarse=True, sums="floats"))
    )
    program = decode_program(
        made, tiles, plan, None, functions.get("score_mod"), functions.get("mask_mod"), even
    )
    return triton.compile(program.source(), target=HOPPER, options=program.options.keywords())


def facts_of(spec: Spec, tiles: DecodeTiles, plan: int, even: bool) -> dict[str, Any]:
    """Compile, and read what became of it."""
    compiled = compiled_decode(spec, tiles, plan, even)
    ptx_text = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(ptx_text)
        cubin.write_bytes(compiled.asm["cubin"])
        # Newer Tritons write text for the newer of the two.
        for tool in ("ptxas", "ptxas-blackwell"):
            done = subprocess.run(
                [BINARIES / tool, "-v", "--gpu-name=sm_90a", ptx, "-o", "/dev/null"],
                capture_output=True, text=True, check=tool != "ptxas",
            )  # fmt: skip
            if done.returncode == 0:
                break
        told = done.stderr
        sass = subprocess.run(
            [BINARIES / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
    if "SASS" in os.environ:
        Path(os.environ["SASS"]).write_text(sass)
        Path(os.environ["SASS"] + ".ptx").write_text(ptx_text)
    stores = re.search(r"(\d+) bytes spill stores", told)
    registers = re.search(r"\.maxnreg (\d+)", ptx_text)
    (loop,) = loops_of(sass)
    return {
        "spills": int(stores[1]) if stores else 0,
        "serialized": sorted(set(re.findall(r"C75\d\d", told))),
        "shared": compiled.metadata.shared,
        "registers": int(registers[1]) if registers else 0,
        "local": loop.count("LDL") + loop.count("STL"),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", loop, re.MULTILINE)),
        "products": loop.count("HGMMA"),
        "exponentials": loop.count("MUFU.EX2"),
        "barriers": loop.count("BAR.SYNC"),
        "loads": len(re.findall(r"UTMALDG", sass)),
    }


def main() -> int:
    none, one, each = (plan.value for plan in (NONE, ALL, EACH))
    cases = [
        ("full", 128, none, True), ("full", 128, none, False), ("causal", 128, one, False),
        ("documents", 128, each, True), ("alibi", 128, each, False), ("softcap", 128, one, True),
        ("full", 64, none, True), ("window", 64, each, False), ("alibi", 64, one, True),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for name, dim, plan, even in cases:
            if len(sys.argv) > 1 and sys.argv[1] != f"{name} {dim} {plan} {even}":
                continue
            spec = spec_of(name, dim, torch.float16 if dim == 64 else torch.bfloat16)
            spec = replace(spec, gqa_ratio=4)
            found = facts_of(spec, decode_tiles(spec), plan, even)
            print(json.dumps({"name": f"{name} {dim} {plan} {even}", **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
