"""Contenders of `serving_targets.py`: each prepares a row and returns what runs one layer.

Peers are used where they import, with pools in the layout that they ask for: FlashInfer, the
FlashAttention-3 that vLLM builds (`vllm.vllm_flash_attn`), FlashAttention-4 (`flash_attn.cute`),
torch's compiled flex_attention over its PagedAttention. A peer refuses what it has no option for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from serving_rows import CAP, WINDOW, Problem, causal
from torch import Tensor

import anyflex
from anyflex.paging.storage import STORAGES, quantised

__all__ = ["CONTENDERS", "OURS", "OUR_DENSE", "Begin", "Layer", "Refused"]

Layer = Callable[[], Tensor]
Begin = Callable[[], Layer]
"""Begins a forward pass, on the device alone, and returns what runs one layer of it."""

WORKSPACE_BYTES = 384 << 20


class Refused(Exception):
    """The contender doesn't take the row."""


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise Refused(why)


# Ours


def ours(given: Problem, *, backend: str) -> Begin:
    """Begin a step in each pass, which finds the mask's blocks on the device."""
    row = given.row
    bounds = {"max_q": given.max_q, "max_kv": given.max_kv}
    key, value = (given.key, given.value) if given.pools is None else given.pools
    if given.pools is None:
        packed = anyflex.Packed(given.q_offsets, kv_offsets=given.kv_offsets, **bounds)
    else:
        table = given.table
        packed = anyflex.Packed(given.q_offsets, given.kv_lengths, page_table=table, **bounds)
    scales: dict[str, Tensor] = {}
    if row.storage:
        dtype = STORAGES[row.storage]
        assert dtype is not None
        (key, k_scale), (value, v_scale) = quantised(key, dtype), quantised(value, dtype)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    score_mod, mask_mod = given.mods()
    if row.decodes and mask_mod is causal:
        # The one row of each sequence sees all of its keys.
        mask_mod = None
    out = torch.empty_like(given.query)
    options = {"enable_gqa": True, "out": out, "backend": backend, **scales}

    def begin() -> Layer:
        step = packed.begin()
        return lambda: anyflex.flex_attention_packed(
            given.query, key, value, step, score_mod, mask_mod, **options
        )

    return begin


def our_dense(given: Problem) -> Begin:
    """Decode the same keys in one dense tensor."""
    row = given.row
    _need(row.uniform and row.decodes and not row.mod and not row.storage, "not uniform and plain")
    count, (heads, kv_heads) = len(row.lengths), row.heads
    query = given.query.view(count, heads, 1, row.dim)
    key, value = (
        each.view(count, -1, kv_heads, row.dim).transpose(1, 2).contiguous()
        for each in (given.key, given.value)
    )

    def layer() -> Tensor:
        found = anyflex.flex_attention(query, key, value, enable_gqa=True, backend="cuda")
        return found.view(given.query.shape)

    return lambda: layer


# FlashAttention


def _rows_first(given: Problem) -> tuple[Tensor, Tensor]:
    """Keys and values as FlashAttention wants them: packed, or pools [P, page, Hkv, D]."""
    if given.pools is None:
        return given.key, given.value
    key, value = (each.transpose(1, 2).contiguous() for each in given.pools)
    return key, value


def flash3(given: Problem) -> Begin:
    from vllm.vllm_flash_attn import _vllm_fa3_C  # noqa: F401  (registers the operation)

    row = given.row
    _need(row.mod in ("", "softcap", "window") and not row.storage, "no such mod or storage")
    key, value = _rows_first(given)
    paged = given.pools is not None
    window = (WINDOW, 0) if row.mod == "window" else (-1, -1)
    cap = CAP if row.mod == "softcap" else 0.0
    scale, out, none = 1 / math.sqrt(row.dim), torch.empty_like(given.query), None
    kv_offsets, kv_lengths = (none, given.kv_lengths) if paged else (given.kv_offsets, none)

    def layer() -> Tensor:
        torch.ops._vllm_fa3_C.fwd(
            given.query, key, value, none, none, none, out, given.q_offsets, kv_offsets, none,
            none, kv_lengths, given.max_q, given.max_kv, given.table, none, none, none, none, none,
            none, none, none, scale, True, *window, cap, True, none, 0, none, 0, none, 1, 0,
            none,
        )  # fmt: skip
        return out

    return lambda: layer


def flash4(given: Problem) -> Begin:
    from flash_attn.cute import flash_attn_varlen_func

    row = given.row
    _need(row.mod in ("", "softcap", "window") and not row.storage, "not tried with such a mod")
    key, value = _rows_first(given)
    where: dict[str, Any] = {"cu_seqlens_k": given.kv_offsets}
    if given.pools is not None:
        where = {"seqused_k": given.kv_lengths, "page_table": given.table}
    if row.mod == "window":
        where["window_size"] = (WINDOW, 0)
    if row.mod == "softcap":
        where["softcap"] = CAP

    def layer() -> Tensor:
        found = flash_attn_varlen_func(
            given.query, key, value, cu_seqlens_q=given.q_offsets, max_seqlen_q=given.max_q,
            max_seqlen_k=given.max_kv, causal=True, **where,
        )  # fmt: skip
        return found[0] if isinstance(found, tuple) else found

    return lambda: layer


# FlashInfer: plans are made on the host, before the pass


@functools.cache
def _workspace() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _options(given: Problem) -> dict[str, Any]:
    mod = given.row.mod
    found: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if mod == "softcap":
        found["logits_soft_cap"] = CAP
    if mod == "alibi":
        found["pos_encoding_mode"] = "ALIBI"
    if mod == "window":
        found["window_left"] = WINDOW
    return found


def _pages(given: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return (first entry of each sequence, pages, rows on each last page)."""
    assert given.table is not None
    page = given.row.page
    counts = (given.kv_lengths + page - 1) // page
    first = torch.zeros(len(counts) + 1, dtype=torch.int32, device="cuda")
    first[1:] = counts.cumsum(0)
    used = torch.arange(given.table.shape[1], device="cuda") < counts[:, None]
    return first, given.table[used].contiguous(), given.kv_lengths - (counts - 1) * page


def flashinfer_decode(given: Problem) -> Begin:
    import flashinfer

    row = given.row
    _need(row.decodes and row.mod in ("", "softcap", "alibi", "window"), "not one row, or its mod")
    _need(row.storage in ("", "fp8_e4m3"), "no int8")
    assert given.pools is not None
    options, run = _options(given), {}
    pools = given.pools
    if row.storage:
        # It has one scale for each tensor.
        scales = [float(each.abs().max()) / 448 for each in pools]
        pools = tuple(
            (each / scale).to(torch.float8_e4m3fn)
            for each, scale in zip(pools, scales, strict=True)
        )
        options["kv_data_type"] = torch.float8_e4m3fn
        run = {"k_scale": scales[0], "v_scale": scales[1]}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "HND", use_tensor_cores=True
    )
    wrapper.plan(*_pages(given), *row.heads, row.dim, row.page, **options)
    out = torch.empty_like(given.query)
    return lambda: lambda: wrapper.run(given.query, pools, out=out, **run)


def flashinfer_prefill(given: Problem, *, kernels: str) -> Begin:
    import flashinfer

    row = given.row
    _need(not row.storage and row.mod in ("", "prefix", "tree"), "not tried with such a mod")
    _need(not row.decodes or row.mod == "prefix", "decoding has another wrapper")
    masked = row.mod in ("prefix", "tree")
    _need(not masked or kernels == "fa2", "no custom masks")
    options: dict[str, Any] = {**_options(given), "causal": not masked}
    if masked:
        options["custom_mask"] = _mask(given)
    if given.pools is None:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            _workspace(), "NHD", backend=kernels
        )
        wrapper.plan(given.q_offsets, given.kv_offsets, *row.heads, row.dim, **options)
        return lambda: lambda: wrapper.run(given.query, given.key, given.value)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "HND", backend=kernels)
    wrapper.plan(given.q_offsets, *_pages(given), *row.heads, row.dim, row.page, **options)
    pools, out = given.pools, torch.empty_like(given.query)
    return lambda: lambda: wrapper.run(given.query, pools, out=out)


def _mask(given: Problem) -> Tensor:
    """Return each sequence's mask, flat."""
    _, mask_mod = given.mods()
    parts = []
    for rows, keys in given.row.lengths:
        q_idx = torch.arange(keys - rows, keys, device="cuda")[:, None]
        parts.append(mask_mod(0, 0, q_idx, torch.arange(keys, device="cuda")).flatten())
    return torch.cat(parts)


def flashinfer_mixed(given: Problem) -> Begin:
    import flashinfer

    row = given.row
    _need(given.pools is not None and row.mod in ("", "softcap") and not row.storage, "its mods")
    first, pages, _ = _pages(given)
    wrapper = flashinfer.BatchAttention(kv_layout="HND")
    wrapper.plan(
        given.q_offsets, first, pages, given.kv_lengths, *row.heads, row.dim, row.dim, row.page,
        causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        logits_soft_cap=CAP if row.mod else 0.0,
    )  # fmt: skip
    pools, cap = given.pools, CAP if row.mod else 0.0
    return lambda: lambda: wrapper.run(given.query, pools, logits_soft_cap=cap)[0]


# torch


def torch_paged(given: Problem) -> Begin:
    """Compiled flex_attention; its mask was converted before the pass."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    row = given.row
    _need(row.decodes and row.uniform and not row.storage, "its pages want one length")
    _need(row.page >= 128 or row.mod != "", "its kernels want blocks of 128")
    page = max(row.page, 128)
    count, (heads, kv_heads), keys = len(row.lengths), row.heads, given.max_kv
    pages = count * keys // page
    paged = PagedAttention(pages, page, count, device="cuda")
    for i in range(count):
        paged.reserve(torch.tensor(i, device="cuda"), torch.tensor(keys, device="cuda"))
    size = (1, kv_heads, pages * page, row.dim)
    key, value = (torch.empty(size, device="cuda", dtype=given.key.dtype) for _ in range(2))
    batch, places = torch.arange(count, device="cuda"), torch.arange(keys, device="cuda")
    dense = [
        each.view(count, keys, kv_heads, row.dim).transpose(1, 2)
        for each in (given.key, given.value)
    ]
    paged.assign(batch, places.expand(count, -1), *dense, key, value)
    score_mod, mask_mod = given.mods()
    offset = keys - 1

    def moved(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b, h, q_idx + offset, kv_idx)

    def score_moved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score_mod(score, b, h, q_idx + offset, kv_idx)

    mask = create_block_mask(moved, count, None, 1, keys, device="cuda", BLOCK_SIZE=(128, page))
    mask = paged.convert_logical_block_mask(mask, batch)
    found = None if score_mod is None else paged.get_score_mod(score_moved)
    compiled = torch.compile(flex_attention, dynamic=False)
    query = given.query.view(count, heads, 1, row.dim)

    def layer() -> Tensor:
        out = compiled(query, key, value, score_mod=found, block_mask=mask, enable_gqa=True)
        return out.view(given.query.shape)

    return lambda: layer


OURS, OUR_DENSE = "cuda", "cuda, dense"
CONTENDERS: dict[str, Callable[[Problem], Begin]] = {
    OURS: functools.partial(ours, backend="cuda"),
    "cuda.triton": functools.partial(ours, backend="cuda.triton"),
    OUR_DENSE: our_dense,
    "FA3": flash3,
    "FA4": flash4,
    "FlashInfer decode": flashinfer_decode,
    "FlashInfer fa2": functools.partial(flashinfer_prefill, kernels="fa2"),
    "FlashInfer fa3": functools.partial(flashinfer_prefill, kernels="fa3"),
    "FlashInfer mixed": flashinfer_mixed,
    "torch flex, paged": torch_paged,
}
