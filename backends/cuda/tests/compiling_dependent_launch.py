"""Compiles kernels whose launches overlap for Hopper; no device is needed.

Run as a script by `test_dependent_launch`. It prints one line per kernel: its name, then the kinds
of instructions in its code, in order and without repetitions: "wait" and "next"
(`anyflex_triton.dependent_launch`), and "memory" for accesses of global memory, or "loads" where
these are loads by threads only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import torch
from compiling_backward import backward_of, recorded
from with_ptxas import compiled, compiling

import anyflex
from anyflex_triton.building import Program

WORDS = {"griddepcontrol.wait": "wait", "griddepcontrol.launch_dependents": "next"}
ACCESS = re.compile(
    r"griddepcontrol\.\w+|(?:ld|st|atom|red)\.(?:\w+\.)*global|cp\.(?:reduce\.)?async"
)


def order(ptx: str) -> str:
    """Return the order of instructions as the script prints it."""
    words: list[str] = []
    for access in ACCESS.findall(ptx):
        word = WORDS.get(access) or ("loads" if access.startswith("ld.") else "memory")
        if word in WORDS.values():
            words.append(word)
        elif words[-1:] == ["loads"] and word == "memory":
            words[-1] = word
        elif words[-1:] not in (["memory"], ["loads"]):
            words.append(word)
    return " ".join(words)


def programs() -> Iterator[Program]:
    for program, _ in backward_of("causal", dims=(64, 64), hopper=False):
        yield program
    q, kv = torch.zeros(1, 8, 1, 64).bfloat16(), torch.zeros(1, 1, 16384, 64).bfloat16()
    with recorded() as launched:
        anyflex.flex_attention(
            q, kv, kv, enable_gqa=True, kernel_options={"cuda.recorded": {"hopper": False}},
            backend="cuda.recorded",
        )  # fmt: skip
    for program, _ in launched:
        yield program


def main() -> int:
    with compiling():
        for program in programs():
            made, _ = compiled(program)
            print(program.function.__name__, order(made.asm["ptx"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
