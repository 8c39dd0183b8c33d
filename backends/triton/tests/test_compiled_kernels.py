"""Compilation of the kernels for AMD, with Intel's tiles, and of a part for Ampere.

`bench/triton_compiles.py` judges. Hopper's and Blackwell's are in files of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from soak import SOAK
from table_entries import READING, compiled, entries, run

only_in_soak = pytest.mark.skipif(not SOAK, reason="only in make soak: it takes minutes")


def test_a_kernel_of_each_kind_compiles_and_fits() -> None:
    found = compiled("hopper,blackwell,amd", "causal", types=("bfloat16",), dims=(64,))
    assert len(found) == 3 * 4


def test_packed_sequences_compile_and_fit() -> None:
    """Both kernels that take them: the interpreter allows more than the compilers do."""
    targets, patterns, kernels = ("hopper", "alone", "forward,decode,combine")
    if SOAK:
        targets, patterns = ("hopper,blackwell,amd,ampere,xpu", "packed,paged,paged16,alone")
    found = compiled(targets, patterns, kernels, ("bfloat16",), (64,), recorded=False)
    assert {line.split()[3] for line in found} == set(kernels.split(","))


@only_in_soak
def test_every_entry_for_amd_compiles_and_fits() -> None:
    found = compiled("amd", "causal")
    assert entries("amd") <= found, entries("amd") - found
    # The tool fails where forward spills, whatever mods read.
    assert compiled("amd", ",".join(READING), "forward", ("bfloat16",), (128,))


@only_in_soak
def test_every_entry_with_intel_s_tiles_compiles_for_sm_90_and_fits() -> None:
    found = compiled("xpu", "causal")
    assert entries("xpu") <= found, entries("xpu") - found
    assert compiled("xpu", "relative", "forward", ("bfloat16",), (128,))


@only_in_soak
def test_kernels_for_ampere_compile_and_fit() -> None:
    found = compiled("ampere", "causal,relative", types=("bfloat16", "tf32"), dims=(64,))
    wanted = {entry for entry in entries("ampere") if " 64 " in entry and " float32 " not in entry}
    # Decoding's tiles in TF32 are float32's.
    assert len(wanted) == 7
    assert wanted <= found, wanted - found


@only_in_soak
def test_what_runs_beside_the_kernels_of_the_table_compiles_and_fits() -> None:
    """Finer blocks are decided for each kernel's tiles."""
    found = compiled(
        "hopper,blackwell,amd", "causal,learned", "rows,combine,kinds,runs,totals", ("bfloat16",),
        (64,),
    )  # fmt: skip
    kernels = {(words[0], words[3]) for words in map(str.split, found)}
    assert kernels == {
        (target, kernel)
        for target in ("hopper", "blackwell", "amd")
        for kernel in ("rows", "combine", "kinds", "runs", "totals")
    }


@pytest.mark.parametrize("training", [True, *([False] if SOAK else [])])
def test_lengths_batches_and_strides_compile_once_a_class(training: bool) -> None:
    """Decoding has a kernel for up to 16 rows and one for up to 32. Forward and both kernels of
    backward have one for keys that end where tiles do and one for others."""
    done = run(Path(__file__).parent / "counting_compiles.py", *["training"] * training)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    wanted = ["combine_kernel", *["decode_kernel"] * 2, *["forward_kernel"] * 2]
    if training:
        wanted += [*["key_kernel"] * 2, *["query_kernel"] * 2, "row_kernel"]
    assert sorted(done.stdout.split()) == wanted
