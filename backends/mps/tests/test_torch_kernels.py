"""torch's own Metal attention kernels, which Apple's compiler accepts, run with right results.

Their headers are torch's and aren't kept here. ANYFLEX_TORCH_METAL_HEADERS names the folder
`torch/include` of an unpacked wheel:

    pip download torch==2.15.0 --no-deps --only-binary=:all: --platform macosx_14_0_arm64
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest
import torch
from emulator import SCHEDULES, EmulatedKernel, Instance, compile_shader
from emulator.requirement import require_emulator

HEADERS = os.environ.get("ANYFLEX_TORCH_METAL_HEADERS", "")
"""Folder `torch/include` of torch's wheel for macOS."""
KERNELS = "ATen/native/mps/kernels"
TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
BUDGETS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}

HEAD = "#include <metal_stdlib>\n#include <c10/metal/utils.h>\nusing namespace metal;\n"


@pytest.fixture(scope="module", autouse=True)
def headers() -> None:
    require_emulator()
    if not (Path(HEADERS) / KERNELS).is_dir() or not HEADERS:
        pytest.skip(
            "no headers of torch's Metal kernels: ANYFLEX_TORCH_METAL_HEADERS names the folder "
            "torch/include of its macOS wheel, 2.14 or newer"
        )


def source_of(header: str) -> str:
    """Return a header's kernels without their instantiations."""
    text = (Path(HEADERS) / KERNELS / header).read_text()
    first = re.search(r"#define (instantiate_kernel|INSTANTIATE_SDPA_VECTOR_ONE)", text)
    text = text[: first.start()] if first else text
    text = re.sub(r"#pragma once|#if !defined\(TORCH_STABLE_ONLY\).*", "", text)
    return HEAD + text.encode("ascii", "replace").decode()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, live: torch.Tensor | None
) -> torch.Tensor:
    """Return attention by the dense formula in float64."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(ratio, 1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5
    if live is not None:
        scores = scores.masked_fill(~live, -torch.inf)
    return scores.softmax(-1) @ v


def inputs(
    dtype: torch.dtype, heads: int, kv_heads: int, rows: int, keys: int, dim: int
) -> tuple[torch.Tensor, ...]:
    """Return random q, k and v, whose heads are interleaved in memory."""
    random = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, length, count, dim, generator=random).to(dtype).transpose(1, 2)
        for count, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )


def prefill(
    dtype: torch.dtype, tile: tuple[int, int], dim: int, causal: bool, schedule: str
) -> float:
    """Return the largest error of torch's prefill kernel on ragged, grouped heads."""
    rows, keys, heads, kv_heads = 75, 93, 4, 2
    q, k, v = inputs(dtype, heads, kv_heads, rows, keys, dim)
    out = torch.full((1, heads, rows, dim), float("nan"), dtype=dtype)
    strides = [s for x in (q, k, v, out) for s in x.stride()[:3]]
    packed = struct.pack(
        "<6i2f12q", 1, heads, dim, rows, keys, heads // kv_heads, dim**-0.5, 1.0, *strides
    )
    parameters = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    warps = 2 if dim == 256 else 4
    arguments = f"{TYPES[dtype]}, {tile[0]}, {tile[1]}, {dim}, {warps}, 1, false, "
    instance = Instance("prefill_attention", arguments + str(causal).lower())
    library = compile_shader(
        source_of("PrefillAttention.h"),
        schedule=schedule,
        include=[HEADERS],
        instances={"prefill": instance},
    )
    library.prefill(
        q, k, v, out, parameters, torch.zeros(4, dtype=torch.int64), torch.zeros(4),
        threads=[-(-rows // tile[0]) * 32, heads * warps, 1], group_size=[32, warps, 1],
    )  # fmt: skip
    live = torch.ones(rows, keys).tril().bool() if causal else None
    return (out.double() - attention(q, k, v, live)).abs().max().item()


@pytest.mark.parametrize(
    ("dtype", "tile", "dim", "causal", "schedule"),
    [
        (torch.float16, (32, 32), 64, False, "forward"),
        (torch.float16, (32, 32), 64, True, "reverse"),
        (torch.float32, (32, 32), 64, True, "random"),
        (torch.bfloat16, (32, 32), 64, True, "greedy"),
        (torch.float16, (32, 16), 128, True, "greedy-reverse"),
        (torch.float32, (16, 8), 256, False, "forward"),
    ],
)
def test_prefill_attention_is_right(
    dtype: torch.dtype, tile: tuple[int, int], dim: int, causal: bool, schedule: str
) -> None:
    assert prefill(dtype, tile, dim, causal, schedule) < BUDGETS[dtype]


def decoding_kernel(dtype: torch.dtype, dim: int, **how: object) -> EmulatedKernel:
    """Return torch's kernel for few queries."""
    instance = Instance("sdpa_vector", f"{TYPES[dtype]}, {dim}")
    library = compile_shader(
        source_of("DecodeAttention.h"),
        include=[HEADERS],
        instances={"decode": instance},
        **how,  # type: ignore[arg-type]
    )
    return library.decode


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize("dtype", TYPES)
def test_sdpa_vector_is_right_in_every_schedule(dtype: torch.dtype, race: bool) -> None:
    heads, kv_heads, rows, keys, dim = 4, 2, 2, 133, 64
    q, k, v = inputs(dtype, heads, kv_heads, rows, keys, dim)
    expected = attention(q, k, v, None)
    for schedule in SCHEDULES:
        kernel = decoding_kernel(dtype, dim, race=race, schedule=schedule)
        out = torch.full((1, heads, rows, dim), float("nan"), dtype=dtype)
        head_strides, row_strides, batch_strides = (
            [x.stride(d) for x in (q, k, v)] for d in (1, 2, 0)
        )
        kernel(
            q, k, v, out, heads // kv_heads, keys, [*head_strides, 0], [*row_strides, 0],
            dim**-0.5, torch.zeros(4), [0, 0, 0, 0], [*batch_strides, heads],
            threads=[heads * 1024, rows, 1], group_size=[1024, 1, 1],
            arg_casts={4: "int32", 5: "int32", 6: "int32", 7: "int32", 10: "int32", 11: "int32"},
        )  # fmt: skip
        assert (out.double() - expected).abs().max().item() < BUDGETS[dtype]
