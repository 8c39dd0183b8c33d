"""Compilations of every entry of the portable kernels' table by Triton's compilers; no GPU is
needed.

    python bench/triton_compiles.py [--targets hopper,amd] [--types bfloat16,float32,tf32]
        [--dims 64,128,192,256] [--patterns plain,causal,documents]
        [--kernels forward,decode,keys,queries] [--length 256] [--record | --compare] [--brief]

Each kernel of the table is compiled with the table's configuration: forward and backward's two
without mask (plain), and with a causal mask and two query heads a KV head (causal); decode once,
with causal; forward also with a causal mask and a soft cap (softcap), ALiBi (alibi), a bias by
relative position (relative) or by row and key (bias), with packed documents (documents), and with
ALiBi under a soft cap and packed documents (mixed); backward's two also with the bias by relative
position as a captured tensor that learns (distances). Where they are asked for: rows, combine,
kinds, runs and totals, which run beside those; the last three with a finer causal mask and a
captured tensor whose gradient repeats bit for bit (learned). Packed sequences of up to 256 rows,
and of one, with a causal mask, have patterns to ask for: keys are packed (packed), or in pages of
64 (paged) or 16 rows (paged16), also with batch_invariant=True (alone). Intel's tiles are compiled
for sm_90.
Type tf32 is float32 where torch allows products to be rounded to it; AMD's are not. Prints a line
a kernel: registers, bytes of registers kept in memory (spills), and where those are: of each
innermost loop with products, how many instructions it has, and how many of them move spilled
registers. `--record` writes registers, spills and shared memory to the table of
bench/results/triton_compiles.md, in place of those of the same Triton that were asked for, and
everything to build/results. `--compare` reads the table's spills of this Triton, if there are any.
`--brief` leaves the loops out: a third of a second less a kernel.

Exits with 1 if forward spills for a head dim up to 128 (of Hopper's 16-bit rows that TMA doesn't
load: more than COPIED_SPILLS bytes), if a kernel takes more shared memory than its target has, or
if Hopper's products wait for each other (but for MEASURED); with `--compare` also if a kernel
spills more than was recorded, or was not recorded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from compiles_record import entry_of, record, recorded
from sass_loops import Loop, product_loops, spill_instructions
from torch import Tensor
from triton.backends.compiler import GPUTarget

import anyflex
from anyflex.bench.case import TF32
from anyflex.plugin import Accepted, Decision, isolated, register
from anyflex.testing import posing
from anyflex.testing.float32_precision import products_in
from anyflex_triton.arguments import BYTES
from anyflex_triton.backend import TritonBackend
from anyflex_triton.configs import Target
from anyflex_triton.program import INTERPRETED, Program

__all__ = ["main"]

ARCHITECTURES: dict[Target, GPUTarget] = {
    "hopper": GPUTarget("cuda", 90, 32),
    "blackwell": GPUTarget("cuda", 100, 32),
    "ampere": GPUTarget("cuda", 80, 32),
    "amd": GPUTarget("hip", "gfx942", 64),
    # Intel's tiles and warps, compiled without Intel's compiler.
    "xpu": GPUTarget("cuda", 90, 32),
}
SHARED_KIB: dict[Target, int] = {
    "hopper": 227, "blackwell": 227, "ampere": 99, "amd": 64, "xpu": 128,
}  # fmt: skip
"""Maximum shared memory of a program in bytes; an Ampere's is that of its smallest, sm_86."""
RECORDED: tuple[Target, ...] = ("hopper", "blackwell", "ampere", "amd")
"""Targets whose compilations are recorded. The others are only judged: another compiler's spills
would differ from Intel's."""
MEASURED = {("keys", 192, "64x128"), ("keys", 192, "64x64")}
"""Tiles that are the fastest on an H200 although products wait (`bench/results/h200_triton.md`);
those of the second wait by triton 3.9.0 alone, which wasn't measured."""
LEAST_WAITS = 8
"""Number of waits that is always allowed. A kernel of wide heads has 7, one for each place where
products are waited for."""
UNSPILLED_DIM = 128
"""Largest head dim for which forward keeps all its registers."""
COPIED_SPILLS = 360
"""Maximum bytes that it may spill all the same for Hopper's 16-bit rows that TMA doesn't load: the
fastest tiles spill up to 40 with triton 3.6.0, and that many with 3.9.0."""
PACKED = {"packed": 0, "paged": 64, "paged16": 16, "alone": 16}
"""Patterns of packed sequences, which aren't recorded, and the rows of their pages."""
PATTERNS = (
    "plain", "causal", "softcap", "documents", "alibi", "relative", "bias", "mixed", "distances",
)  # fmt: skip
TRAINED = ("plain", "causal", "learned", "distances")
"""Patterns whose backward is compiled."""
KERNELS = {
    "forward_kernel": "forward",
    "decode_kernel": "decode",
    "key_kernel": "keys",
    "query_kernel": "queries",
}
"""Kernels that the table has entries for."""
BESIDE = {
    "row_kernel": "rows",
    "combine_kernel": "combine",
    "kinds_kernel": "kinds",
    "runs_kernel": "runs",
    "total_kernel": "totals",
}
"""Kernels without an entry in the table."""
SIDES = ("BLOCK_M", "BLOCK_N", "ROWS", "COLUMNS", "BLOCK")
"""Constants that are sides of a kernel's tile."""
PRODUCTS = ("HGMMA", "HMMA", "UTCHMMA")
"""NVIDIA's tensor core instructions; float32's are FFMA."""
LENGTH = 256


@dataclass(frozen=True)
class Compiled:
    """One kernel.

    Args:
        spilled: bytes of memory a thread that stand in for registers.
        spills: instructions that move them; None where the code wasn't examined, as AMD's.
        loops: innermost ones with products, in the code's order; empty where spills is None.
            Forward's last runs only where a value is non-finite.
        products, waits: Hopper's.
        loads, own: by tensor descriptors; those whose descriptor is made in the same function.
        copies: sizes of NVIDIA's asynchronous ones by threads, in bytes. They aren't recorded.
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
    loads: int
    own: int
    copies: tuple[int, ...] = ()

    def faults(self) -> Iterator[str]:
        """Yield the violations of the rules for the table's entries."""
        is_half = self.dtype in ("bfloat16", "float16")
        copied = self.target == "hopper" and is_half and self.dim * 2 % BYTES != 0
        bounded = self.kernel == "forward" and self.dim <= UNSPILLED_DIM
        # Another vendor's compiler may spill differently, so its spills aren't judged.
        if bounded and self.target != "xpu" and self.spilled > (COPIED_SPILLS if copied else 0):
            yield f"spills {self.spilled} bytes"
        limit = SHARED_KIB[self.target] * 1024  # type: ignore[index]
        if self.shared > limit:
            yield f"takes {self.shared} of {limit} bytes of shared memory"
        # ptxas makes each product wait for the one before (C7515) when it can't follow where their
        # registers are, which some nestings of the loops over runs cause. Narrow heads have few
        # products, each with a wait of its own.
        allowed = max(self.products / 2, LEAST_WAITS)
        waits = may_wait(self.target, self.dtype) and self.waits > allowed
        if waits and (self.kernel, self.dim, self.tiles) not in MEASURED:
            yield f"{self.products} products wait for each other, {self.waits} times"

        # Intel's compiler makes 2D block loads where it finds the descriptor's definition.
        described = self.target == "xpu" and self.pattern not in PACKED
        if described and not 0 < self.loads == self.own:
            yield f"{self.loads} loads by descriptors, {self.own} of them by its own"

    def worse(self, before: Mapping[tuple[str, ...], int]) -> Iterator[str]:
        """Yield the properties that are worse than in `compiles_record.recorded`."""
        if self.target not in RECORDED or self.kernel not in KERNELS.values():
            return
        was = before.get(entry_of(vars(self)))
        if was is None:
            yield "was not recorded with these tiles, warps and stages: --record"
        elif self.spilled > was:
            yield f"spills {self.spilled} bytes, recorded were {was}; if that is meant: --record"

    def __str__(self) -> str:
        loops = " ".join(f"{loop.instructions}:{loop.spills}" for loop in self.loops)
        return (
            f"{self.target} {self.dtype} {self.dim} {self.kernel} {self.pattern} {self.tiles} "
            f"warps={self.warps} stages={self.stages} shared={self.shared} "
            f"registers={self.registers} spilled={self.spilled} loops={loops or '-'} "
            f"copies={','.join(map(str, self.copies)) or '-'}"
        )


def may_wait(target: str, dtype: str) -> bool:
    """Whether products could wait for each other: float32's aren't asynchronous."""
    return target == "hopper" and dtype != "float32"


def resources(asm: Mapping[str, Any], products: tuple[str, ...], brief: bool) -> dict[str, Any]:
    """`Compiled`'s `registers` to `waits`; `products` as `product_loops` takes them.

    Args:
        brief: without what takes a disassembly.
    """
    if "amdgcn" in asm:
        found = {
            name: int(count)
            for name, count in re.findall(
                r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size): +(\d+)",
                asm["amdgcn"],
            )
        }
        # Bytes of one lane. Other data in its scratch memory is not up to the configuration.
        spilled = 4 * found["vgpr_spill_count"]
        return {
            "registers": found["vgpr_count"], "spilled": spilled, "spills": None, "loops": (),
            "products": 0, "waits": 0,
        }  # fmt: skip
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()

        def printed(tool: str, option: str) -> str:
            return subprocess.run(
                [tools / tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout

        used = printed("cuobjdump", "-res-usage")
        code = "" if brief else printed("nvdisasm", "-c")
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", used)}
    return {
        "registers": counts["REG"], "spilled": counts["STACK"],
        "spills": None if brief else spill_instructions(code),
        "loops": () if brief else tuple(product_loops(code, products)),
        "products": code.count("HGMMA"), "waits": code.count("WARPGROUP.DEPBAR"),
    }  # fmt: skip


def descriptors(ttir: str) -> dict[str, int]:
    """`Compiled`'s `loads` and `own`, of a kernel with one function."""
    makers = set(re.findall(r"(%\w+) = tt\.make_tensor_descriptor", ttir))
    loads = re.findall(r"tt\.descriptor_load (%\w+)\[", ttir)
    own = sum(load in makers for load in loads) if ttir.count("tt.func") == 1 else 0
    return {"loads": len(loads), "own": own}


def copies(asm: Mapping[str, Any]) -> tuple[int, ...]:
    """`Compiled`'s `copies`."""
    copy = r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)"
    sizes = re.findall(copy, asm["ptx"]) if "ptx" in asm else ()
    return tuple(sorted({int(size, 16) for size in sizes}))


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 30.0 * torch.tanh(score / 30.0)


def documents(ids: Tensor) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (q >= k)

    return mask_mod


def alibi(slopes: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + slopes[h] * (k - q)

    return score_mod


def capped_alibi(slopes: Tensor) -> Callable[..., Tensor]:
    biased = alibi(slopes)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return soft_cap(biased(score, b, h, q, k), b, h, q, k)

    return score_mod


def relative_bias(bias: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[h, q - k + LENGTH]

    return score_mod


def dense_bias(bias: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[h, q, k]

    return score_mod


def learned_bias(bias: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[k]

    return score_mod


def attend_packed(rows: Tensor, keys: Tensor, page: int, most: int, batch_invariant: bool) -> None:
    """Call attention of one sequence [1, H, length, dim], without gradients.

    Args:
        page: rows of a page; 0: keys are packed.
        most: `Packed`'s max_q.
    """
    length = keys.shape[2]
    query, packed = rows.detach()[0, :, :most].transpose(0, 1), keys.detach()[0].transpose(0, 1)
    q_offsets, kv_offsets = (torch.tensor([0, end], dtype=torch.int32) for end in (most, length))
    if page:
        table = torch.arange(length // page, dtype=torch.int32)[None]
        batch = anyflex.Packed(q_offsets, kv_offsets[1:], page_table=table)
        packed = packed.reshape(-1, page, *packed.shape[1:]).transpose(1, 2)
    else:
        batch = anyflex.Packed(q_offsets, kv_offsets=kv_offsets)
    anyflex.flex_attention_packed(
        query, packed, packed, batch.begin(), None, causal, enable_gqa=True,
        backend="cuda.offline", batch_invariant=batch_invariant,
    )  # fmt: skip


def compile_entries(
    target: Target,
    dtype: str,
    dim: int,
    patterns: Sequence[str],
    kernels: Collection[str],
    brief: bool = False,
    length: int = LENGTH,
) -> Iterator[Compiled]:
    """Compile those of these kernels that calls of these patterns need, and yield the results.

    Args:
        dtype: of `--types`.
        brief: as in `resources`, where no fault is found in the code.
        length: of query and key, up to LENGTH.
    """
    elements = torch.float32 if dtype == TF32 else getattr(torch, dtype)
    programs: list[Program] = []

    class Offline(TritonBackend):
        def probe(self) -> Decision:
            return Accepted()

        def target(self) -> Target:
            return target

    def note_instead(program: Program, *_: object) -> None:
        programs.append(program)

    def needed(pattern: str) -> list[Program]:
        programs.clear()
        repeats = pattern == "learned"
        bias = torch.zeros(LENGTH, requires_grad=True)
        distances = torch.zeros(1, 2 * LENGTH, requires_grad=pattern == "distances")
        score = {
            "softcap": soft_cap,
            "learned": learned_bias(bias),
            "alibi": alibi(torch.zeros(1)),
            "mixed": capped_alibi(torch.zeros(1)),
            "relative": relative_bias(distances),
            "distances": relative_bias(distances),
            "bias": dense_bias(torch.zeros(1, LENGTH, LENGTH)),
        }.get(pattern)
        packed = documents(torch.zeros(LENGTH, dtype=torch.int32))
        masks = {"plain": None, "documents": packed, "mixed": packed}
        mask_mod = masks.get(pattern, causal)
        mask = mask_mod and anyflex.create_block_mask(mask_mod, None, None, length, length)
        rows, keys = (
            torch.zeros(1, heads, length, dim).to(elements).requires_grad_()
            for heads in (2 if pattern in ("causal", *PACKED) else 1, 1)
        )

        def attention(query: Tensor, key: Tensor, **more: Any) -> Tensor:
            out = anyflex.flex_attention(
                query, key, key, enable_gqa=True, backend="cuda.offline",
                kernel_options={"cuda.offline": {"finer_mask": repeats}}, **more,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out

        if pattern in PACKED:
            for most in (length, 1):
                attend_packed(rows, keys, PACKED[pattern], most, pattern == "alone")
            return list(programs)
        torch.use_deterministic_algorithms(repeats)
        try:
            out = attention(rows, keys, score_mod=score, block_mask=mask)
            if pattern in TRAINED:
                captured = {"learned": (bias,), "distances": (distances,)}.get(pattern, ())
                learning = (rows, keys, *captured)
                torch.autograd.grad(out, learning, torch.zeros_like(out))
        finally:
            torch.use_deterministic_algorithms(False)
        if pattern == "causal":
            attention(rows.detach()[:, :, :1], keys.detach())
        return list(programs)

    launched = Program.launch
    Program.launch = note_instead  # type: ignore[method-assign]
    try:
        with isolated(), posing("cuda"), products_in("high" if dtype == TF32 else "highest"):
            register("cuda.offline", Offline)
            found = [(pattern, program) for pattern in patterns for program in needed(pattern)]
    finally:
        Program.launch = launched  # type: ignore[method-assign]
    for pattern, program in found:
        kernel = {**KERNELS, **BESIDE}[program.function.__name__]
        # The forward of that pattern is the relative one's.
        if kernel not in kernels or (pattern == "distances" and kernel == "forward"):
            continue
        options = program.options
        constants = program.constants
        tile = [constants[name] for name in SIDES if name in constants]
        made = triton.compile(
            program.source(), target=ARCHITECTURES[target], options=options.keywords()
        )
        yield Compiled(
            target=target,
            dtype=dtype,
            dim=dim,
            kernel=kernel,
            pattern=pattern,
            tiles="x".join(map(str, tile)) or "-",
            warps=options.num_warps,
            stages=options.num_stages,
            shared=made.metadata.shared,
            **resources(
                made.asm,
                ("FFMA",) if dtype == "float32" else PRODUCTS,
                brief and not may_wait(target, dtype),
            ),
            **descriptors(made.asm["ttir"]),
            copies=copies(made.asm),
        )


def main() -> int:
    """Compile, print, and judge; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(ARCHITECTURES))
    parser.add_argument("--types", default=f"bfloat16,float32,{TF32}")
    parser.add_argument("--dims", default="64,128,192,256")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--kernels", default=",".join(KERNELS.values()))
    parser.add_argument("--length", type=int, default=LENGTH, help=f"up to {LENGTH}")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--brief", action="store_true")
    arguments = parser.parse_args()
    if arguments.record and (arguments.compare or arguments.brief):
        parser.error("--record is not for --compare or --brief: it writes all that is found")
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: nothing is compiled then; unset it")
    if arguments.length != LENGTH and (arguments.record or arguments.compare):
        parser.error(f"--length is not for --record or --compare: what is recorded is of {LENGTH}")
    if not 0 < arguments.length <= LENGTH:
        parser.error(f"--length is 1 to {LENGTH}, got {arguments.length}")
    before = recorded(triton.__version__) if arguments.compare else None
    if arguments.compare and before is None:
        print(f"nothing was recorded with triton {triton.__version__}")
    begin = time.perf_counter()
    found, wrong = [], 0
    for target in ARCHITECTURES:
        for name in arguments.types.split(",") if target in arguments.targets.split(",") else ():
            if name == TF32 and target == "amd":
                continue  # float32 again
            for dim in map(int, arguments.dims.split(",")):
                for one in compile_entries(
                    target, name, dim,
                    arguments.patterns.split(","), arguments.kernels.split(","), arguments.brief,
                    arguments.length,
                ):  # fmt: skip
                    found.append(one)
                    print(one, flush=True)
                    worse = one.worse(before) if before is not None else ()
                    for fault in (*one.faults(), *worse):
                        wrong += 1
                        print(f"  FAULT: {fault}", flush=True)
    if arguments.record:
        kept = [asdict(one) for one in found if one.target in RECORDED]
        for one in kept:
            del one["copies"]
        chosen = ("targets", "types", "dims", "patterns", "kernels")
        whole = all(getattr(arguments, name) == parser.get_default(name) for name in chosen)
        record(triton.__version__, kept, time.perf_counter() - begin, whole=whole)
    print(f"{len(found)} kernels by triton {triton.__version__}, {wrong} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
