"""Whole forward calls on a stand-in Blackwell GPU, whose kernel runs in Python, against the
reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from gluon_in_python import in_numpy, mask_scores_of, run_kernel
from recording import OnBlackwell, check_half_outputs, recording
from scripts_beside import SOAK

import anyflex
from anyflex.plugin import isolated, register
from anyflex_cuda import (
    apply_mods,
    blackwell_forward,
    forward_call,
    nonfinite_rows,
    smem_mailbox,
    split_tiles,
    write_softmax_stats,
)
from anyflex_cuda.backend import VARIABLE
from anyflex_triton import forward, tiles
from anyflex_triton.building import Program


def bent(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return score * 0.5 + (k - q) * 0.01


def causal(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return q >= k


def packed(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    """Mask of documents of 170 tokens."""
    return (q // 170 == k // 170) & (q >= k)


def whole(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    """Mask whose blocks are FULL or unlisted, so that the mask mod is never evaluated."""
    return (q // 128 + k // 128) % 3 != 1


CASES = {
    # rows, keys, head dims, score mod, mask mod, block size
    "plain": (300, 200, (64, 64), None, None, 128),
    "causal": (600, 600, (96, 96), None, causal, 128),
    "causal, larger blocks": (520, 520, (64, 128), bent, causal, 256),
    "packed": (640, 640, (128, 64), bent, packed, (128, 64)),
    "whole blocks": (512, 640, (64, 64), None, whole, 128),
    "packed, not finite": (300, 300, (72, 40), bent, packed, 128),
    "not finite": (130, 200, (64, 64), None, None, 128),
}


@pytest.mark.parametrize("name", list(CASES)[:: 1 if SOAK else 2])
def test_a_call_gives_what_the_reference_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    rows, keys, dims, score, mask_mod, block = CASES[name]
    ran = []

    def launch(
        program: Program, grid: int, device: torch.device, values: Mapping[str, Any]
    ) -> None:
        """Run the kernel, with the case's mods in numpy."""
        given: dict[str, Any] = {
            **program.constants,
            "SCORE_MOD": score,
            "MASK_MOD": mask_mod,
            "MASK_SCORES": mask_scores_of(mask_mod),
        }
        given |= in_numpy({name: values[name] for name in program.types})
        modules = (
            tiles, forward, smem_mailbox, apply_mods, nonfinite_rows,
            write_softmax_stats, split_tiles,
        )  # fmt: skip
        run_kernel(blackwell_forward, "forward_kernel", grid, given, seed=0, more=modules)
        ran.append(program.function.__name__)

    torch.manual_seed(0)
    q = torch.randn(2, rows, 4, dims[0]).half().transpose(1, 2)
    k, v = (torch.randn(2, 2, keys, d).half() for d in dims)
    if name.endswith("not finite"):
        k[0, 1, 130, 5] = torch.nan
        v[0, 0, 20, 7], v[1, 1, 90, 1] = torch.nan, -torch.inf
    mask = None
    if mask_mod is not None:
        mask = anyflex.create_block_mask(mask_mod, None, None, rows, keys, BLOCK_SIZE=block)
    with isolated():
        register("cuda", OnBlackwell)
        few = mock.patch.object(forward_call, "cores", lambda device: 5)
        with recording(), few, mock.patch.object(Program, "launch", launch):
            out, lse = anyflex.flex_attention(
                q, k, v, score, mask, enable_gqa=True, return_lse=True, backend="cuda"
            )
    assert ran == ["forward_kernel"]
    check_half_outputs(out, lse, q, k, v, score, mask)
