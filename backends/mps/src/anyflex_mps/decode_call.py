"""Launches of a decoding call: splits of the keys, then their combination."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anyflex.plugin import Call, Outputs, Spec, TensorSpec
from anyflex_mps.arguments import strides_of
from anyflex_mps.decode import ROWS_A_GROUP, combine_shader, decode_shader
from anyflex_mps.forward_call import (
    call_entries,
    mask_tensors,
    saved_tensors,
    sequence_tensors,
)
from anyflex_mps.launch import launch, pairs_of
from anyflex_mps.spec_shaders import SpecShaders
from anyflex_mps.tiles import Tile, tile_for

__all__ = ["MOST_ROWS", "Splits", "decode_workspace", "decodes", "launch_decode", "splits_of"]

MOST_ROWS = 64
"""Largest number of query rows per KV head that is decoded; more are tiles of forward."""
_GROUPS_A_CORE = 2
"""Threadgroups of a decoding call per core, which was chosen without a device to measure on."""
_LEAST_SPLIT = 256
"""Least number of keys of a split."""


def _packed_heads(spec: Spec, call: Call) -> int:
    """Return the query heads that share a tile: all of a KV head, if their rows of blocks are the
    same."""
    return spec.gqa_ratio if call.mask is None or call.mask.shape[1] == 1 else 1


def decodes(spec: Spec, call: Call) -> bool:
    """Return whether a call's forward is made of splits."""
    length = call.query.shape[2] if call.packed is None else call.packed.max_q
    if not 0 < length * _packed_heads(spec, call) <= MOST_ROWS:
        return False
    return call.mask is None or length <= spec.block_size[0]


def _units(call: Call) -> tuple[int, int, int]:
    """Return the number of batch entries or packed sequences that are decoded, and the most query
    rows and keys of one."""
    if call.packed is None:
        return call.query.shape[0], call.query.shape[2], call.key.shape[2]
    return call.packed.blocks.shape[0], call.packed.max_q, call.packed.max_kv


class Splits(NamedTuple):
    """Splits of a decoding call.

    Args:
        tile: of rows, and ``tiles`` of them.
        packed: query heads of a tile.
        number: of splits, of ``length`` keys each.
    """

    tile: Tile
    tiles: int
    packed: int
    number: int
    length: int


def splits_of(spec: Spec, call: Call, cores: int) -> Splits:
    """Return the splits of a decoding call.

    Args:
        cores: of the GPU.
    """
    units, rows, keys = _units(call)
    packed = _packed_heads(spec, call)
    tile = tile_for("decode", spec, packed * rows)
    tiles = -(-packed * rows // tile.rows)
    groups = units * (call.query.shape[1] // packed) * tiles
    wanted = _GROUPS_A_CORE * cores // max(groups, 1)
    number = max(1, min(wanted, keys // _LEAST_SPLIT))
    steps = -(-max(keys, 1) // tile.step)
    return Splits(tile, tiles, packed, number, -(-steps // number) * tile.step)


def decode_workspace(spec: Spec, call: Call, cores: int) -> tuple[TensorSpec, ...]:
    """Return partial_out and partial_sums: see `decode_shader`."""
    shape = (*call.query.shape[:3], splits_of(spec, call, cores).number)
    return (
        TensorSpec((*shape, spec.value_head_dim), torch.float32),
        TensorSpec((*shape, 3), torch.float32),
    )


def launch_decode(made: SpecShaders, call: Call, out: Outputs) -> None:
    """Fill the outputs."""
    spec = made.spec
    splits = splits_of(spec, call, made.cores)
    batch, heads, length = call.query.shape[:3]
    mask, numbers = mask_tensors(call.mask)
    sequences, bounds = sequence_tensors(call)
    entries = {
        **call_entries(call),
        **bounds,
        **numbers,
        "splits": splits.number,
        "split_length": splits.length,
        **strides_of(out=out.out),
    }
    partial_out, partial_sums = out.workspace
    tensors = {
        "query": call.query, "key": call.key, "value": call.value, "out": out.out,
        "lse": out.lse, "max_scores": out.max_scores, "sinks": call.sinks,
        "partial_out": partial_out, "partial_sums": partial_sums,
        **saved_tensors(spec, out.saved), **sequences, **mask,
    }  # fmt: skip
    shader = made.written(decode_shader, splits.tile, splits.packed)
    groups = (splits.number * splits.tiles, heads // splits.packed, _units(call)[0])
    work = pairs_of(call) * (spec.head_dim + spec.value_head_dim)
    launch(made, shader, call, groups, tensors, entries, work=work)
    rows = (-(-length // ROWS_A_GROUP), heads, batch)
    launch(made, made.written(combine_shader), call, rows, tensors, entries)
