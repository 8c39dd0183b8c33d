"""Launching forward: many query rows by tiles, a few by splits of the keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from anyflex.plugin import Call, Outputs, PackedRows, Spec
from anyflex_triton import forward
from anyflex_triton.arguments import alignment_of, layout_of
from anyflex_triton.configs import Config
from anyflex_triton.dependent_launch import overlapping
from anyflex_triton.kernel_signatures import (
    MaskRows,
    Programs,
    beside,
    call_sizes,
    kept_of,
    layouts_of,
    or_else,
    output_values,
    padded,
    tile_count,
    wanted_outputs,
)
from anyflex_triton.launch import FixedLaunch, Launch, begin_compiling, launch_all
from anyflex_triton.mask_refinement import mask_rows, rows_for
from anyflex_triton.program import INTERPRETED, Options, Program
from anyflex_triton.sequences import LEAST_SPLIT
from anyflex_triton.warm_up import current_target

__all__ = [
    "SHORT_ROWS",
    "NeededNext",
    "compile_with_next",
    "cores",
    "decoded_rows",
    "launch_decode",
    "launch_prefill",
    "packed_heads",
    "packed_values",
    "splits_of",
]

NeededNext = Callable[[Call, Outputs], Sequence[Program]]
"""Programs that will be needed after a call's forward."""

SHORT_ROWS = 64
"""Calls with at most this many query rows per KV head use the decode kernel."""
_PROGRAMS_A_CORE = 2
"""Number of decoding programs per multiprocessor. More took 5 to 15 % longer on an H200, because
some ran only when the others were done."""
_MOST_SPLITS = 16
"""Maximum number of splits of a packed sequence."""
_PACKED_BLOCK = 128
"""Query rows of an entry of `PackedRows.blocks`."""
_DECODED_ROWS = 4
"""Maximum number of query rows of a sequence that is decoded in a batch-invariant call. The
workspace has room for as many rows of each sequence."""
_LEAST_SPLIT = 256
"""Minimum number of keys of a split; a shorter one isn't worth combining."""


def packed_heads(spec: Spec, call: Call) -> int:
    """Return the number of query heads that share the rows of a decoding tile: all of a KV head,
    if their rows of blocks are the same."""
    return spec.gqa_ratio if call.mask is None or call.mask.shape[1] == 1 else 1


class Splits(NamedTuple):
    """Splits of a decoding call's keys, and the workspace of their results, in elements of
    float32, as `decode.decode_kernel` writes it.

    Args:
        number: number of splits.
        sums_at: offset of the sums, which follow the weighted values.
        size: elements of both.
    """

    number: int
    sums_at: int
    size: int


def decoded_rows(spec: Spec, call: Call) -> int:
    """Return the maximum number of query rows of a sequence that is decoded in a batch-invariant
    call, whatever its other sequences are: 0 where none is, and in other calls."""
    packed = packed_heads(spec, call)
    if not spec.batch_invariant or packed > SHORT_ROWS:
        return 0
    return min(_DECODED_ROWS, _decoding_tile(packed) // packed)


def _decoding_tile(rows: int) -> int:
    """Return the rows of the smallest tile that holds these."""
    return max(16, 1 << (rows - 1).bit_length())


def splits_of(spec: Spec, call: Call) -> Splits:
    """Return the splits of a decoding call."""
    batch, heads, length = call.query.shape[:3]
    decoded = decoded_rows(spec, call)
    if call.packed is not None and decoded:
        parts = call.packed.blocks.shape[0] * heads * min(call.packed.max_q, decoded)
        number = _invariant_splits(call.packed.max_kv)
        values = parts * number * spec.value_head_dim
        return Splits(number, values, values + parts * number * 3)
    units = batch * (heads // packed_heads(spec, call))
    # Rounded down: a last wave of few programs costs more than multiprocessors with one program.
    wanted = _PROGRAMS_A_CORE * cores(call.query.device) // max(units, 1)
    if call.packed is None:
        number = max(1, min(wanted, call.key.shape[2] // _LEAST_SPLIT))
    else:
        number = max(1, min(_MOST_SPLITS, call.packed.max_kv // (2 * _LEAST_SPLIT)))
    parts = batch * heads * length * number
    values = parts * spec.value_head_dim
    return Splits(number, values, values + parts * 3)


def _invariant_splits(max_kv: int) -> int:
    """Return the number of splits that begin before `max_kv`: see `sequences.first_of_split`."""
    number, end = 1, int(LEAST_SPLIT.value)
    while end < max_kv:
        end += LEAST_SPLIT.value << max(0, number // 8 - 1)
        number += 1
    return number


@lru_cache
def cores(device: torch.device) -> int:
    """Return the number of an accelerator's multiprocessors, or of its vendor's equivalent."""
    if device.type == "cpu":
        return 2
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count"):
        count = getattr(properties, name, None)
        if count:
            return int(count)
    return 32


def launch_prefill(made: Programs, call: Call, out: Outputs, needed_next: NeededNext) -> None:
    """Launch the forward kernel on tiles of queries."""
    # Packed calls have no finer runs, and decoding may need a workspace beside them.
    finer = out.workspace if call.packed is None else ()
    rows, before = rows_for(made, call, "forward", finer)
    launch = made.launch("forward", call, partial(_prefill_launch, made, call, out, rows), before)
    if not before:
        compile_with_next(made.spec, launch.program, call, out, needed_next)
    launch_all([*before, launch], call.query.device)


def compile_with_next(
    spec: Spec, program: Program, call: Call, out: Outputs, needed_next: NeededNext
) -> None:
    """Compile the program that a training call needs now, and beside it those that it needs next;
    do nothing where the first is compiled already, or nothing can be compiled beside it."""
    device = call.query.device.index
    # The usual case comes first.
    if program.is_compiled(device):
        return
    if INTERPRETED or not spec.needs_backward or not _compiles_beside(call):
        return

    def begin_next() -> None:
        # The call that needs these programs asks for them again, and raises what fails here.
        with contextlib.suppress(Exception):
            begin_compiling(needed_next(call, out), current_target())

    program.compile(device, begin_next)


def _compiles_beside(call: Call) -> bool:
    """Whether programs can be compiled in threads without the device. They can't while the call is
    captured in a CUDA graph: finding backward's programs may wait for the device then, because a
    mask's columns are counted there."""
    return (
        call.query.is_cuda
        and torch.version.cuda is not None
        and not torch.cuda.is_current_stream_capturing()
    )


def _prefill_launch(
    made: Programs, call: Call, out: Outputs, rows: MaskRows | None, config: Config
) -> Launch:
    result = out.out
    rest, tops = kept_of(out.saved)
    even = made.is_even(call, config, "keys", rows)
    mods = made.mods(call, even)
    tensors = call.query, call.key, call.value, result, or_else(rest, result)
    key = (
        "anyflex_triton.prefill", config, mods.key, even,
        None if rows is None else rows.block_size, out.lse is None, out.max_scores is None,
        rest is None, tops is None, result.stride(), tensors[4].stride(),
        *map(alignment_of, tensors),
    )  # fmt: skip

    def make() -> FixedLaunch:
        layouts = layouts_of(call, out=result, rest=tensors[4])
        described = made.describer(call.key, call.value)
        blocks = made.spec.block_size if rows is None else rows.block_size
        batch, heads, length = call.query.shape[:3]
        if call.packed is None:
            tiles = tile_count(rows, length, config.block_m)
            keys = call.key.shape[2]
        else:
            blocks = (_PACKED_BLOCK, blocks[1])
            tiles = call.packed.blocks.shape[0] * tiles_a_block(call.packed, config.block_m)
            keys = call.packed.max_kv
        fixed = {
            **call_sizes(call),
            **made.described(described, config.block_n, key=call.key, value=call.value),
            "tiles": tiles,
            "head_group": made.head_group(batch * heads, keys),
        }
        return made.fixed_launch(
            forward.forward_kernel,
            tiles * batch * heads,
            {
                **mods.reading(),
                "Q_BLOCK": blocks[0],
                "KV_BLOCK": blocks[1],
                **wanted_outputs(out),
                "DESCRIBED": described,
                "BESIDE": beside(described, call.key, call.value),
                "MASK_READS": made.mask_reads_pairs,
                "EVEN": even,
                "OVERLAP": config.overlap,
                "PARTS": config.parts,
                "DECODED": decoded_rows(made.spec, call),
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
            },
            config.options,
            fixed,
            layouts,
        )

    values = made.common_values(call, rows)
    values.update(output_values(out, result))
    values["query"], values["key"], values["value"] = tensors[:3]
    values["key_rows"], values["value_rows"] = call.key, call.value
    if call.packed is not None:
        values |= packed_values(call, call.packed, config.block_m)
    return made.kept(call, key, make).launch(values)


def tiles_a_block(packed: PackedRows, tile: int) -> int:
    """Return the number of tiles of `tile` rows of a row of blocks that may have rows."""
    return max(1, -(-min(packed.max_q, _PACKED_BLOCK) // tile))


def packed_values(call: Call, packed: PackedRows, tile: int) -> dict[str, object]:
    """Return the kernels' arguments ``sequences``, and the scales where there are some."""
    values: dict[str, object] = {"sequences": sequences_of(call, packed, tile)}
    if call.k_scale is not None and call.v_scale is not None:
        values["k_scale"] = call.k_scale, *call.k_scale.stride()
        values["v_scale"] = call.v_scale, *call.v_scale.stride()
    return values


def sequences_of(call: Call, packed: PackedRows, tile: int) -> tuple[object, ...]:
    """Return the kernels' argument ``sequences``: pointers, then sizes."""
    table = packed.page_table
    stand_in = packed.slots
    return (
        packed.blocks, packed.q_offsets, packed.q_starts, packed.kv_lengths, packed.slots,
        or_else(packed.kv_offsets, stand_in), or_else(table, stand_in),
        or_else(packed.table_rows, stand_in), packed.slots.shape[0],
        tiles_a_block(packed, tile), packed.max_kv,
        call.key.shape[2 if table is None else 0], 0 if table is None else table.stride(0),
        0 if table is None else table.shape[0], int(packed.table_rows is not None), packed.max_q,
    )  # fmt: skip


def launch_decode(made: Programs, call: Call, out: Outputs) -> None:
    """Launch the splits of a decoding call, then the kernel that combines them."""
    packed = {} if call.packed is None else packed_values(call, call.packed, _PACKED_BLOCK)
    split = made.launch("decode", call, partial(_split_launch, made, call, out, packed))
    combination = _combine_launch(made, call, out, packed)
    launch_all((split, combination), call.query.device)


def _split_launch(
    made: Programs, call: Call, out: Outputs, sequences: dict[str, object], config: Config
) -> Launch:
    spec = made.spec
    mods = made.mods(call, False)
    tensors = call.query, call.key, call.value
    # Decoding calls repeat token by token and layer by layer: their common part is cached.
    key = ("anyflex_triton.decode", config, mods.key, *map(alignment_of, tensors))

    def make() -> FixedLaunch:
        units, heads, length = call.query.shape[:3]
        keys = call.key.shape[2]
        if call.packed is not None:
            units = call.packed.blocks.shape[0]
            length, keys = call.packed.max_q, call.packed.max_kv
        packed = packed_heads(spec, call)
        decoded = decoded_rows(spec, call)
        rows = _decoding_tile(packed * length if decoded == 0 else packed)
        splits = splits_of(spec, call)
        pieces = -(-max(keys, 1) // config.block_n)
        fixed = {
            **call_sizes(call), "sums_at": splits.sums_at, "splits": splits.number,
            "split_length": -(-pieces // splits.number) * config.block_n,
        }  # fmt: skip
        # Imported here because most processes don't decode, and Triton reads the source of each
        # function.
        from anyflex_triton import decode

        return made.fixed_launch(
            decode.decode_kernel,
            units * (heads // packed) * splits.number,
            {
                # Decoding tiles have one part.
                "D": padded(spec.head_dim),
                "DV": padded(spec.value_head_dim),
                "SCORE_MOD": mods.score_mod,
                "MASK_MOD": mods.mask_mod,
                "KV_BLOCK": spec.block_size[1],
                "PACKED": packed,
                "DESCRIBED": made.own_describer(call.key, call.value),
                "LEADS": made.overlaps,
                "DECODED": decoded,
                "BLOCK_M": rows,
                "BLOCK_N": config.block_n,
            },
            config.options,
            fixed,
            layouts_of(call),
        )

    values = made.common_values(call, None if call.mask is None else mask_rows(call.mask))
    values["query"], values["key"], values["value"] = tensors
    values.update(sequences)
    (values["partial_out"],) = out.workspace
    return made.kept(call, key, make).launch(values)


def _combine_launch(
    made: Programs, call: Call, out: Outputs, sequences: dict[str, object]
) -> Launch:
    """Return the launch that combines the splits' results."""
    rest, tops = kept_of(out.saved)
    scored = made.mods(call, False).score_mod is not None
    key = (
        "anyflex_triton.combine", scored, out.lse is None, out.max_scores is None,
        rest is None, tops is None, out.out.stride(), alignment_of(out.out),
    )  # fmt: skip

    def make() -> FixedLaunch:
        o_layout = layout_of(out.out)
        batch, heads, length = call.query.shape[:3]
        splits = splits_of(made.spec, call)
        decoded = decoded_rows(made.spec, call)
        programs = batch * heads * length
        if call.packed is not None and decoded:
            programs = call.packed.blocks.shape[0] * heads * min(call.packed.max_q, decoded)
        fixed = {
            **call_sizes(call), "o_strides": o_layout.strides, "sums_at": splits.sums_at,
            "splits": splits.number,
        }  # fmt: skip
        from anyflex_triton import decode  # here, as above

        return made.fixed_launch(
            decode.combine_kernel,
            programs,
            {
                "DV": padded(made.spec.value_head_dim),
                "SPLITS": 16,
                "UNIT": o_layout.unit,
                "SCORED": scored,
                **wanted_outputs(out),
                "FOLLOWS": made.overlaps,
                "DECODED": decoded,
            },
            overlapping(Options(4, 1), made.overlaps),
            fixed,
        )

    (partial_out,) = out.workspace
    own = {**sequences, "partial_out": partial_out, "scale": call.scale}
    if call.sinks is not None:
        own["sinks"] = call.sinks
    return made.kept(call, key, make).launch({**own, **output_values(out, partial_out)})
