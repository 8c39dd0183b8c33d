"""The sources stay small enough for somebody else to take over."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAPABILITIES = {
    "gradients of few KV heads by many programs": 390,
    "launches of a small backward, found at once: checks, one workspace, arguments in it": 105,
    "torch's masks and mods as they are: index lists, slices, rows of captured tensors": 1_020,
    "block masks built inside of compiled and exported programs; slices of a step": 550,
    "what authors of backends check theirs with: check_lowering, --failed-from, faults": 560,
    "torch's flex attention re-routed, and the entry point that torch calls": 560,
    "what authors of backends declare and read: node_dtypes, doctor on decoding": 130,
    "an attention implementation for Hugging Face transformers": 1_145,
    "an attention backend for vLLM": 490,
    "gradients of biases for each pair, summed once on a CPU": 110,
    "packed sequences and keys in pages, by any backend's dense kernels": 1_235,
    "packed sequences and keys in pages as they are: the contract's part, a CPU's kernels": 1_060,
    "packed sequences and keys in pages as they are in the portable kernels": 645,
    "sinks in kernels, forward and backward; their cases": 535,
    "packed calls whose bits don't depend on the batch, in the portable kernels; their case": 225,
    "packed sequences and keys in pages in Hopper's own forward": 1_140,
    "packed sequences and keys in pages in Hopper's own decoding": 1_150,
    "Hopper's kernels of ready-made masks and mods, compiled in the wheel without a GPU": 225,
    "Triton's checksum of itself, made beside the rest of a first call": 20,
    "keys and values stored in 8 bits in Hopper's own decoding": 370,
    "biases by distance, by a key's place in an image, and dense, in Hopper's kernels": 910,
    "packed calls in compiled programs: a static op, what is recorded, what runs it": 470,
    "attention dropout: one mask of all backends, forward and backward; its cases": 790,
    "kinds of blocks by a mask's graph, computed on the device from lengths": 850,
    "keys and values in pages: owners, prefixes, append": 1_290,
    "a benchmark of shapes and patterns that no kernel was tuned on; biases that it draws": 205,
    "the conformance kit's packed sequences and pages, on any layout": 1_060,
}
"""Lines that came with what the sources couldn't do when they had at most 68,000."""
LIMITS = {
    (
        "core",
        "backends/cpu",
        "backends/cuda",
        "backends/triton",
        "backends/xpu",
        "plugins",
    ): 68_000 + sum(CAPABILITIES.values()),
    ("backends/mps",): 5_550,
}
"""Maximum number of lines of folders together. What a new backend brings is counted apart."""
SUFFIXES = {".py", ".c", ".cpp", ".h", ".cu"}
LEFT_OUT = {"tests", "build", "dist", "__pycache__", ".venv"}


def sources(folders: tuple[str, ...]) -> list[Path]:
    return [
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.suffix in SUFFIXES and LEFT_OUT.isdisjoint(file.relative_to(ROOT).parts)
    ]


@pytest.mark.parametrize(("folders", "limit"), LIMITS.items())
def test_the_sources_have_at_most_so_many_lines(folders: tuple[str, ...], limit: int) -> None:
    files = sources(folders)
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert min(sum(file.is_relative_to(ROOT / folder) for file in lines) for folder in folders) > 0
    assert sum(lines.values()) <= limit, sorted(lines, key=lambda file: -lines[file])[:10]
