"""The README's figures: anyflex and torch's own flex_attention, on the CPU of this machine.

    python bench/versus_torch.py

Each figure comes from a fresh process with one thread, after `import torch` (and `import
anyflex`), and is CPU time, that of a compiler that the process starts included: a busy machine
changes it little. A small block mask is built before the one that is measured. torch's first
compiled call runs with Inductor's caches switched off and needs a C++ compiler. Memory is the
growth of the process's peak resident size. Prints a markdown table.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

__all__: list[str] = []

PREPARE = """
import json, resource
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
LENGTH = 16384
document = torch.arange(LENGTH) // 8
def document_causal(b, h, q_idx, kv_idx):
    return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)
def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx
def alibi(score, b, h, q_idx, kv_idx):
    return score - 0.5 ** (h + 1) * (q_idx - kv_idx)
def inputs(length, heads=16, needs_grad=False):
    make = lambda: torch.randn(1, heads, length, 64, requires_grad=needs_grad)
    return make(), make(), make()
def spent():
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses), uses[0].ru_maxrss
def timed(work):
    began, before = spent()
    work()
    ended, after = spent()
    seconds, grown = ended - began, after - before
    print(json.dumps([seconds, grown / 1024]))
"""
TORCH = "import torch.nn.attention.flex_attention as library\n"
ANYFLEX = "import anyflex as library\n"

MASK = """
library.create_block_mask(causal, 1, 1, 256, 256, "cpu")
timed(lambda: library.create_block_mask(document_causal, 1, 1, LENGTH, LENGTH, "cpu"))
"""
ATTEND = """
q, k, v = inputs(2048)
mask = library.create_block_mask(causal, None, None, 2048, 2048, "cpu")
call = lambda: library.flex_attention(q, k, v, score_mod=alibi, block_mask=mask)
"""
FIRST_ANYFLEX = """
q, k, v = inputs(512, heads=2)
mask = library.create_block_mask(causal, None, None, 512, 512, "cpu")
timed(lambda: library.flex_attention(q, k, v, score_mod=alibi, block_mask=mask))
"""
FIRST_TORCH = FIRST_ANYFLEX.replace(
    "library.flex_attention(", "torch.compile(library.flex_attention)("
)
TRAIN = """
q, k, v = inputs(2048, needs_grad=True)
mask = library.create_block_mask(causal, None, None, 2048, 2048, "cpu")
def step():
    library.flex_attention(q, k, v, score_mod=alibi, block_mask=mask).sum().backward()
step()
timed(step)
"""

ROWS = (
    ("block mask, document + causal, 16384 x 16384", MASK, MASK),
    ("first call, 2 heads x 512, causal + ALiBi", FIRST_TORCH, FIRST_ANYFLEX),
    (
        "eager forward, 16 heads x 2048 x 64, causal + ALiBi",
        ATTEND + "call(); timed(call)",
        ATTEND + "call(); timed(call)",
    ),
    ("the same, forward and backward", TRAIN, TRAIN),
)


def measure(program: str) -> str:
    """Run a program that ends in `timed`; return its figures, or its error's last line."""
    # With one compile thread the compiler is a child of the measured process.
    environment = os.environ | {
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        return done.stderr.strip().splitlines()[-1]
    seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
    time = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
    return f"{time}, {megabytes:.0f} MiB"


def main() -> None:
    import torch

    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.processor()} "
        f"{torch.backends.cpu.get_cpu_capability()}, one thread, CPU time\n"
    )
    print("| | torch | anyflex |\n|---|---|---|")
    for name, torch_program, anyflex_program in ROWS:
        theirs = measure(PREPARE + TORCH + torch_program)
        ours = measure(PREPARE + ANYFLEX + anyflex_program)
        print(f"| {name} | {theirs} | {ours} |", flush=True)


if __name__ == "__main__":
    main()
