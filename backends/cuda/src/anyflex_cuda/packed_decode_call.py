"""Launching decoding of packed sequences on Hopper: which calls its kernel takes.

Everything is sized by bounds, so that a captured graph can be replayed with other lengths and
pages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anyflex.plugin import Call, MaskViews, Outputs, PackedRows, Spec
from anyflex_cuda import decode_steps, forward_call, packed_steps
from anyflex_cuda.decode_call import (
    MARK,
    DecodeFit,
    boxes_for,
    decode_program,
    decode_tiles,
    how_added,
    parts_workspace,
    refused_decode_spec,
    sums_launch,
)
from anyflex_cuda.forward_call import DESCRIBED
from anyflex_cuda.gluon_kernels import GluonPrograms
from anyflex_cuda.gluon_launch import boxes_of
from anyflex_cuda.kernel_arguments import TYPES
from anyflex_triton.building import (
    BYTES,
    FixedLaunch,
    Layout,
    Mods,
    Options,
    Programs,
    call_sizes,
    launch_all,
    layout_like,
    layout_of,
    mask_rows,
    output_values,
    packed_values,
    padded,
    wanted_outputs,
)

__all__ = ["PackedDecode", "short_rows"]

_TILE_ROWS = 64
"""Query rows of a decoding tile: those of all heads that share a key head."""
_STORED_ROWS = 32
"""Query rows of a tile of keys stored in 8 bits: 64 run out of registers."""
_PAGE_MULTIPLE = 16
"""Rows that a page's size is a multiple of: those that are loaded at a time where it isn't one of
64."""
_BLOCK = 128
"""Query rows of a row of blocks."""
_MOST_ADDED = 2560
"""Maximum number of rows of a unit's parts that one program adds up where one sequence has nearly
all steps. With 128 columns it reads 1.3 MB in about 10 us."""
_KEPT = 256
"""Maximum number of classes of calls whose launches are kept."""


def short_rows(spec: Spec) -> int:
    """Return the most query rows of a sequence that is decoded: a tile holds those of all heads
    that share a key head."""
    return max(_most_tile_rows(spec) // spec.gqa_ratio, 1)


def _most_tile_rows(spec: Spec) -> int:
    return _TILE_ROWS if spec.kv_storage == "plain" else _STORED_ROWS


class PackedDecode:
    """Decoding of a spec's packed calls. Thread-safe.

    Args:
        portable: the spec's programs in plain Triton.
        made: those in Gluon.
    """

    def __init__(self, portable: Programs, made: GluonPrograms) -> None:
        self._portable = portable
        self._made = made
        self._tiles = decode_tiles(made.spec)
        self._refused = _refused_spec(made.spec)
        self._kept: dict[object, list[FixedLaunch]] = {}

    def refusal(self, call: Call) -> str | None:
        """Return why no sequence of a call is decoded by Hopper's kernel, or None."""
        packed = _rows_of(call)
        reason = self._refused or forward_call.refusal(call)
        if reason is not None:
            return reason
        if call.mask is not None and call.mask.shape[1] > 1:
            return "each head has a mask of its own, and its tile is of all that share a key head"
        if packed.slots.shape[0] * call.key.shape[1] * self._most(packed) >= 1 << 31:
            return "more steps than 32 bits count"
        return None

    def _most(self, packed: PackedRows) -> int:
        """Return the maximum number of steps of a sequence."""
        return max(-(-packed.max_kv // self._tiles.block_n), 1)

    def fit(self, call: Call) -> DecodeFit:
        """Return the launch parameters of a call that isn't refused; `fixed` has numbers that may
        differ from call to call."""
        packed, spec = _rows_of(call), self._made.spec
        sequences, kv_heads, most = packed.slots.shape[0], call.key.shape[1], self._most(packed)
        most_rows = max(min(packed.max_q, short_rows(spec)), 1)
        unit_rows = most_rows * spec.gqa_ratio
        programs = forward_call.cores(call.query.device) * self._tiles.programs
        # One sequence may have nearly all steps, but mostly they have alike many.
        most_parts = programs // kv_heads + 2
        _, at_once = how_added(most_parts, unit_rows)
        adds, _ = how_added(programs // (kv_heads * sequences) + 2, unit_rows)
        adds = adds and most_parts * unit_rows <= _MOST_ADDED
        return DecodeFit(
            (parts_workspace(spec, sequences * kv_heads, programs, unit_rows),),
            (decode_steps.NONE if call.mask is None else decode_steps.EACH).value,
            False,
            programs,
            adds,
            at_once,
            sequences * call.query.shape[1] * most_rows,
            {"most": most, "most_rows": most_rows, "batch": sequences},
        )

    def _tile_rows(self, fit: DecodeFit) -> int:
        """Return the rows of a tile: the fewest that hold a unit's, where that saves registers and
        instructions."""
        spec, most_rows = self._made.spec, fit.fixed["most_rows"]
        if spec.kv_storage == "plain":
            return _TILE_ROWS
        assert isinstance(most_rows, int)
        return padded(most_rows * spec.gqa_ratio)

    def launch(self, fit: DecodeFit, call: Call, out: Outputs, alone: bool) -> None:
        """Launch decoding on the current stream: for a step's first layer the kernels that find
        its shares, then the main kernel, then the kernel that adds up parts unless the main one
        does.

        Args:
            out: its workspace begins with the fit's.
            alone: whether all sequences are decoded. If so, padding rows are written too.
        """
        made = self._made
        o_layout = layout_of(out.out)
        mods = made.mods(call, fit.even)
        wanted = wanted_outputs(out)
        # One dict serves all kernels: a name means the same in each of them.
        values = made.common_values(call, None if call.mask is None else mask_rows(call.mask))
        values.update(output_values(out, out.workspace[0]))
        values.update(call_sizes(call))
        values.update(fit.fixed)
        values["query"], values["key"], values["value"] = call.query, call.key, call.value
        values["partial_out"] = values["counts"] = out.workspace[0]
        values.update(packed_values(call, _rows_of(call), _BLOCK))
        values["tiles"] = _rows_of(call).blocks.shape[0]
        values["edges"] = self._edges(fit, call, values)
        key = (
            call.query.device, call.key.shape[:3], call.key.stride(), call.value.stride(),
            call.query.stride()[1:], o_layout, mods.key, *wanted.values(), fit.plan, fit.programs,
            fit.adds, fit.at_once,
            # Parts that are added up later have a program for each row.
            alone, self._tile_rows(fit), None if fit.adds else fit.rows,
        )  # fmt: skip
        parts = self._kept.get(key)
        if parts is None:
            parts = self._parts(fit, call, o_layout, mods, wanted, alone)
            self._keep(key, parts)
        launch_all([part.launch(values) for part in parts], call.query.device)

    def _parts(
        self,
        fit: DecodeFit,
        call: Call,
        o_layout: Layout,
        mods: Mods,
        wanted: Mapping[str, bool],
        alone: bool,
    ) -> list[FixedLaunch]:
        made, portable, tiles = self._made, self._portable, self._tiles
        boxes = boxes_for(made.spec, tiles)
        key, value, query = call.key, call.value, call.query
        fixed: dict[str, object] = {
            "k_desc": boxes_of(key.shape, key.stride(), key.element_size(), boxes["k_desc"]),
            "v_desc": boxes_of(value.shape, value.stride(), key.element_size(), boxes["v_desc"]),
            "q_strides": layout_like(
                query.shape, query.stride(), query.element_size(), BYTES
            ).strides[:3],
            "k_strides": key.stride()[:3],
            "v_strides": value.stride()[:3],
            "o_strides": o_layout.strides,
            "unit_steps": 0,
            "groups": 1,
            "programs": fit.programs,
            "mark": MARK,
        }
        program = decode_program(
            made, tiles, fit.plan, mods, fit.adds, o_layout.unit, wanted, alone,
            self._tile_rows(fit),
        )  # fmt: skip
        found = [FixedLaunch(program, fit.programs, fixed, DESCRIBED)]
        if not fit.adds:
            by_edges = fit._replace(plan=decode_steps.EACH.value)
            found.append(sums_launch(portable, by_edges, o_layout.unit, mods, wanted, fixed))
        return found

    def _edges(self, fit: DecodeFit, call: Call, values: Mapping[str, object]) -> Tensor:
        """Return what `packed_steps.share_kernel` writes: once for the layers of a step that have
        one mask and as many key heads and rows."""
        packed, mask = _rows_of(call), call.mask
        kv_heads, size = call.key.shape[1], call.key.shape[2]
        sequences, programs = packed.slots.shape[0], fit.programs
        # A mask's identity is its own as long as it is kept.
        key = (
            "anyflex_cuda.shares", id(mask), kv_heads, size, *fit.fixed.values(), programs,
            self._tiles.block_n,
        )  # fmt: skip

        def make() -> tuple[Tensor, MaskViews | None]:
            words = sequences + 1 + packed_steps.COUNTS.value
            words += programs * packed_steps.SHARE_WORDS.value
            words += 0 if mask is None else sequences * (1 + self._most(packed) * 2)
            edges = torch.empty(words, dtype=torch.int32, device=call.query.device)
            given = {**values, "edges": edges}
            kernels = self._finders(call.query.device, sequences, programs, mask is not None)
            launch_all([kernel.launch(given) for kernel in kernels], edges.device)
            return edges, mask

        edges: Tensor = packed.once(key, tuple, make)[0]
        return edges

    def _finders(
        self, device: torch.device, sequences: int, programs: int, is_listed: bool
    ) -> list[FixedLaunch]:
        """Return the launches that write edges."""
        key = device, sequences if is_listed else 1, programs, is_listed
        found = self._kept.get(key)
        if found is None:
            fixed, block_n = {"programs": programs}, self._tiles.block_n
            found = [self._portable.fixed_launch(
                packed_steps.share_kernel, 1, {"LISTED": is_listed, "BLOCK_N": block_n},
                Options(8, 1), fixed, types=TYPES,
            )]  # fmt: skip
            if is_listed:
                constants = {"KV_BLOCK": self._made.spec.block_size[1], "BLOCK_N": block_n}
                lists = self._portable.fixed_launch(
                    packed_steps.list_kernel, sequences, constants, Options(4, 1), fixed,
                    types=TYPES,
                )  # fmt: skip
                found.insert(0, lists)
            self._keep(key, found)
        return found

    def _keep(self, key: object, launches: list[FixedLaunch]) -> None:
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        self._kept[key] = launches


def _rows_of(call: Call) -> PackedRows:
    assert call.packed is not None
    return call.packed


def _refused_spec(spec: Spec) -> str | None:
    """Return why no packed call of a spec takes Hopper's decoding, or None."""
    rows = _most_tile_rows(spec)
    if spec.gqa_ratio > rows:
        return f"{spec.gqa_ratio} query heads share a key head, and a tile has {rows} rows"
    if spec.page_size % _PAGE_MULTIPLE:
        return f"pages of {spec.page_size} rows, which aren't a multiple of {_PAGE_MULTIPLE}"
    return refused_decode_spec(spec)
