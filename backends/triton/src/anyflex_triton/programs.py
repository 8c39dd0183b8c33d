"""What a spec's kernels are compiled with and given, and the programs that exist so far."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from anyflex.plugin import Call, MaskViews, Spec
from anyflex_triton.arguments import Layout, descriptor_of, is_described, layout_of
from anyflex_triton.configs import Config, KernelName, Target, config_for, fitted
from anyflex_triton.forward import plain_score
from anyflex_triton.launch import Options, Program, Types, pointer_type, without_bools
from anyflex_triton.mods import cap_factors, direct_reads, source_for
from anyflex_triton.module_files import load_module

__all__ = [
    "Mods",
    "Programs",
    "aligned",
    "classes",
    "float_pointers",
    "int32s",
    "or_else",
    "padded",
    "strides",
]

_HEAD_GROUP_BYTES = 16 << 20
"""Keys and values of the heads that run at a time: a part of the second cache."""
_LARGEST_CAP = 256.0
"""Times what `operations.tanh_capped` is off, a quarter of what rounding takes from a weight in
float16."""
_OPTION_NAMES: dict[KernelName, tuple[str, str, str, str]] = {
    "forward": ("block_m", "block_n", "num_warps", "num_stages"),
    # Its rows are all that there are.
    "decode": ("", "block_n", "num_warps", "num_stages"),
    "keys": ("dkv_block_m", "dkv_block_n", "backward_num_warps", "backward_num_stages"),
    "queries": ("dq_block_m", "dq_block_n", "backward_num_warps", "backward_num_stages"),
}
"""What users call a kernel's block_m, block_n, num_warps and num_stages."""
_KEYS = 3
"""Of `direct_reads`' arguments, kv_idx."""
_DESCRIBING = frozenset({"hopper", "blackwell", "interpreter"})
"""Targets whose tensor descriptors are faster than pointers."""


class Mods(NamedTuple):
    """The functions of a module of `anyflex_triton.mods`, or None.

    Args:
        key: tells modules of one spec apart.
        score_mod: also brings in a scale that can't wait until maxima are taken.
    """

    key: object
    score_mod: Any
    mask_mod: Any
    score_mod_backward: Any
    captured_gradients: Any


class Programs:
    """Thread-safe.

    Args:
        spec: what the backend accepted.
        source: of the mods, by `anyflex_triton.mods.write_source`.
        target: which configs.
        overrides: the user's options by name.
    """

    def __init__(
        self, spec: Spec, source: str, target: Target, overrides: Mapping[str, Any]
    ) -> None:
        self.spec = spec
        self.target = target
        self.overrides = dict(overrides)
        self._source = source
        self._mods: dict[object, Mods] = {}
        self._direct = direct_reads(spec)
        self._caps = cap_factors(spec)
        self.existing: dict[object, Program] = {}
        self.common_types = _common_types(spec)
        self._configs: dict[KernelName, Config] = {}
        self._lock = threading.Lock()
        self.learned = tuple(i for i, facts in enumerate(spec.captured) if facts.needs_grad)

    def config(self, name: KernelName) -> Config:
        """What a kernel is compiled with."""
        found = self._configs.get(name)
        if found is None:
            found = self._configs[name] = self._choose(name)
        return found

    def _choose(self, name: KernelName) -> Config:
        spec = self.spec
        config = config_for(
            self.target, name, max(spec.head_dim, spec.value_head_dim), spec.dtype.itemsize
        )
        if name == "forward" and any(read.argument == _KEYS for read in self._direct):
            # What mods read lies beside the tiles: with a third of each, one program would fill a
            # core's shared memory where else two fit.
            stages = min(2, config.options.num_stages)
            config = replace(config, options=replace(config.options, num_stages=stages))
        grouped = spec.gqa_ratio > 1 or spec.kv_broadcast
        if name == "keys" and self.target == "hopper" and grouped:
            # The loop over query heads takes the registers that the larger tile needs: products
            # would wait for each other (ptxas: C7512).
            config = replace(config, block_m=min(32, config.block_m))
        config = self._overridden(name, config)
        if spec.mask_kind == "runs":
            q_block, kv_block = spec.block_size
            if name == "forward" or name == "queries":
                config = fitted(config, q_block, config.block_n)
            elif name == "keys":
                config = fitted(config, config.block_m, kv_block)
        return config

    def _overridden(self, name: KernelName, config: Config) -> Config:
        """The user's options instead of the table's."""
        wanted = self.overrides
        block_m, block_n, num_warps, num_stages = _OPTION_NAMES[name]
        options = config.options
        more = dict(options.more)
        if num_warps in wanted:
            # The table's may be more than a core has for so many.
            more.pop("maxnreg", None)
        if "grf_mode" in wanted:
            more["grf_mode"] = wanted["grf_mode"]
        return replace(
            config,
            block_m=wanted.get(block_m, config.block_m),
            block_n=wanted.get(block_n, config.block_n),
            options=Options(
                wanted.get(num_warps, options.num_warps),
                wanted.get(num_stages, options.num_stages),
                tuple(more.items()),
            ),
        )

    def mods(self, call: Call, even: bool) -> Mods:
        """The call's mods.

        Args:
            even: whether the kernel's tiles end where the lengths do.
        """
        within = even and self._is_within(call)
        coarse = self._is_coarse(call)
        # As float32, and times a little.
        plain = 2.0**-100 < call.scale < 2.0**100
        key = (within, coarse, plain)
        found = self._mods.get(key)
        if found is None:
            source = source_for(self._source, within=within, coarse=coarse)
            functions = vars(load_module(source))
            found = self._mods[key] = Mods(
                key,
                functions.get("score_mod", None if plain else plain_score),
                functions.get("mask_mod"),
                functions.get("score_mod_backward"),
                functions.get("captured_gradients"),
            )
        return found

    def _is_coarse(self, call: Call) -> bool:
        """As `source_for` asks."""
        if not self._caps:
            return False
        factors = (
            factor
            if isinstance(factor, float)
            else (call.ints if factor[0] == "i" else call.floats)[int(factor[1:])]
            for factor in self._caps
        )
        return sum(map(abs, factors)) <= _LARGEST_CAP

    def _is_within(self, call: Call) -> bool:
        """As `source_for` asks."""
        if not call.captured:
            return False
        batch, heads, rows = call.query.shape[:3]
        counts = (batch, heads, rows, call.key.shape[2])
        offsets = call.index_offsets
        return (
            min(offsets) >= 0
            and all(t.stride()[-1] == 1 for t in call.captured if t.ndim)
            and all(
                offsets[argument] + counts[argument] <= call.captured[captured].shape[axis]
                for captured, axis, argument in self._direct
            )
        )

    def program(
        self,
        key: object,
        function: Any,
        types: Mapping[str, Types],
        constants: Mapping[str, object],
        aligned: Sequence[str],
        options: Options,
    ) -> Program:
        with self._lock:
            found = self.existing.get(key)
            if found is None:
                found = Program(function, types, constants, aligned, options)
                self.existing[key] = found
        return found

    def layouts(self, call: Call, *more: Layout) -> tuple[Layout, ...]:
        return (layout_of(call.query), layout_of(call.key), layout_of(call.value), *more)

    def pointers(self, *names: str) -> dict[str, Types]:
        return dict.fromkeys(names, pointer_type(self.spec.dtype))

    def describable(self, *tensors: Tensor) -> bool:
        """Whether descriptors can stand for these tensors, and the target has them."""
        # Products of float32 read their tiles into registers, whose layout isn't a descriptor's.
        if self.target != "interpreter" and self.spec.dtype.itemsize != 2:
            return False
        return self.target in _DESCRIBING and all(is_described(tensor) for tensor in tensors)

    def descriptors(self, described: bool, rows: int, **dims: str) -> dict[str, Types]:
        if not described:
            return {}
        spec = self.spec
        width = {"D": padded(spec.head_dim), "DV": padded(spec.value_head_dim)}
        inner = pointer_type(spec.dtype)[1:]
        return {name: f"tensordesc<{inner}[{rows}, {width[d]}]>" for name, d in dims.items()}

    def described(self, described: bool, rows: int, **tensors: Tensor) -> dict[str, object]:
        if not described:
            return dict(tensors)
        return {
            name: descriptor_of(tensor, rows, padded(tensor.shape[3]))
            for name, tensor in tensors.items()
        }

    def common_constants(self, layouts: Sequence[Layout]) -> dict[str, object]:
        spec = self.spec
        return {
            "HAS_MASK": spec.mask_kind == "runs",
            "KV_BLOCK": spec.block_size[1],
            "GROUP": spec.gqa_ratio,
            "KV_SHARED": spec.kv_broadcast,
            "DIM": spec.head_dim,
            "VALUE_DIM": spec.value_head_dim,
            "D": padded(spec.head_dim),
            "DV": padded(spec.value_head_dim),
            "UNITS": tuple(layout.unit for layout in layouts),
            "SCATTERED": tuple(layout.scattered for layout in layouts),
            "WIDE": spec.index_width == 64,
            "PRECISION": "ieee",
        }

    def common_values(self, call: Call, mask: MaskViews | None) -> dict[str, object]:
        types = self.common_types
        ints = [number for t in call.captured for number in (*t.shape, *t.stride())]
        ints += call.ints
        offsets = runs = call.query
        strides = (0, 0)
        if mask is not None:
            offsets, runs = mask.offsets, mask.runs
            batch, heads, rows = offsets.shape
            strides = (heads * rows if batch > 1 else 0, rows if heads > 1 else 0)
        return {
            "offsets": offsets,
            "runs": runs,
            "mask_strides": strides,
            "tables": without_bools(call.captured),
            "ints": tuple(ints[: len(types["ints"])]),
            "floats": tuple(call.floats[: len(types["floats"])]),
            "shifts": call.index_offsets,
            "scale": call.scale,
        }

    def is_even(self, call: Call, config: Config, over: Literal["keys", "queries"]) -> bool:
        """Whether the tiles that a kernel runs over end where lengths and mask blocks do."""
        which = 1 if over == "keys" else 0
        step = config.block_n if over == "keys" else config.block_m
        length = call.key.shape[2] if over == "keys" else call.query.shape[2]
        return length % step == 0 and (
            call.mask is None or self.spec.block_size[which] % step == 0
        )

    def row_tiles(self, call: Call, block_m: int) -> int:
        length = call.query.shape[2]
        if call.mask is None:
            return -(-length // block_m)
        q_block = call.mask.block_size[0]
        return -(-length // q_block) * -(-q_block // block_m)

    def head_group(self, call: Call) -> int:
        """Query heads that run at a time."""
        spec = self.spec
        of_head = call.key.shape[2] * (spec.head_dim + spec.value_head_dim) * spec.dtype.itemsize
        wanted = max(1, _HEAD_GROUP_BYTES // max(1, of_head)) * spec.gqa_ratio
        # Kernels multiply it by a head's tiles, in 32 bits.
        return min(wanted, call.query.shape[0] * call.query.shape[1])


def _common_types(spec: Spec) -> dict[str, Types]:
    slots = [
        str(node.attribute)
        for graph in (spec.score_graph, spec.mask_graph)
        if graph is not None
        for node in graph.nodes
        if node.operation == "number"
    ]
    counts = {
        kind: 1 + max((int(slot[1:]) for slot in slots if slot[0] == kind), default=-1)
        for kind in "if"
    }
    sizes = 2 * sum(facts.rank for facts in spec.captured)
    return {
        **dict.fromkeys(("offsets", "runs"), "*i32"),
        "mask_strides": ("i32", "i32"),
        "tables": tuple(pointer_type(facts.dtype) for facts in spec.captured),
        "ints": ("i64",) * (sizes + counts["i"]),
        "floats": ("fp32",) * counts["f"],
        "shifts": ("i32",) * 4,
        "scale": "fp32",
    }


def padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def classes(layouts: Sequence[Layout]) -> tuple[tuple[int, bool], ...]:
    return tuple((layout.unit, layout.scattered) for layout in layouts)


def aligned(
    names: Sequence[str], layouts: Sequence[Layout], described: Sequence[str] = ()
) -> tuple[str, ...]:
    return tuple(
        name
        for name, layout in zip(names, layouts, strict=True)
        if layout.unit > 1 and name not in described
    )


def or_else(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer that is never used must still be one."""
    return stand_in if tensor is None else tensor


def float_pointers(*names: str) -> dict[str, Types]:
    return dict.fromkeys(names, "*fp32")


def strides(*names: str) -> dict[str, Types]:
    return dict.fromkeys(names, ("i64",) * 4)


def int32s(*names: str) -> dict[str, Types]:
    return dict.fromkeys(names, "i32")
