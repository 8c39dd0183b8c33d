"""Compiles forward for a Blackwell GPU that needn't be there; `test_compiled_blackwell` runs this.

Prints one line of JSON per kernel: registers per thread, warps, bytes of spills, accesses to local
memory within the groups' loops over keys, shared and tensor memory, and number of instructions by
kind.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from compiling_forward import functions_of, spec_of
from scripts_beside import SOAK
from triton.backends.compiler import GPUTarget
from with_ptxas import compiled, compiling, sass_of, spills_of

from anyflex_cuda.blackwell_call import program_for, tiles_for
from anyflex_cuda.gluon_kernels import GluonPrograms
from anyflex_triton.building import Mods, write_source

BLACKWELL = GPUTarget("cuda", 100, 32)
KINDS = {
    "products": "tcgen05.mma", "commits": "tcgen05.commit", "reads": "tcgen05.ld",
    "writes": "tcgen05.st", "loads": "cp.async.bulk.tensor.4d.shared",
    "stores": "cp.async.bulk.tensor.4d.global",
}  # fmt: skip


def facts_of(name: str, dim: int, dtype: torch.dtype, even: bool, rest: bool) -> dict[str, Any]:
    """Compile the kernel of a class of calls, and return facts about its code."""
    spec = spec_of(name, dim, dtype)
    source = write_source(spec)
    made = GluonPrograms(spec, source)
    functions = functions_of(spec, source, even)
    mods = Mods.of(None, functions)
    wanted = {"WANT_LSE": True, "WANT_MAX": rest, "WANT_REST": rest}
    program = program_for(made, tiles_for(spec), mods, even, wanted)
    found, told = compiled(program, BLACKWELL)
    registers = re.search(r"Used (\d+) registers", told)
    loops = loops_of(sass_of(found))
    return {
        "registers": int(registers[1]) if registers else None,
        "warps": found.metadata.num_warps,
        "spills": spills_of(told),
        "loops": len(loops),
        "local": max(loop.count("LDL") + loop.count("STL") for loop in loops),
        "shared": found.metadata.shared,
        "tensor": found.metadata.tmem_size,
        **{kind: found.asm["ptx"].count(text) for kind, text in KINDS.items()},
    }


def loops_of(sass: str) -> list[str]:
    """Return the innermost loops that read tensor memory and turn all of it into weights."""
    lines = sass.splitlines()
    labels = {
        line.split(":")[0].strip(): i for i, line in enumerate(lines) if line.startswith(".L")
    }
    found = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA[^`]*`\((\.L_x_\d+)\)", line)
        begin = labels.get(jump[1], i) if jump else i
        text = lines[begin:i]
        exponentials = sum("MUFU.EX2" in x for x in text)
        # Loops with fewer exponentials handle non-finite values; code that stores out is behind
        # the loop.
        if exponentials > 100 and any("LDTM" in x for x in text) and "UTMASTG" not in str(text):
            found.append((begin, i))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return ["\n".join(lines[begin : end + 1]) for begin, end in inner]


def main() -> int:
    cases = [("documents", 128, torch.float16, False, True)]
    if SOAK:
        cases += [
            ("full", 64, torch.bfloat16, True, False),
            ("causal", 128, torch.float16, True, True),
            ("full", 128, torch.bfloat16, True, False),
            ("alibi", 64, torch.bfloat16, True, False),
        ]
    with compiling():
        for name, dim, dtype, even, rest in cases:
            found = facts_of(name, dim, dtype, even, rest)
            print(json.dumps({"name": f"{name} {dim}", **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
