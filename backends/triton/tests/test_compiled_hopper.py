"""Every entry of the table for Hopper goes through Triton's compiler and ptxas, and fits.

`bench/triton_compiles.py` judges. Each large target has a file, because test runners share out
files.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from soak import SOAK
from table_entries import (
    DIMS,
    READING,
    TOOL,
    compiled,
    entries,
    learning_by_pair,
    named,
    run,
)

from anyflex_triton.configs import (
    _READING_PAIRS,
    _TF32_READING_PAIRS,
    Traits,
    config_for,
)

pytestmark = pytest.mark.skipif(not SOAK, reason="only in make soak: it takes minutes")
_ROUNDED = Traits(192, 4, in_tf32=True)


def test_every_entry_compiles_and_fits() -> None:
    found = compiled("hopper", "causal")
    # Grouped heads, as in causal kernels, have a smaller tile for dK and dV than the table's.
    found |= compiled("hopper", "plain", "forward,keys,queries", ("bfloat16",))
    found |= compiled("hopper", "plain", "keys", ("tf32",))
    # Forward of 64 columns takes the table's entry where the register limit of others would make
    # it spill, as where TMA doesn't load rows.
    unaligned = compiled("hopper", "plain,causal", "forward", ("bfloat16",), (36,), recorded=False)
    found |= {name.replace(" 36 ", " 64 ") for name in unaligned}
    assert entries("hopper") <= found, entries("hopper") - found


def test_tiles_in_parts_compile_and_fit() -> None:
    found = compiled("hopper", "plain,causal", "forward,keys,queries", ("bfloat16",), (192,))
    kernels = ("forward", "keys", "queries")
    for shared in (False, True):  # as causal's heads are
        for kernel in kernels:
            config = config_for("hopper", kernel, Traits(192, 2, shares_keys=shared))
            assert named("hopper", "bfloat16", 192, kernel, config) in found
    assert compiled("hopper", "causal", "forward", ("tf32",), (192,)) == {
        named("hopper", "tf32", 192, "forward", config_for("hopper", "forward", _ROUNDED))
    }


def test_forward_spills_nothing_whatever_mods_read() -> None:
    """Up to head dim 128."""
    found = compiled("hopper", ",".join(READING), "forward", ("bfloat16",))
    for dim, config in zip(DIMS, _READING_PAIRS["hopper"], strict=True):
        assert named("hopper", "bfloat16", dim, "forward", config) in found
    found = compiled("hopper", "relative,bias", "forward", ("tf32",), (64, 128))
    assert found >= {
        named("hopper", "tf32", dim, "forward", config)
        for dim, config in zip((64, 128), _TF32_READING_PAIRS["hopper"], strict=True)
    }


def test_between_the_tables_head_dims_documents_spill_nothing_either() -> None:
    found = compiled("hopper", "documents,mixed", "forward", ("float32",), (96,), recorded=False)
    config = config_for("hopper", "forward", Traits(96, 4, mask_reads=True))
    assert found == {named("hopper", "float32", 96, "forward", config)}


def test_rows_that_tma_does_not_load_come_by_copies_where_any_fits() -> None:
    done = run(
        TOOL, "--targets", "hopper", "--patterns", "causal", "--kernels", "forward",
        "--types", "bfloat16,tf32", "--dims", "50,99,100", "--brief",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines() if " copies=" in line]
    found = {" ".join(words[1:3]): words[-1].removeprefix("copies=") for words in lines}
    rows = {"bfloat16 50": "4", "bfloat16 99": "-", "bfloat16 100": "8", "tf32 99": "4"}
    assert {row: found[row] for row in rows} == rows


def test_the_pass_over_query_rows_fits_where_tensors_learn_by_pair() -> None:
    found = compiled("hopper", "distances", "queries", ("bfloat16",))
    assert found == learning_by_pair("hopper")
