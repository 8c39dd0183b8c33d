"""One select by several conditions: the conditions of a mask mod, and their PTX."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from gluon_in_python import Pointer, mod_in_python, tile

import anyflex
from anyflex.plugin import CapturedFacts, Spec, parse_graph
from anyflex_cuda.gluon_kernels import gluon_source
from anyflex_triton.building import load_module, mask_scores_source, source_for, write_source

Mask = Callable[..., Any]
EXTREMES = (0, 1, -1, 37, 2**29, -(2**29), 2**31, -(2**31), 2**40, -(2**40), 2**63 - 1, -(2**63))
LENGTH = 400

torch.manual_seed(0)
IDS = torch.randint(0, 4, (LENGTH,))
SMALL_IDS = IDS.to(torch.uint8)
TIMES = torch.rand(LENGTH)
TIMES[::7] = torch.nan
KEEPS = torch.rand(LENGTH) < 0.7
ENDS = torch.tensor([200, -(2**62), 2**62, 250])
EXACT_TIMES = torch.rand(LENGTH, dtype=torch.float64)
# Some of these are equal as float32.
EXACT_TIMES[1::2] = EXACT_TIMES[::2] + 1e-12
LOWS = torch.full((4,), -30)
LARGE = torch.full((LENGTH,), 2**63 - 1)
LARGE[::3] = 7
WRAPPED = (torch.arange(LENGTH) * (2**31 // 200)).int()


ZEROS = torch.zeros(4, dtype=torch.int32)


def reading(mask_mod: Mask) -> Mask:
    """Return a mask mod with the same result that reads a tensor; `mask_scores` leaves other masks
    alone."""
    return lambda b, h, q, k: mask_mod(b, h, q, k) & (ZEROS[b] == 0)


def window(size: int) -> Mask:
    return reading(lambda b, h, q, k: (q - k <= size) & (q >= k))


def shifted_window(size: int, shift: int) -> Mask:
    return reading(lambda b, h, q, k: (k + shift > q - size) & (k - q < 5))


# Masks, each with the number of its comparisons of kv_idx alone with something that depends on the
# row at most.
MASKS: dict[str, tuple[Mask, int]] = {
    **{f"window of {size}": (window(size), 2) for size in EXTREMES},
    **{f"shifted by {shift}": (shifted_window(50, shift), 1) for shift in EXTREMES[:4]},
    "documents": (lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k), 1),
    "documents of bytes": (lambda b, h, q, k: (SMALL_IDS[q] == SMALL_IDS[k]) & (k <= q), 1),
    "prefix": (reading(lambda b, h, q, k: (k < 120) | (q >= k)), 2),
    "lengths": (lambda b, h, q, k: (k < ENDS[b]) & (q - k >= -20), 1),
    "turned": (reading(lambda b, h, q, k: ~((q < k) | (q - 100 > k))), 2),
    "exclusive": (lambda b, h, q, k: (q > k) ^ (IDS[k] != 2), 1),
    "times": (lambda b, h, q, k: (TIMES[k] <= TIMES[q]) & (TIMES[k] != 0.5) & (q >= k), 1),
    "exact times": (lambda b, h, q, k: (EXACT_TIMES[k] >= EXACT_TIMES[q]) & (q >= k), 1),
    "other times": (lambda b, h, q, k: (TIMES[k] != TIMES[q]) & (q >= k), 1),
    "a sum that wraps": (lambda b, h, q, k: (LARGE[q] + k > q) & (q >= k), 1),
    "two large terms": (lambda b, h, q, k: (k - q - h * h > LOWS[b]) & (q >= k), 1),
    "a table": (lambda b, h, q, k: KEEPS[k] & (q >= k) & (k != 7), 2),
    "twice the key": (reading(lambda b, h, q, k: (2 * k > q) & (q >= k)), 1),
    "key on both sides": (reading(lambda b, h, q, k: (q - k >= k - 300) & (q >= k)), 1),
    "wraps": (lambda b, h, q, k: (WRAPPED[q] + WRAPPED[k] > 5) & (q >= k), 1),
    "heads": (reading(lambda b, h, q, k: (q - k < (h + 1) * 40) & (q >= k)), 2),
}


def of_mask(mask_mod: Mask) -> tuple[str, dict[str, Mask], dict[str, Any]]:
    """Return the text, its module's functions, and their captured arguments."""
    traced = anyflex.create_block_mask(mask_mod, None, None, 16, 16).traced
    assert traced is not None
    spec = Spec(
        "cuda", "sm_90", torch.bfloat16, 128, 128, mask_graph=parse_graph(traced.text),
        captured=tuple(CapturedFacts(t.dtype, t.dim(), False) for t in traced.captured),
        mask_kind="runs", block_size=(128, 128),
    )  # fmt: skip
    text = mask_scores_source(spec)
    whole = source_for(gluon_source(write_source(spec) + text), within=True, coarse=False)
    given = {
        "tables": tuple(Pointer(memory(t)) for t in traced.captured),
        "ints": (*(n for t in traced.captured for n in (*t.shape, *t.stride())), *traced.ints),
        "floats": tuple(traced.floats),
    }
    made = vars(load_module(whole))
    names = ("read_rows", "read_columns", "mask_scores_of_read")
    return (
        text,
        {name: mod_in_python(made[name], held=True) for name in names if name in made},
        given,
    )


def memory(tensor: Tensor) -> Any:
    return tensor.to(torch.int8 if tensor.dtype is torch.bool else tensor.dtype).numpy()


@pytest.mark.parametrize("name", MASKS)
def test_dead_pairs_are_those_of_the_mask_mod(name: str) -> None:
    mask_mod, of_keys = MASKS[name]
    text, functions, given = of_mask(mask_mod)
    # Blackwell prefetches nothing.
    alone, of_read = text.split("def mask_scores_of_read(")
    assert "ops.choose(" in alone
    assert "ops.choose_by(" in of_read
    assert len(re.findall(r"kv_idx [a-z]{2}[;']", of_read)) == of_keys
    pick = np.random.default_rng(0)
    for b, h, first_row, first in (
        (0, 0, 0, 0),
        (1, 3, 130, 128),
        (2, 1, 336, 256),
        (3, 2, 64, 64),
    ):
        rows = np.arange(first_row, first_row + 64, dtype=np.int32)[:, None]
        columns = np.arange(0, 128, dtype=np.int32)[None, :]
        scores = pick.standard_normal((64, 128)).astype(np.float32)
        keys = columns + np.int32(first)
        live = mask_mod(
            torch.tensor(b), torch.tensor(h), torch.tensor(rows).long(), torch.tensor(keys).long()
        ).numpy()
        read = dict(given)
        for name, index in (("read_rows", rows), ("read_columns", keys[0])):
            if name in functions:
                read["tables"] = functions[name](b, h, tile(index), **read)
        for full in (None, 0, 1):
            found = functions["mask_scores_of_read"](
                tile(scores), full, first, tile(columns), b, h, tile(rows), tile(keys), **read
            )
            wanted = np.where(live | bool(full), scores, -np.inf)
            np.testing.assert_array_equal(np.asarray(found), wanted)


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: KEEPS[k],
        lambda b, h, q, k: (q >= k) & (q - k < 9),
        lambda b, h, q, k: KEEPS[k] & (k > 2) & (k > 3) & (k > 4) & (k > 5) & (k > 6) & (k > 7),
    ],
)
def test_one_condition_too_many_and_masks_that_read_nothing_are_left_as_they_are(
    mask_mod: Mask,
) -> None:
    text = of_mask(mask_mod)[0]
    assert "ops.choose(" in text
    assert "choose_by" not in text
