"""Launch of forward on Hopper for packed queries: which calls it takes, and its descriptors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anyflex.plugin import Call, MaskViews, Outputs, PackedRows, Spec, TensorSpec
from anyflex_cuda import forward_call
from anyflex_cuda.forward_call import (
    COUNTER,
    DESCRIBED,
    Tiles,
    boxes_for,
    program_for,
    refusal,
    refused_spec,
    tiles_for,
)
from anyflex_cuda.gluon_kernels import GluonPrograms
from anyflex_cuda.gluon_launch import strides_of
from anyflex_cuda.kernel_arguments import TYPES
from anyflex_cuda.packed_tile_list import LIST_HEADER, PACKED_BLOCK, TILE_WORDS, tile_kernel
from anyflex_triton.building import (
    FixedLaunch,
    Options,
    Program,
    Programs,
    call_sizes,
    mask_rows,
    output_values,
    packed_values,
    wanted_outputs,
)

__all__ = [
    "PackedForward",
    "bounded_boxes",
    "tiles_of_packed",
]

_BLOCK: int = PACKED_BLOCK.value
_PAGE_MULTIPLE = 16
"""Rows that a page's size is a multiple of: fewer don't fill the patterns of shared memory."""
_FAR = 1 << 30
"""Size of a descriptor's outer dimension of rows: more than any tensor that is taken has, so that
it cuts nothing off. `packed_tiles` keeps rows within the tensor, and the inner dimension cuts."""
_KEPT = 64
"""Maximum number of layouts of calls whose launches are kept."""

Boxed = tuple[list[int], list[int], list[int]]


def bounded_boxes(tensor: Tensor, box: tuple[int, ...]) -> Boxed:
    """Return the arguments of a descriptor of `packed_tiles` after its address.

    Args:
        tensor: [1, H, rows, dims], or a pool of pages [P, H, page, dims].
        box: of `boxes_for`.
    """
    _, heads, rows, dims = tensor.shape
    _, head, row, _ = strides_of(tensor.shape, tensor.stride(), tensor.element_size())
    # A box that is longer than the tensor isn't cut by its coordinates.
    return [heads, _FAR, min(box[-2], rows), dims], [head, row, row, 1], list(box)


def tiles_of_packed(spec: Spec) -> Tiles:
    """Return the tiles of packed calls."""
    tiles = tiles_for(spec)
    if tiles.consumers == 2:
        # The producer reads records, and with small pages looks up several for each step.
        tiles = tiles._replace(registers=(216, 72) if spec.page_size % 64 else (224, 56))
    is_plain = spec.score_graph is None and not spec.captured
    if is_plain and max(spec.head_dim, spec.value_head_dim) <= 128:
        # Tiles of short sequences have few steps to load the next one's queries in. Mods that
        # read take more shared memory.
        tiles = tiles._replace(query_slots=2)
    return tiles


class PackedForward:
    """Forward of a spec's packed calls. Thread-safe.

    Args:
        portable: the spec's programs in plain Triton.
        made: those in Gluon.
    """

    def __init__(self, portable: Programs, made: GluonPrograms) -> None:
        self._portable = portable
        self._made = made
        self._tiles = tiles_of_packed(made.spec)
        self._refused = _refused_spec(made.spec, self._tiles)
        self._laid: dict[object, FixedLaunch] = {}
        self._lists: dict[tuple[torch.device, bool], FixedLaunch] = {}

    def refusal(self, call: Call) -> str | None:
        """Return why a packed call takes the portable kernel, or None."""
        reason = self._refused or refusal(call)
        if reason is not None:
            return reason
        for name in ("query", "key", "value"):
            reason = _refused_rows(name, getattr(call, name))
            if reason is not None:
                return reason
        return None

    def workspace(self, call: Call) -> tuple[TensorSpec, ...]:
        """Return the workspace of a call that isn't refused."""
        items, programs = self._grid(call)
        return COUNTER if programs < items else ()

    def describe(self) -> str:
        """Return ``hopper packed 128x128``."""
        return f"hopper packed {self._tiles.block_m}x{self._tiles.block_n}"

    def launch(self, call: Call, out: Outputs, counter: Tensor | None, short_rows: int) -> None:
        """Launch the kernel for a call that isn't refused, on the current stream; for a step's
        first layer, the one that lists its tiles before. What they read on the device may change
        in a captured graph. Padding rows are written too.

        Args:
            counter: the tensor of `workspace`, if any.
            short_rows: sequences with at most this many query rows are left to another kernel.
        """
        made, packed, result = self._made, _rows_of(call), out.out
        mods = made.mods(call, False)
        tensors = {"query": call.query, "key": call.key, "value": call.value, "out": result}
        _, programs = self._grid(call)
        # Launches don't depend on the number of query rows, which changes with each step, where
        # there are as many as a box has.
        key = (
            call.query.device, programs, mods.key, out.lse is None, out.max_scores is None,
            call.key.shape[:2], call.query.shape[1], min(call.query.shape[2], _BLOCK),
            min(call.key.shape[2], _BLOCK),
            *[tensor.stride() for tensor in tensors.values()],
        )  # fmt: skip
        laid = self._laid.get(key)
        if laid is None:
            if len(self._laid) >= _KEPT:
                self._laid.clear()
            program = program_for(made, self._tiles, mods, False, wanted_outputs(out))
            laid = _laid(program, programs, tensors, boxes_for(self._tiles, made.spec))
            self._laid[key] = laid
        values = {
            **made.common_values(call, None if call.mask is None else mask_rows(call.mask)),
            **output_values(out, result),
            **tensors,
            **call_sizes(call),
            "counter": result if counter is None else counter,
            **packed_values(call, packed, self._tiles.block_m),
            "tiles": 0,
            "head_group": made.head_group(call.query.shape[1], packed.max_kv),
        }
        values["tile_list"] = self._tile_list(call, values, short_rows)
        laid.run(call.query.device, values)

    def _tile_list(self, call: Call, values: Mapping[str, object], short_rows: int) -> Tensor:
        """Return what `tile_kernel` writes: once for the layers of a step that have one mask and
        as many rows of keys."""
        packed, mask, block_n = _rows_of(call), call.mask, self._tiles.block_n
        of_heads = mask is not None and mask.shape[1] > 1
        # A mask's identity is its own as long as it is kept.
        key = "anyflex_cuda.tiles", id(mask), call.key.shape[2], short_rows, block_n

        def make() -> tuple[Tensor, MaskViews | None]:
            rows = packed.blocks.shape[0]
            words = LIST_HEADER.value + rows * TILE_WORDS.value
            tiles = torch.empty(words, dtype=torch.int32, device=call.query.device)
            constants = {
                "OF_HEADS": of_heads, "KV_BLOCK": self._made.spec.block_size[1],
                "BLOCK_N": block_n,
            }  # fmt: skip
            lists = self._lists.get((tiles.device, of_heads))
            if lists is None:
                lists = self._portable.fixed_launch(
                    tile_kernel, 1, constants, Options(8, 1), {}, types=TYPES
                )
                self._lists[tiles.device, of_heads] = lists
            given = {**values, "tile_list": tiles, "short_rows": short_rows, "rows": rows}
            lists.run(tiles.device, given)
            return tiles, mask

        tiles: Tensor = packed.once(key, tuple, make)[0]
        return tiles

    def _grid(self, call: Call) -> tuple[int, int]:
        """Return the number of tiles that a call may have, and the number of programs."""
        items = _rows_of(call).blocks.shape[0] * call.query.shape[1]
        return items, min(items, forward_call.cores(call.query.device))


def _rows_of(call: Call) -> PackedRows:
    assert call.packed is not None
    return call.packed


def _refused_spec(spec: Spec, tiles: Tiles) -> str | None:
    """Return why no packed call of a spec takes Hopper's forward, or None."""
    if spec.page_size % _PAGE_MULTIPLE:
        return f"pages of {spec.page_size} rows, which aren't a multiple of {_PAGE_MULTIPLE}"
    if tiles.block_m != _BLOCK:
        return f"tiles of {tiles.block_m} query rows, where blocks have {_BLOCK}"
    if spec.kv_storage != "plain":
        return f"keys and values stored as {spec.kv_storage}"
    return refused_spec(spec, tiles)


def _refused_rows(name: str, tensor: Tensor) -> str | None:
    """Return why a tensor of a call has no descriptor, or None."""
    pages, _, rows, _ = tensor.shape
    page, _, row, _ = strides_of(tensor.shape, tensor.stride(), tensor.element_size())
    if pages > 1 and page % row:
        return f"pages of {name} of {page} elements, which aren't a multiple of a row's {row}"
    if (pages - 1) * (page // row) + rows >= _FAR:
        return f"{name} of 2^30 rows"
    return None


def _laid(
    program: Program, programs: int, tensors: Mapping[str, Tensor],
    boxes: Mapping[str, tuple[int, ...]],
) -> FixedLaunch:  # fmt: skip
    fixed: dict[str, object] = {f"{t[0]}_strides": x.stride()[:3] for t, x in tensors.items()}
    for name, box in boxes.items():
        tensor = tensors.get(DESCRIBED[name])
        if tensor is not None:
            fixed[name] = bounded_boxes(tensor, box)
    return FixedLaunch(program, programs, fixed, DESCRIBED)
