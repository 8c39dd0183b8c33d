"""Compiles the kernels with every configuration of the table, for devices that needn't be there.

Run as a script, without TRITON_INTERPRET, by `test_compiled_kernels`, or by hand:

    python compiling_kernels.py [--targets hopper,amd] [--types bfloat16,float32] [--dims 64,128]

Prints a line a kernel: target, architecture, type, head dim, kernel, tiles, warps, stages, bytes
of shared memory, what the target's tools say of registers, spills, and of Hopper's products, which
should not wait for each other; and its loads by descriptors.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import anyflex
from anyflex.plugin import Accepted, Decision, isolated, register
from anyflex.testing import posing
from anyflex_triton import launch
from anyflex_triton.backend import TritonBackend
from anyflex_triton.configs import Target

ARCHITECTURES: dict[Target, GPUTarget] = {
    "hopper": GPUTarget("cuda", 90, 32),
    "blackwell": GPUTarget("cuda", 100, 32),
    "ampere": GPUTarget("cuda", 80, 32),
    "amd": GPUTarget("hip", "gfx942", 64),
    # Intel's tiles and warps; its compiler isn't there.
    "xpu": GPUTarget("cuda", 90, 32),
}


def resources(asm: Mapping[str, Any]) -> str:
    """Registers and spills of a compiled kernel, or nothing."""
    if "amdgcn" in asm:
        found = re.findall(r"\.(vgpr_count|vgpr_spill_count): +(\d+)", asm["amdgcn"])
        return " ".join(f"{name}={count}" for name, count in found)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        said, code = (
            subprocess.run(
                [tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    found = [f"{n.lower()}={c}" for n, c in re.findall(r"(REG|STACK):(\d+)", said)]
    products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    return " ".join([*found, f"products={products}", f"waits={waits}"])


def descriptors(ttir: str) -> str:
    """A kernel's functions, its loads by descriptors, and those of them whose descriptor is made
    in the same function."""
    made = set(re.findall(r"(%\w+) = tt\.make_tensor_descriptor", ttir))
    loads = re.findall(r"tt\.descriptor_load (%\w+)\[", ttir)
    own = sum(load in made for load in loads)
    return f"functions={ttir.count('tt.func')} descriptor_loads={len(loads)} own={own}"


def compile_all(target: Target, dtype: torch.dtype, dim: int) -> None:
    """Compile what a causal call with gradients, and a decoding one, need; for Hopper also what a
    call without mask and grouped heads does."""

    class Offline(TritonBackend):
        def probe(self) -> Decision:
            return Accepted()

        def target(self) -> Target:
            return target

    def compile_instead(program: launch.Program, *_: object) -> None:
        options = program.options
        made = triton.compile(
            program.source(), target=ARCHITECTURES[target], options=options.keywords()
        )
        tiles = f"{program.constants.get('BLOCK_M')}x{program.constants.get('BLOCK_N')}"
        print(
            target, ARCHITECTURES[target].arch, str(dtype)[6:], dim, program.function.__name__,
            tiles, options.num_warps, options.num_stages, f"shared={made.metadata.shared}",
            resources(made.asm), descriptors(made.asm["ttir"]), flush=True,
        )  # fmt: skip

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    launch.Program.launch = compile_instead  # type: ignore[method-assign]
    with isolated():
        register("cuda.offline", Offline)
        mask = anyflex.create_block_mask(causal, None, None, 256, 256)
        long, short = (
            torch.randn(1, 2, rows, dim).to(dtype).requires_grad_(rows > 1) for rows in (256, 1)
        )
        keys = torch.randn(1, 1, 256, dim).to(dtype)
        with posing("cuda"):
            # What ptxas makes of nested loops depends on all of them.
            for heads, pattern in ((1, mask), (2, None)) if target == "hopper" else ((1, mask),):
                seen = keys.detach().repeat(1, heads, 1, 1).requires_grad_()
                out = anyflex.flex_attention(
                    long, seen, seen, None, pattern, enable_gqa=True, backend="cuda.offline"
                )
                torch.autograd.grad(out, (long, seen), torch.randn_like(out))
            anyflex.flex_attention(short, keys, keys, enable_gqa=True, backend="cuda.offline")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", default=",".join(ARCHITECTURES))
    parser.add_argument("--types", default="bfloat16,float32")
    parser.add_argument("--dims", default="64,128,256")
    args = parser.parse_args()
    for target in ARCHITECTURES:
        for name in args.types.split(","):
            for dim in map(int, args.dims.split(",")):
                if target in args.targets.split(","):
                    compile_all(target, getattr(torch, name), dim)


if __name__ == "__main__":
    main()
