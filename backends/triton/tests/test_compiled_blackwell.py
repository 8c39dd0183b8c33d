"""Every entry of the table for Blackwell goes through Triton's compiler and ptxas, and fits.

`bench/triton_compiles.py` judges. Each large target has a file, because test runners share out
files.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from soak import SOAK
from table_entries import compiled, entries, learning_by_pair

pytestmark = pytest.mark.skipif(not SOAK, reason="only in make soak: it takes minutes")


def test_every_entry_compiles_and_fits() -> None:
    found = compiled("blackwell", "causal")
    assert entries("blackwell") <= found, entries("blackwell") - found


def test_kernels_without_mask_and_grouped_heads_compile() -> None:
    assert len(compiled("blackwell", "plain", "forward,keys", ("bfloat16",), (64,))) == 2


def test_the_pass_over_query_rows_fits_where_tensors_learn_by_pair() -> None:
    found = compiled("blackwell", "distances", "queries", ("bfloat16",), (64, 128))
    assert found == learning_by_pair("blackwell")
