"""What Triton's compilers make of every entry of the portable kernels' table; no GPU is needed.

    python bench/triton_compiles.py [--targets hopper,amd] [--types bfloat16,float32]
        [--dims 64,128,256] [--patterns plain,causal,softcap]
        [--kernels forward,decode,keys,queries] [--record]

Each kernel of the table is compiled with the table's configuration: forward and backward's two
without mask (plain), and with a causal mask and two query heads a key head (causal); decode once,
with causal; forward also with a soft cap and a causal mask (softcap).
Prints a line a kernel: registers, bytes of registers kept in memory (spills), and where those are:
of each innermost loop with products, how many instructions it has, and how many of them move
spilled registers. `--record` writes the lines to bench/results/triton_compiles.json, in place of
those of the same Triton, and a table of all to triton_compiles.md.

Exits with 1 if forward spills for a head dim up to 128, if a kernel takes more shared memory than
its target has, or if Hopper's products wait for each other.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from sass_loops import Loop, product_loops, spill_instructions
from torch import Tensor
from triton.backends.compiler import GPUTarget

import anyflex
from anyflex.plugin import Accepted, Decision, isolated, register
from anyflex.testing import posing
from anyflex_triton import launch
from anyflex_triton.backend import TritonBackend
from anyflex_triton.configs import Target

__all__ = ["main"]

ARCHITECTURES: dict[Target, GPUTarget] = {
    "hopper": GPUTarget("cuda", 90, 32),
    "blackwell": GPUTarget("cuda", 100, 32),
    "ampere": GPUTarget("cuda", 80, 32),
    "amd": GPUTarget("hip", "gfx942", 64),
    # Intel's tiles and warps; its compiler isn't there.
    "xpu": GPUTarget("cuda", 90, 32),
}
SHARED_KIB: dict[Target, int] = {
    "hopper": 227, "blackwell": 227, "ampere": 99, "amd": 64, "xpu": 128,
}  # fmt: skip
"""What one program may have; an Ampere's is that of its smallest, sm_86."""
RECORDED: tuple[Target, ...] = ("hopper", "blackwell", "ampere", "amd")
UNSPILLED_DIM = 128
"""Up to this head dim forward keeps all its registers."""
PATTERNS = ("plain", "causal", "softcap")
KERNELS = {
    "forward_kernel": "forward",
    "decode_kernel": "decode",
    "key_kernel": "keys",
    "query_kernel": "queries",
}
"""Those that the table has entries for."""
PRODUCTS = {2: ("HGMMA", "HMMA", "UTCHMMA"), 4: ("FFMA",)}
"""NVIDIA's instructions, by bytes of an element."""
LENGTH = 256
RESULTS = Path(__file__).parent / "results" / "triton_compiles.json"


@dataclass(frozen=True)
class Compiled:
    """One kernel.

    Args:
        spilled: bytes of memory a thread that stand in for registers.
        spills: instructions that move them; None where the target's tools don't tell.
        loops: innermost ones with products, in the code's order; empty where tools don't tell.
            Forward's last two run only where a value isn't finite.
        products, waits: Hopper's.
    """

    target: str
    dtype: str
    dim: int
    kernel: str
    pattern: str
    tiles: str
    warps: int
    stages: int
    shared: int
    registers: int
    spilled: int
    spills: int | None
    loops: tuple[Loop, ...]
    products: int
    waits: int

    def faults(self) -> Iterator[str]:
        """What the table's entry may not do."""
        unspilled = self.kernel == "forward" and self.dim <= UNSPILLED_DIM
        # What another vendor's compiler would spill can't be told.
        if unspilled and self.target != "xpu" and self.spilled:
            yield f"spills {self.spilled} bytes"
        limit = SHARED_KIB[self.target] * 1024  # type: ignore[index]
        if self.shared > limit:
            yield f"takes {self.shared} of {limit} bytes of shared memory"
        # ptxas makes each product wait for the one before (C7515) when it can't follow where
        # their registers are; some ways to nest the loops over runs bring that about.
        # Of float32, which has no such products, a few of halves are counted, where it is rare.
        if self.target == "hopper" and self.dtype != "float32" and self.waits > self.products / 2:
            yield f"{self.products} products wait for each other, {self.waits} times"

    def __str__(self) -> str:
        loops = " ".join(f"{loop.instructions}:{loop.spills}" for loop in self.loops)
        return (
            f"{self.target} {self.dtype} {self.dim} {self.kernel} {self.pattern} {self.tiles} "
            f"warps={self.warps} stages={self.stages} shared={self.shared} "
            f"registers={self.registers} spilled={self.spilled} loops={loops or '-'}"
        )


def resources(asm: Mapping[str, Any], products: tuple[str, ...]) -> dict[str, Any]:
    """`Compiled`'s last six; `products` as `product_loops` takes them."""
    if "amdgcn" in asm:
        found = {
            name: int(count)
            for name, count in re.findall(
                r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size): +(\d+)",
                asm["amdgcn"],
            )
        }
        # Of one lane; what else lies in that memory is none of the table's.
        spilled = 4 * found["vgpr_spill_count"]
        return {
            "registers": found["vgpr_count"], "spilled": spilled, "spills": None, "loops": (),
            "products": 0, "waits": 0,
        }  # fmt: skip
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run(
                [tools / tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", used)}
    return {
        "registers": counts["REG"], "spilled": counts["STACK"],
        "spills": spill_instructions(code), "loops": tuple(product_loops(code, products)),
        "products": code.count("HGMMA"), "waits": code.count("WARPGROUP.DEPBAR"),
    }  # fmt: skip


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 30.0 * torch.tanh(score / 30.0)


def compile_entries(
    target: Target,
    dtype: torch.dtype,
    dim: int,
    patterns: Sequence[str],
    kernels: Collection[str],
) -> Iterator[Compiled]:
    """Compile those of these kernels that calls of these patterns need, and yield what came."""
    programs: list[launch.Program] = []

    class Offline(TritonBackend):
        def probe(self) -> Decision:
            return Accepted()

        def target(self) -> Target:
            return target

    def note_instead(program: launch.Program, *_: object) -> None:
        programs.append(program)

    def needed(pattern: str) -> list[launch.Program]:
        programs.clear()
        mask = None
        if pattern != "plain":
            mask = anyflex.create_block_mask(causal, None, None, LENGTH, LENGTH)
        score = soft_cap if pattern == "softcap" else None
        rows, keys = (
            torch.zeros(1, heads, LENGTH, dim).to(dtype).requires_grad_()
            for heads in (2 if pattern == "causal" else 1, 1)
        )

        def attention(query: Tensor, key: Tensor, **more: Any) -> Tensor:
            out = anyflex.flex_attention(
                query, key, key, enable_gqa=True, backend="cuda.offline", **more
            )
            assert isinstance(out, Tensor)
            return out

        out = attention(rows, keys, score_mod=score, block_mask=mask)
        if pattern != "softcap":
            torch.autograd.grad(out, (rows, keys), torch.zeros_like(out))
        if pattern == "causal":
            attention(rows.detach()[:, :, :1], keys.detach())
        return list(programs)

    launched = launch.Program.launch
    launch.Program.launch = note_instead  # type: ignore[method-assign]
    try:
        with isolated(), posing("cuda"):
            register("cuda.offline", Offline)
            found = [(pattern, program) for pattern in patterns for program in needed(pattern)]
    finally:
        launch.Program.launch = launched  # type: ignore[method-assign]
    for pattern, program in found:
        kernel = KERNELS.get(program.function.__name__)
        if kernel not in kernels:
            continue
        options = program.options
        made = triton.compile(
            program.source(), target=ARCHITECTURES[target], options=options.keywords()
        )
        yield Compiled(
            target=target,
            dtype=str(dtype).removeprefix("torch."),
            dim=dim,
            kernel=kernel,
            pattern=pattern,
            tiles=f"{program.constants['BLOCK_M']}x{program.constants['BLOCK_N']}",
            warps=options.num_warps,
            stages=options.num_stages,
            shared=made.metadata.shared,
            **resources(made.asm, PRODUCTS[dtype.itemsize]),
        )


def record(found: list[Compiled], seconds: float) -> None:
    """Write the results and their table."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[triton.__version__] = {
        "command": " ".join(["python bench/triton_compiles.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "seconds": round(seconds),
        "kernels": [asdict(one) for one in found],
    }
    kept = dict(sorted(kept.items()))
    # A kernel a line.
    text = json.dumps(kept, separators=(",", ":"))
    text = text.replace('{"target"', '\n{"target"').replace("}},", "}},\n")
    RESULTS.write_text(text + "\n")
    RESULTS.with_suffix(".md").write_text(written(kept))


def written(kept: Mapping[str, Any]) -> str:
    """The table, in Markdown: a row a kernel, two columns a Triton."""
    lines = [
        "# What Triton's compilers make of the kernels' table",
        "",
        "Without a GPU, by `python bench/triton_compiles.py --record`: by Triton, registers of",
        "a thread, then bytes of them that are kept in memory (spills). In brackets, where any",
        "are: how many instructions move them in each innermost loop with products. Of forward's",
        "loops the first is that of full blocks, the second that of others, and the last two run",
        "only where a value isn't finite.",
        "",
    ]
    versions = list(kept)
    by_entry: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for version in versions:
        for one in kept[version]["kernels"]:
            names = ("target", "dtype", "dim", "kernel", "pattern", "tiles", "warps", "stages")
            by_entry.setdefault(tuple(str(one[name]) for name in names), {})[version] = one
    columns = " | ".join(f"triton {version} | shared, KiB" for version in versions)
    lines.append(
        f"| target | type | head dim | kernel | pattern | tile | warps | stages | {columns} |"
    )
    lines.append("|" + "---|" * (8 + 2 * len(versions)))
    for entry, ones in by_entry.items():
        cells = list(entry)
        for version in versions:
            one = ones.get(version)
            if one is None:
                cells += ["", ""]
                continue
            cell = f"{one['registers']}, {one['spilled']}"
            if one["spilled"] and one["loops"]:
                cell += f" ({', '.join(str(loop['spills']) for loop in one['loops'])})"
            cells += [cell, f"{one['shared'] / 1024:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile, print, and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(RECORDED))
    parser.add_argument("--types", default="bfloat16,float32")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--kernels", default=",".join(KERNELS.values()))
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if launch.INTERPRETED:
        parser.error("TRITON_INTERPRET is set: nothing is compiled then; unset it")
    begin = time.perf_counter()
    found, wrong = [], 0
    for target in ARCHITECTURES:
        for name in arguments.types.split(",") if target in arguments.targets.split(",") else ():
            for dim in map(int, arguments.dims.split(",")):
                for one in compile_entries(
                    target, getattr(torch, name), dim,
                    arguments.patterns.split(","), arguments.kernels.split(","),
                ):  # fmt: skip
                    found.append(one)
                    print(one, flush=True)
                    for fault in one.faults():
                        wrong += 1
                        print(f"  FAULT: {fault}", flush=True)
    if arguments.record:
        record(found, time.perf_counter() - begin)
    print(f"{len(found)} kernels by triton {triton.__version__}, {wrong} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
