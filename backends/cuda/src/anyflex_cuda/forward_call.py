"""Launch of forward on Hopper: which calls its kernel takes, and with which tiles.

`blackwell_call` uses the parts that don't depend on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from anyflex.plugin import Call, Outputs, Spec, TensorSpec
from anyflex_cuda import hopper_forward
from anyflex_cuda.gluon_kernels import GluonPrograms, mod_constants
from anyflex_cuda.gluon_launch import boxes_of, descriptor_type, has_boxes, is_boxed
from anyflex_cuda.kernel_arguments import ROW_STRIDES
from anyflex_cuda.tile_order import tile_order
from anyflex_triton.building import (
    FixedLaunch,
    Mods,
    NeededNext,
    Options,
    Program,
    call_sizes,
    compile_with_next,
    mask_rows,
    output_values,
    pair_kinds,
    wanted_outputs,
)

__all__ = [
    "COUNTER",
    "DESCRIBED",
    "Fit",
    "Tiles",
    "boxed_layouts",
    "boxed_program",
    "boxes_for",
    "cores",
    "fit_of",
    "launch_boxed",
    "launch_forward",
    "parts_of",
    "program_for",
    "refusal",
    "refused_spec",
    "small_tiles_for",
    "tiles_at_once",
    "tiles_for",
]

_ROWS = 64
"""Query rows of a consumer warpgroup."""
_CORES = 132
"""Multiprocessors of an H100 or an H200, which CPU tensors stand in for."""
OUTS = 8
"""Maximum number of layouts of outputs that a fit keeps. Few occur, because core allocates outputs
in the query's layout."""

COUNTER = (TensorSpec((1,), torch.int32, zeroed=True),)
"""Counter of tiles. It is left out where each program takes one tile, which saves two driver
calls: allocating it and setting it to zero."""

DESCRIBED = {
    f"{letter}{part}_desc": name
    for letter, name in zip("qkvor", ("query", "key", "value", "out", "rest"), strict=True)
    for part in ("", "2")
}
"""Map from the name of a descriptor, of the columns' first or second part, to the name of its
tensor."""

Lengths = tuple[int, ...]
"""Shape or strides of a tensor."""


class Tiles(NamedTuple):
    """Compile-time configuration of the kernel.

    Args:
        consumers: number of consumer warpgroups, with 64 query rows each.
        block_n: keys of a step.
        stages: pipeline stages: steps whose keys and values are in shared memory.
        pinned: whether a softmax overlaps the product of the previous weights.
        skips: whether the accumulator is rescaled only where some row_max has grown.
        apart: whether steps that may have dead pairs have a loop of their own, so that the other
            steps' loop has no mask code. That takes 0.94 to 1.01 of the time.
        chains: number of dependency chains, 1 or 8, in which a thread reduces a row's scores to
            their maximum. 8 are faster with two consumers of head dim 64, and where wide queries
            have values of 128 columns.
        dynamic: whether programs take the next free tile; else each takes every n-th.
        registers: registers per thread of the consumers, and of the producer.
        query_slots: number of tiles whose queries are in shared memory.
    """

    consumers: int
    block_n: int
    stages: int
    pinned: bool
    skips: bool
    apart: bool
    chains: int
    dynamic: bool
    registers: tuple[int, int]
    query_slots: int = 1

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return self.consumers * _ROWS


def tiles_for(spec: Spec) -> Tiles:
    """Return the spec's tiles."""
    dims = max(spec.head_dim, spec.value_head_dim)
    # Under masks that read tensors rows have few steps, most of which have dead pairs.
    graph = spec.mask_graph
    apart = graph is not None and all(node.operation != "load" for node in graph.nodes)
    if dims <= 64:
        # Three consumers are faster without a mask; under a mask, whose blocks must permit them,
        # only where rows are long.
        block = 128 if spec.q_layout == "packed" else spec.block_size[0]
        # Values by pairs take registers that three consumers don't have, except for one table of
        # distances without a mask.
        kinds = pair_kinds(spec)
        most = ["distances"] if spec.mask_graph is None else []
        thirds = block % (3 * _ROWS) == 0 and (block % 128 != 0 or kinds in ([], most))
        if thirds:
            return Tiles(3, 128, 3, True, True, apart, 1, True, (160, 24))
        return Tiles(2, 128, 3, False, False, apart, 8, True, (240, 24))
    scored = spec.score_graph is not None
    if dims <= 96:
        # With a score mod values have 96 columns too, which leaves room for a third stage.
        return Tiles(2, 128, 3 if scored else 2, False, False, apart, 1, True, (240, 24))
    if dims <= 128:
        # Under masks that read nothing steps are short, and most have no dead pair.
        light = spec.mask_kind == "runs" and not scored and not spec.captured
        return Tiles(2, 128, 2, light, light, apart, 1, True, (240, 24))
    if spec.value_head_dim <= 128 and shares_room(spec):
        return Tiles(2, 128, 2, False, False, apart, 8, True, (240, 24))
    # Measured: both together are faster with 256 columns, and slower with 192.
    full = dims > 192
    return Tiles(2, 64, 2, full, full, apart, 1, True, (240, 24))


def small_tiles_for(spec: Spec) -> Tiles:
    """Return the tiles of calls whose tiles all run at once: one consumer each, so that more
    multiprocessors work. See `tiles_at_once`."""
    dims = max(spec.head_dim, spec.value_head_dim)
    stages = 3 if dims <= 64 else 2
    return Tiles(1, 128 if dims <= 128 else 64, stages, True, False, False, 1, True, (240, 24))


def tiles_at_once(call: Call) -> bool:
    """Return whether there is a multiprocessor for each tile of one consumer."""
    batch, heads, length, _ = call.query.shape
    return -(-length // _ROWS) * batch * heads <= cores(call.query.device)


def refusal(call: Call) -> str | None:
    """Return why a call takes the portable kernel although its spec doesn't have to, or None.

    Decided by the call's layout, before anything is launched.
    """
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        if tensor.numel() == 0:
            return f"{name} is empty"
        if not is_boxed(tensor):
            return (
                f"TMA loads no boxes of {name}: its last dimension isn't contiguous, or its "
                "pointer and its other strides aren't multiples of 16 bytes"
            )
    return None


def refused_spec(spec: Spec, tiles: Tiles) -> str | None:
    """Return why no call of a spec takes Hopper's kernel, or None.

    Args:
        tiles: from `tiles_for`; those of `small_tiles_for` divide them.
    """
    if spec.dtype.itemsize != 2:
        return f"{spec.dtype}: wgmma takes bfloat16 and float16"
    if spec.value_head_dim > max(sum(parts_of(spec.head_dim)), 128):
        return "values of more than 128 columns, and more than the queries' tiles have"
    if spec.value_head_dim * spec.dtype.itemsize % 16:
        return "rows of out aren't multiples of 16 bytes"
    if spec.mask_kind == "runs" and spec.block_size[0] % tiles.block_m:
        return f"the mask's blocks of {spec.block_size[0]} rows aren't made of whole tiles"
    return None


def parts_of(dim: int) -> tuple[int, ...]:
    """Return the columns of each part of a tile in shared memory, and of a product: powers of
    two."""
    for parts in ((64,), (64, 32), (128,), (128, 64)):
        if dim <= sum(parts):
            return parts
    return (256,)


def value_parts_of(spec: Spec) -> tuple[int, ...]:
    """Return the parts of values and of out."""
    if spec.value_head_dim > 128:
        # out must fit the queries' buffer.
        return parts_of(spec.head_dim)
    parts = parts_of(spec.value_head_dim)
    # A product of 32 columns takes as long as one of 64. The memory and registers that two parts
    # save are worth it only with a score mod; and out in one part fits wide queries' buffer.
    whole = spec.score_graph is None or spec.head_dim > 128
    return (128,) if len(parts) == 2 and whole else parts


def shares_room(spec: Spec) -> bool:
    """Return whether out is stored from the queries' buffer: there is no room for both, and out's
    parts are the queries' first ones."""
    parts, value_parts = parts_of(spec.head_dim), value_parts_of(spec)
    # A dense bias takes 4 KiB, and training 32 KiB for rest.
    full = spec.head_dim > 96 and spec.needs_backward and "dense" in pair_kinds(spec)
    return (full or spec.head_dim > 128) and parts[: len(value_parts)] == value_parts


def _descriptors_of(tensor: str, boxes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of a tensor's descriptors."""
    return [name for name in boxes if DESCRIBED[name] == tensor]


def boxed_program(
    made: GluonPrograms, function: Any, boxes: Mapping[str, tuple[int, ...]], mods: Mods,
    even: bool, wanted: Mapping[str, bool], constants: Mapping[str, object],
) -> Program:  # fmt: skip
    """Return a kernel of forward in Gluon, compiled for a class of calls.

    Args:
        boxes: from `boxes_for`.
        mods: from `GluonPrograms.mods`.
        even: whether the number of keys and the mask's block size are multiples of a step's.
        wanted: from `wanted_outputs`.
        constants: those that only `function` has.
    """
    spec = made.spec
    # A missing part has no descriptor, because encoding one takes the host a microsecond.
    absent = DESCRIBED.keys() - boxes.keys()
    if not wanted["WANT_REST"]:
        absent |= {*_descriptors_of("rest", boxes), "rest", "r_strides", "tops"}
    if spec.mask_kind == "none" or made.is_packed:
        absent |= {"tile_order", "order_strides", "ordered"}
    return made.program(
        function,
        {
            **dict.fromkeys(absent),
            **mod_constants(mods),
            "Q_BLOCK": spec.block_size[0],
            "KV_BLOCK": spec.block_size[1],
            "D": sum(boxes[name][-1] for name in _descriptors_of("query", boxes)),
            "DV": sum(boxes[name][-1] for name in _descriptors_of("value", boxes)),
            **wanted,
            "EVEN": even,
            **constants,
        },
        Options(4, 1),
        types={
            **{name: descriptor_type(spec.dtype, box) for name, box in boxes.items()},
            **ROW_STRIDES,
        },
    )


def program_for(
    made: GluonPrograms, tiles: Tiles, mods: Mods, even: bool, wanted: Mapping[str, bool]
) -> Program:
    """Return Hopper's kernel for a class of calls. Arguments are as in `boxed_program`."""
    return boxed_program(
        made, hopper_forward.forward_kernel, boxes_for(tiles, made.spec), mods, even, wanted,
        {
            "READ_ROWS": mods.read_rows,
            "READ_COLUMNS": mods.read_columns,
            "MASK_SCORES": mods.mask_scores_of_read,
            "READ_TILE": mods.read_tile,
            "READ_STEP": mods.read_step,
            "SCORE_MOD_OF_READ": mods.score_mod_of_pairs or mods.score_mod_of_read,
            "DYNAMIC": tiles.dynamic,
            "PINNED": tiles.pinned,
            "SKIPS": tiles.skips,
            "APART": tiles.apart,
            "CHAINS": tiles.chains,
            "SHARES_ROOM": shares_room(made.spec),
            "DV": sum(value_parts_of(made.spec)),
            "CONSUMERS": tiles.consumers,
            "QUERY_SLOTS": tiles.query_slots,
            "STAGES": tiles.stages,
            "BLOCK_N": tiles.block_n,
            "CONSUMER_REGISTERS": tiles.registers[0],
            "PRODUCER_REGISTERS": tiles.registers[1],
        },
    )  # fmt: skip


def boxes_for(tiles: Tiles, spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return the boxes that one load or store moves, by names of descriptors."""
    parts = parts_of(spec.head_dim)
    value_parts = value_parts_of(spec)
    boxes: dict[str, tuple[int, ...]] = {
        f"{letter}{number}_desc": (1, 1, rows, columns)
        for letter, rows, each in (
            ("q", _ROWS, parts), ("k", tiles.block_n, parts), ("v", tiles.block_n, value_parts),
            ("o", _ROWS, value_parts), ("r", _ROWS, value_parts),
        )
        for number, columns in zip(("", "2"), each, strict=False)
    }  # fmt: skip
    if spec.page_size:
        # Shared memory has 64 columns of all of a step's rows, then the next 64.
        rows = math.gcd(spec.page_size, tiles.block_n)
        for name, box in boxes.items():
            if name[0] in "kv":
                boxes[name] = (1, 1, rows, min(box[3], 64))
    return boxes


class Fit(NamedTuple):
    """Launch parameters that follow from a call's shapes and strides alone.

    Args:
        block_m: query rows of a tile.
        workspace: the counter of tiles, or nothing.
        even: as in `boxed_program`.
        fixed: returns the launch, given the program and the strides of out and, if it is there,
            of rest.
        ready: launches of such calls so far, by their mods, wanted outputs and strides. With the
            portable kernels' cache (`Programs.kept`) and launch instead, a small call took the
            host 2 to 3 us more than the 23 it takes.
    """

    block_m: int
    workspace: tuple[TensorSpec, ...]
    even: bool
    fixed: Callable[[Program, Lengths, Lengths | None], FixedLaunch]
    ready: dict[object, FixedLaunch]


def boxed_layouts(call: Call) -> dict[str, tuple[Lengths, Lengths]] | None:
    """Return shape and strides of query, key and value, or None where some has no boxes."""
    query, key, value = call.query, call.key, call.value
    found: dict[str, tuple[Lengths, Lengths]] = {
        "query": (query.shape, query.stride()),
        "key": (key.shape, key.stride()),
        "value": (value.shape, value.stride()),
    }
    size = query.element_size()
    for shape, strides in found.values():
        if not has_boxes(shape, strides, size):
            return None
    return found


def fit_of(
    made: GluonPrograms, block_m: int, block_n: int, boxes: Mapping[str, Lengths], call: Call
) -> Fit | None:
    """Return a call's `Fit`, or None where `refusal` refuses it for a reason other than alignment
    of pointers.

    Args:
        block_m, block_n: query rows of a tile, keys of a step.
        boxes: from `boxes_for`.
    """
    spec = made.spec
    size = spec.dtype.itemsize
    layouts = boxed_layouts(call)
    if layouts is None:
        return None
    batch, heads, length, _ = call.query.shape
    keys = call.key.shape[2]
    count = -(-length // block_m)
    programs = min(count * batch * heads, cores(call.query.device))
    values = {
        **call_sizes(call),
        **_boxed(layouts, size, boxes),
        "tiles": count,
        "head_group": made.head_group(batch * heads, keys),
    }
    shape = (batch, heads, length, call.value.shape[3])

    def fixed(program: Program, strides: Lengths, rest_strides: Lengths | None) -> FixedLaunch:
        outs = {"out": (shape, strides)}
        if rest_strides is not None:
            outs["rest"] = (shape, rest_strides)
        return FixedLaunch(program, programs, {**values, **_boxed(outs, size, boxes)}, DESCRIBED)

    return Fit(
        block_m,
        COUNTER if programs < count * batch * heads else (),
        keys % block_n == 0 and spec.block_size[1] % block_n == 0,
        fixed,
        {},
    )


def _boxed(
    layouts: Mapping[str, tuple[Lengths, Lengths]], size: int, boxes: Mapping[str, Lengths]
) -> dict[str, object]:
    """Return strides and descriptors of tensors, given shape and strides of each.

    Args:
        size: bytes of an element.
        boxes: from `boxes_for`.
    """
    found: dict[str, object] = {}
    for tensor, layout in layouts.items():
        found[f"{tensor[0]}_strides"] = layout[1][:3]
        for name in _descriptors_of(tensor, boxes):
            found[name] = boxes_of(*layout, size, boxes[name])
    return found


def launch_forward(
    made: GluonPrograms, tiles: Tiles, fit: Fit, call: Call, out: Outputs,
    needed_next: NeededNext,
) -> None:  # fmt: skip
    """Launch the kernel for a call without `refusal`, on the current stream.

    Args:
        fit: the call's `Fit`.
        needed_next: returns the programs that will be needed after the kernel, which are compiled
            concurrently.
    """

    def program_of(mods: Mods) -> Program:
        program = program_for(made, tiles, mods, fit.even, wanted_outputs(out))
        compile_with_next(made.spec, program, call, out, needed_next)
        return program

    launch_boxed(made, fit, call, out, program_of)


def launch_boxed(
    made: GluonPrograms, fit: Fit, call: Call, out: Outputs,
    program_of: Callable[[Mods], Program],
) -> None:  # fmt: skip
    """Launch a `boxed_program` on the current stream.

    Args:
        program_of: returns the kernel for such calls and outputs, given the mods; called where it
            isn't in `Fit.ready`.
    """
    query, result, mask = call.query, out.out, call.mask
    values = made.common_values(call, None if mask is None else mask_rows(mask))
    values.update(output_values(out, result))
    values["query"], values["key"], values["value"] = query, call.key, call.value
    values["counter"] = out.workspace[0] if out.workspace else result
    if mask is not None:
        # Order doesn't matter where each program has one tile.
        order = tile_order(mask, fit.block_m) if fit.workspace else None
        values["ordered"] = int(order is not None)
        values["tile_order"] = values["offsets"] if order is None else order.tiles
        values["order_strides"] = (0, 0) if order is None else order.strides
    rest_strides = out.saved[0].stride() if out.saved else None
    mods = made.mods(call, fit.even)
    strides = result.stride()
    key = (mods.key, out.lse is None, out.max_scores is None, strides, rest_strides)
    ready = fit.ready.get(key)
    if ready is None:
        if len(fit.ready) >= OUTS:
            fit.ready.clear()
        ready = fit.ready[key] = fit.fixed(program_of(mods), strides, rest_strides)
    ready.run(query.device, values)


@lru_cache
def cores(device: torch.device) -> int:
    """Return the number of multiprocessors, each of which holds one program."""
    if device.type == "cpu":
        return _CORES
    return torch.cuda.get_device_properties(device).multi_processor_count
