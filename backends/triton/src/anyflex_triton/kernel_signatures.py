"""Signatures of a spec's kernels: types, constants and configs, and the programs made so far."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from anyflex.plugin import ArgumentError, Call, Outputs, Spec, free_in_child
from anyflex_triton.arguments import (
    BYTES,
    Boxes,
    Layout,
    Part,
    Types,
    descriptor_of,
    heads_described,
    is_blocked,
    layout_of,
    pointer_type,
    without_bools,
)
from anyflex_triton.configs import (
    Config,
    KernelName,
    Target,
    Traits,
    around,
    config_for,
    fitted,
    for_sequences,
    with_tile,
)
from anyflex_triton.dependent_launch import overlaps
from anyflex_triton.forward import plain_score
from anyflex_triton.kernel_arguments import ARGUMENTS, ELEMENTS, types_of
from anyflex_triton.launch import FixedLaunch, Launch
from anyflex_triton.lowering import cap_factors, direct_reads
from anyflex_triton.mods import (
    Sums,
    captured_additions,
    is_light,
    load_module,
    reads_pairs,
    source_for,
)
from anyflex_triton.pair_reads import dense_tables
from anyflex_triton.program import INTERPRETED, Options, Program
from anyflex_triton.tuning import Tuner

if TYPE_CHECKING:
    from anyflex_triton.compiled_files import CompiledFiles

__all__ = [
    "STORED_TYPES",
    "KernelInputs",
    "MaskRows",
    "Mods",
    "Programs",
    "beside",
    "call_sizes",
    "columns_of_part",
    "heads_at_a_time",
    "kept_of",
    "key_head_group",
    "layouts_of",
    "or_else",
    "output_values",
    "padded",
    "tile_count",
    "wanted_outputs",
]

T = TypeVar("T")

_KEPT = 64
"""Maximum number of keys that calls of the same shapes keep: configs, and layouts of tensors."""
_HEAD_GROUP_BYTES = 16 << 20
"""Bytes that the heads running at a time read again and again: a part of the L2 cache."""
_HEADS_AT_A_TIME = 8
"""Maximum number of heads that run at a time. 16 MiB hold more short heads than run at once: other
heads' tiles then evict what a head's tiles share before its next one reads it. Measured on H100s
only: `bench/results/h100_cuda.md`."""
_LARGEST_CAP = 256.0
"""Maximum sum of `cap_factors` of a coarse call. `operations.tanh_capped` is off by 5e-7 times the
sum, which is a quarter of what rounding to float16 may take from a weight."""
_OPTION_NAMES: dict[KernelName, tuple[str, str, str, str]] = {
    "forward": ("block_m", "block_n", "num_warps", "num_stages"),
    # A decoding tile always holds all rows.
    "decode": ("", "block_n", "num_warps", "num_stages"),
    "keys": ("dkv_block_m", "dkv_block_n", "backward_num_warps", "backward_num_stages"),
    "queries": ("dq_block_m", "dq_block_n", "backward_num_warps", "backward_num_stages"),
}
"""Names of users' options for a kernel's block_m, block_n, num_warps and num_stages."""
Describer = Literal["host", "kernel"]
"""Side that makes the descriptors of a kernel's loads: the host, as arguments, or the kernel."""
_STRIDES = {
    "query": "q_strides", "key": "k_strides", "value": "v_strides", "out": "o_strides",
    "rest": "r_strides", "dout": "do_strides", "dq": "dq_strides", "dk": "dk_strides",
    "dv": "dv_strides",
}  # fmt: skip
STORED_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
"""Types of key and value by `Spec.kv_storage`."""
_KEYS = 3
"""Index of kv_idx among `direct_reads`' arguments."""
_DESCRIBING = frozenset({"hopper", "blackwell", "interpreter"})
"""Targets whose tensor descriptors are faster than pointers, where they are arguments."""


def padded(dim: int) -> int:
    """Return the columns of a tile of this head dim."""
    return max(16, 1 << (dim - 1).bit_length())


def columns_of_part(dim: int) -> int:
    """Return the columns of a part of such a tile, for kernels whose tiles may have several
    (`column_parts`).

    Three parts of 64 save a quarter of head dims 129 to 192. Narrower parts would save as much of
    other head dims, but products of 32 columns take Hopper as long as those of 64.
    """
    return 64 if 128 < dim <= 192 else padded(dim)


class MaskRows(NamedTuple):
    """A block mask's runs as kernels read them (`mask_refinement`).

    Args:
        offsets, ends: int32, positions in `runs` where those of a row of blocks begin and end;
            batch entries and heads are `strides` elements apart.
        runs: int32 [n, 3]: first block, end block, FULL or PARTIAL.
        block_size: elements of a block, first along the side of its row, then of its column.
    """

    offsets: Tensor
    ends: Tensor
    runs: Tensor
    strides: tuple[int, int]
    block_size: tuple[int, int]

    def values(self) -> dict[str, object]:
        """Return the arguments of a kernel that reads these rows."""
        return {
            "offsets": self.offsets, "ends": self.ends, "runs": self.runs,
            "mask_strides": self.strides,
        }  # fmt: skip


class Mods(NamedTuple):
    """Functions of a module of `anyflex_triton.mods`, each None where the module lacks it.

    Args:
        key: tells modules of one spec apart.
        score_mod: also applies a scale that can't wait until row_max is known.
        read_rows, read_columns: read what rows, or columns, alone decide; None where that is
            nothing. Without both, the functions of read are `score_mod` and `mask_mod` themselves.
        mask_scores: function of `anyflex_triton.mods.mask_scores_source`, where a module has it;
            likewise its variant of read.
        read_tile, read_step, score_mod_of_pairs, read_dense, score_mod_of_dense,
            captured_gradients_of_dense: functions of `anyflex_triton.pair_reads`, where a module
            has them.
    """

    key: object
    score_mod: Any
    mask_mod: Any
    score_mod_backward: Any
    captured_gradients: Any
    read_rows: Any
    read_columns: Any
    score_mod_of_read: Any
    mask_mod_of_read: Any
    mask_scores: Any
    mask_scores_of_read: Any
    read_tile: Any
    read_step: Any
    score_mod_of_pairs: Any
    read_dense: Any
    score_mod_of_dense: Any
    captured_gradients_of_dense: Any

    @classmethod
    def of(cls, key: object, functions: Mapping[str, Any], unscored: Any = None) -> Mods:
        """Return the functions of a module.

        Args:
            functions: by name.
            unscored: stand-in for the score mod of a module without one.
        """
        made = {name: functions.get(name) for name in cls._fields[1:]}
        made["score_mod"] = functions.get("score_mod", unscored)
        for name in ("score_mod", "mask_mod", "mask_scores"):
            made[f"{name}_of_read"] = functions.get(f"{name}_of_read", made[name])
        return cls(key, **made)

    def reading(self) -> dict[str, object]:
        """Return the constants of a kernel that reads early whatever it can."""
        return {
            "READ_ROWS": self.read_rows,
            "READ_COLUMNS": self.read_columns,
            "SCORE_MOD": self.score_mod_of_read,
            "MASK_MOD": self.mask_mod_of_read,
        }


class KernelInputs(NamedTuple):
    """Arguments of a kernel class, and of its `Programs`.

    Args:
        spec: the accepted spec.
        source: text of the mods, by `anyflex_triton.mods.write_source`.
        target: key of the config table.
        overrides: the user's options by name.
        tuner: finds the fastest configs; None: the table's are used.
        files: where compiled kernels are kept; see `Program`.
        note: appended to the description of a call's kernel, why it isn't another, for example.
    """

    spec: Spec
    source: str
    target: Target
    overrides: Mapping[str, Any]
    tuner: Tuner | None = None
    files: CompiledFiles | None = None
    note: str = ""


class Programs:
    """Signatures, configs and programs of one spec's kernels. Thread-safe."""

    made_as: ClassVar[type[Program]] = Program
    """Class that compiles and launches kernels."""
    most_heads: int | None = _HEADS_AT_A_TIME
    """Maximum number of KV heads that run at a time; None: as many as 16 MiB hold."""

    def __init__(self, given: KernelInputs) -> None:
        self.spec = spec = given.spec
        self.target = target = given.target
        self.overlaps = overlaps(target) and not INTERPRETED
        self.overrides = given.overrides
        self.tuner = given.tuner
        self._source = given.source
        self._files = given.files
        self._mods: dict[object, Mods] = {}
        self._direct = direct_reads(spec)
        self._caps = cap_factors(spec)
        self._may_be_short = " if SHORT else " in given.source
        self._reads_pairs = "\nSTEADY = " in given.source
        self._dense = dense_tables(spec) if self._reads_pairs else []
        self._programs: dict[str, Program] = {}
        self.types = {**_described_types(spec), **_mod_types(spec)}
        self._configs: dict[KernelName, tuple[Config, ...]] = {}
        self._lock = threading.Lock()
        free_in_child(self)
        graph = spec.mask_graph
        self.mask_reads = graph is not None and any(n.operation == "load" for n in graph.nodes)
        self.mask_reads_pairs = graph is not None and reads_pairs(graph)
        self.in_tf32 = target != "amd" and spec.fp32_precision in ("high", "medium")
        self.constants: dict[str, object] = {
            "HAS_MASK": spec.mask_kind == "runs",
            "GROUP": spec.gqa_ratio,
            "KV_SHARED": spec.kv_broadcast,
            "DIM": spec.head_dim,
            "VALUE_DIM": spec.value_head_dim,
            "D": columns_of_part(spec.head_dim),
            "DV": columns_of_part(spec.value_head_dim),
            "PAGE": spec.page_size,
            "WIDE": spec.index_width == 64,
            "PRECISION": "tf32" if self.in_tf32 else "ieee",
        }
        if not spec.dropout:
            self.constants["dropout"] = None
        if not spec.sinks:
            self.constants["sinks"] = None
        self.is_packed = spec.q_layout == "packed"
        if not self.is_packed:
            self.constants["sequences"] = None
        if spec.kv_storage == "plain":
            self.constants["k_scale"] = self.constants["v_scale"] = None
        self._traits = Traits(
            max(spec.head_dim, spec.value_head_dim),
            spec.dtype.itemsize,
            is_plain=spec.mask_kind == "none" and spec.score_graph is None,
            is_scored=spec.score_graph is not None,
            shares_keys=spec.gqa_ratio > 1 or spec.kv_broadcast,
            score_reads_pairs=spec.score_graph is not None and reads_pairs(spec.score_graph),
            mask_reads=self.mask_reads,
            reads_keys=any(read.argument == _KEYS for read in self._direct),
            adds_by_pair=any(each.is_by_pair for each in captured_additions(spec)),
            score_is_light=spec.score_graph is None or is_light(spec.score_graph),
            mask_reads_pairs=self.mask_reads_pairs,
            row_bytes=math.gcd(
                BYTES,
                spec.head_dim * spec.dtype.itemsize,
                spec.value_head_dim * spec.dtype.itemsize,
            ),
            has_narrow_values=spec.value_head_dim <= 128,
            in_tf32=self.in_tf32,
        )
        # A mask may have finer blocks if it is the same for all heads and batch entries.
        self.is_finer = (
            bool(self.overrides.get("finer_mask", self.mask_reads))
            and graph is not None
            and spec.mask_kind == "runs"
            and not self.is_packed
            and not any(n.operation == "input" and n.attribute in ("b", "h") for n in graph.nodes)
        )
        self.learned = tuple(i for i, facts in enumerate(spec.captured) if facts.needs_grad)
        self.wants_delta = spec.gradients != ("v",) or bool(self.learned)

    def config(self, name: KernelName) -> Config:
        """Return the config of a kernel where nothing was timed."""
        return self.configs(name)[0]

    def configs(self, name: KernelName) -> tuple[Config, ...]:
        """Return the config of a kernel where nothing was timed, then the candidates of
        autotuning."""
        found = self._configs.get(name)
        if found is None:
            # A few rows of a sequence are no more than a decoding tile's. Beside a longer sequence
            # they would have another tile.
            few = self.is_packed and self.spec.q_class != "long" and not self.spec.batch_invariant
            kind = "decode" if few else name
            first = config_for(self.target, kind, self._traits)
            if self.is_packed:
                first = for_sequences(first, self.target, self.spec.page_size > 0)
            first = self._allowed(name, first)
            tried = around(name, first) if self.tuner is not None else []
            if self.is_finer and name != "decode":
                # The finer blocks are the first config's tiles.
                tried = [
                    replace(config, block_m=first.block_m, block_n=first.block_n)
                    for config in tried
                ]
            allowed = (self._allowed(name, config) for config in tried)
            found = self._configs[name] = tuple(dict.fromkeys((first, *allowed)))
        return found

    def tunes(self, name: KernelName) -> bool:
        """Whether timing decides: the user asks for it, and the other options leave a choice."""
        return len(self.configs(name)) > 1

    def tuned(self, name: KernelName, call: Call) -> Config | None:
        """Return the config that timing found fastest for such calls, if asked for and known."""
        if self.tuner is None or not self.tunes(name):
            return None
        return self.tuner.known(name, call, self.configs(name))

    def launch(
        self,
        name: KernelName,
        call: Call,
        launch_with: Callable[[Config], Launch],
        before: Sequence[Launch] = (),
    ) -> Launch:
        """Return the launch with the kernel's config for this call.

        Args:
            launch_with: returns the launch with a config.
            before: launches that fill its inputs; they run before anything is timed.
        """
        configs = self.configs(name)
        config = configs[0]
        if self.tuner is not None and len(configs) > 1:
            found = self.tuner.known(name, call, configs)
            config = found or self.tuner.find(name, call, configs, launch_with, before)
        return launch_with(config)

    def _allowed(self, name: KernelName, config: Config) -> Config:
        """Return the nearest config with the user's options, and tiles within the mask's
        blocks."""
        wanted = self.overrides
        block_m, block_n, num_warps, num_stages = _OPTION_NAMES[name]
        config = with_tile(
            config,
            wanted.get(block_m, config.block_m),
            wanted.get(block_n, config.block_n),
            wanted.get(num_warps, config.options.num_warps),
            wanted.get(num_stages, config.options.num_stages),
        )
        if "grf_mode" in wanted:
            more = {**dict(config.options.more), "grf_mode": wanted["grf_mode"]}
            config = replace(config, options=replace(config.options, more=tuple(more.items())))
        if self.spec.mask_kind == "runs" and name != "decode":
            block = self.spec.block_size[1 if name == "keys" else 0]
            config = fitted(config, name, block, num_warps not in wanted)
        return config

    def blame_options(self, direction: Literal["forward", "backward"], error: Any) -> None:
        """Raise ArgumentError from `error` if the user gave options that shape these kernels.

        Args:
            error: Triton's OutOfResources, of a kernel that needs more than a multiprocessor has.
        """
        kernels: tuple[KernelName, ...] = ("keys", "queries")
        if direction == "forward":
            kernels = ("forward", "decode")
        names = {name for kernel in kernels for name in _OPTION_NAMES[kernel]}
        given = {name: self.overrides[name] for name in sorted(names & self.overrides.keys())}
        if not given:
            return
        raise ArgumentError(
            f"kernel_options {given} make a {direction} kernel that takes {error.required} of "
            f"this device's {error.name}, for head dims {self.spec.head_dim} and "
            f"{self.spec.value_head_dim}; {error.limit} is what there is: give smaller tiles, "
            "fewer warps or stages, or leave these options out"
        ) from error

    def mods(self, call: Call, even: bool, sums: Sums = "floats") -> Mods:
        """Return the call's mods.

        Args:
            even: whether the kernel's tiles end where the lengths do.
            sums: as in `source_for`.
        """
        key = self.mods_key(call, even, sums)
        found = self._mods.get(key)
        if found is None:
            within, coarse, short, plain, _, steady, dense = key
            source = source_for(
                self._source, within=within, coarse=coarse, short=short, sums=sums, steady=steady,
                dense=dense,
            )  # fmt: skip
            functions = vars(load_module(source))
            found = self._mods[key] = Mods.of(key, functions, None if plain else plain_score)
        return found

    def mods_key(
        self, call: Call, even: bool, sums: Sums = "floats"
    ) -> tuple[bool, bool, bool, bool, Sums, bool, bool]:
        """Return the arguments of `mods`, which tell the call's mods from the spec's others."""
        # Most calls capture nothing and cap nothing.
        within = even and bool(call.captured) and self._is_within(call)
        coarse = self.is_coarse(call)
        short = self._may_be_short and self._is_short(call)
        # Both bounds leave room in float32 for small factors.
        plain = 2.0**-100 < call.scale < 2.0**100
        steady = even and self._reads_pairs and call.index_offsets[3] % 128 == 0
        dense = bool(self._dense) and self._is_dense(call)
        return (within, coarse, short, plain, sums, steady, dense)

    def is_coarse(self, call: Call) -> bool:
        """Whether the call has soft caps, with a small sum of `cap_factors`: `source_for`'s
        ``coarse``."""
        if not self._caps:
            return False
        factors = (
            factor
            if isinstance(factor, float)
            else (call.ints if factor[0] == "i" else call.floats)[int(factor[1:])]
            for factor in self._caps
        )
        return sum(map(abs, factors)) <= _LARGEST_CAP

    def _is_short(self, call: Call) -> bool:
        """Return ``short`` of `source_for`."""
        packed = call.packed
        if packed is not None:
            low, high = packed.lowest, packed.highest
            return low is not None and high is not None and low >= 0 and high <= 1 << 24
        ends = zip(call.index_offsets[2:], (call.query.shape[2], call.key.shape[2]), strict=True)
        return all(first >= 0 and first + count <= 1 << 24 for first, count in ends)

    def _is_within(self, call: Call) -> bool:
        """Return ``within`` of `source_for`. Slots and lengths of packed sequences are on the
        device."""
        if call.packed is not None:
            return False
        offsets, captured = call.index_offsets, call.captured
        if min(offsets) < 0:
            return False
        # Loops, not all(): a decoding call of a padded batch asks in each layer.
        for tensor in captured:
            if tensor.ndim and tensor.stride(-1) != 1:
                return False
        batch, heads, rows, _ = call.query.shape
        counts = (batch, heads, rows, call.key.shape[2])
        for position, axis, argument in self._direct:
            if offsets[argument] + counts[argument] > captured[position].shape[axis]:
                return False
        return True

    def _is_dense(self, call: Call) -> bool:
        """Return ``dense`` of `source_for`: the keys are inside of the `dense_tables`, whose rows
        are whole words of 16 bytes, as are the keys before a block."""
        first = call.index_offsets[3]
        if call.packed is not None or first < 0:
            return False
        for position in self._dense:
            tensor = call.captured[position]
            words = (first, self.spec.block_size[1], tensor.shape[-1], *tensor.stride()[:-1])
            if (
                tensor.numel() == 0
                or tensor.data_ptr() % BYTES
                or math.gcd(*words) * tensor.element_size() % BYTES
                or tensor.stride(-1) != 1
                or first + call.key.shape[2] > tensor.shape[-1]
            ):
                return False
        return True

    def kept(self, call: Call, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned the first time for this key and the call's shapes and
        strides, which alone must decide it. When a shape has too many keys, all of them are
        evicted."""
        if call.kept is None:
            return make()
        found: T | None = call.kept.get(key)
        if found is None:
            if len(call.kept) >= _KEPT:
                call.kept.clear()
            found = call.kept[key] = make()
        return found

    def program(
        self,
        function: Any,
        constants: Mapping[str, object],
        options: Options,
        layouts: Mapping[str, Layout] | None = None,
        types: Mapping[str, Types] | None = None,
        aligned: Mapping[str, int] | None = None,
    ) -> Program:
        """Return the program with this signature, made of the arguments that the kernel has.

        Args:
            constants: those that don't follow from the spec.
            layouts: of the tensors that have strides, by name: their pointers are as aligned, and
                so are those of the same tensors called _rows.
            types: types that aren't as `kernel_arguments` describes them.
            aligned: bytes that divide other pointers.
        """
        names, layouts = function.arg_names, layouts or {}
        if layouts:
            constants = {
                "UNITS": tuple(layout.unit for layout in layouts.values()),
                "SCATTERED": tuple(layout.scattered for layout in layouts.values()),
                **constants,
            }
        constants = {**self.constants, **constants}
        constants = {name: constants[name] for name in names if name in constants}
        known = {**self.types, **(types or {})}
        typed = {name: known[name] for name in names if name not in constants}
        divided = dict(aligned or {})
        for name, given in typed.items():
            layout = layouts.get(name.removesuffix("_rows"))
            if layout is not None and layout.unit > 1 and str(given).startswith("*"):
                divided[name] = layout.alignment
        signature = (function, typed, constants, divided, options)
        # Functions are told apart by their modules' names, as in `compiled_files.kernel_name`.
        key = repr(signature)
        with self._lock:
            found = self._programs.get(key)
            if found is None:
                found = self._programs[key] = self.made_as(*signature, self._files)
        return found

    def fixed_launch(
        self,
        function: Any,
        programs: int,
        constants: Mapping[str, object],
        options: Options,
        fixed: Mapping[str, Any],
        layouts: Mapping[str, Layout] | None = None,
        types: Mapping[str, Types] | None = None,
        aligned: Mapping[str, int] | None = None,
        named: Mapping[str, str | Part] | None = None,
    ) -> FixedLaunch:
        """Return the launch of a `program`, whose arguments are as here.

        Args:
            programs: size of the grid.
            fixed, named: as in `FixedLaunch`; the strides of `layouts` are added. `Boxes`
                decide their types.
        """
        boxes = {name: each for name, each in fixed.items() if isinstance(each, Boxes)}
        of_boxes = {name: self.made_as.box_type(each) for name, each in boxes.items()}
        types = {**of_boxes, **(types or {})}
        made = self.program(function, constants, options, layouts, types, aligned)
        strides = {_STRIDES[name]: layout.strides for name, layout in (layouts or {}).items()}
        return FixedLaunch(made, programs, {**strides, **fixed}, named)

    def describer(self, *tensors: Tensor) -> Describer | None:
        """Return the side that can make descriptors that speed up these tensors' loads, or
        None."""
        # Products of float32 read their tiles into registers, in a layout that descriptors don't
        # have.
        fits = self.target == "interpreter" or self.spec.dtype.itemsize == 2
        if (
            fits
            and not self.is_packed
            and self.target in _DESCRIBING
            and all(map(_is_described, tensors))
        ):
            return "host"
        return self.own_describer(*tensors)

    def own_describer(self, *tensors: Tensor) -> Literal["kernel"] | None:
        """Return `describer` for targets where descriptors as arguments are no faster."""
        # Intel's compiler makes 2D block loads of descriptors that a kernel makes itself.
        if self.target == "xpu" and not self.is_packed and all(map(is_blocked, tensors)):
            return "kernel"
        return None

    def described(
        self, described: Describer | None, rows: int, **tensors: Tensor
    ) -> dict[str, object]:
        if described != "host":
            return dict(tensors)
        return {
            name: descriptor_of(tensor, rows, columns_of_part(tensor.shape[3]))
            for name, tensor in tensors.items()
        }

    def common_values(self, call: Call, rows: MaskRows | None) -> dict[str, object]:
        """Return the arguments of mods, and the rows of a mask or their stand-ins."""
        types = self.types
        tables, ints = call.captured, call.ints
        if tables:
            sizes = [number for t in tables for number in (*t.shape, *t.stride())]
            tables, ints = without_bools(tables), (*sizes, *ints)
        values: dict[str, object] = {
            "tables": tables,
            "ints": ints[: len(types["ints"])],
            "floats": call.floats[: len(types["floats"])],
            "shifts": call.index_offsets,
            "scale": call.scale,
        }
        if call.dropout is not None:
            words = (*call.dropout.words, call.dropout.threshold)
            # Triton's unsigned arguments are no different, and its interpreter has none.
            signed = (word - (word >> 31 << 32) for word in words)
            values["dropout"] = (*signed, call.dropout.scale)
        if call.sinks is not None:
            values["sinks"] = call.sinks
        if rows is None:
            values["offsets"] = values["ends"] = values["runs"] = call.query
            values["mask_strides"] = (0, 0)
        else:
            values.update(rows.values())
        return values

    def is_even(
        self,
        call: Call,
        config: Config,
        over: Literal["keys", "queries"],
        rows: MaskRows | None,
    ) -> bool:
        """Whether the tiles that a kernel loops over end where lengths and mask blocks do."""
        if self.is_packed:
            return False
        step = config.block_n if over == "keys" else config.block_m
        length = call.key.shape[2] if over == "keys" else call.query.shape[2]
        return length % step == 0 and (rows is None or rows.block_size[1] % step == 0)

    def head_group(self, batch_heads: int, keys: int) -> int:
        """Return how many of the query heads run at a time."""
        spec = self.spec
        of_head = keys * (spec.head_dim + spec.value_head_dim) * spec.dtype.itemsize
        wanted = heads_at_a_time(of_head, self.most_heads) * spec.gqa_ratio
        # Kernels multiply it by a head's tiles, in 32 bits.
        return min(wanted, batch_heads)


def heads_at_a_time(bytes_of_head: int, most: int | None = _HEADS_AT_A_TIME) -> int:
    """Return the number of heads whose tiles run before any of the next heads', at least 1.

    Args:
        bytes_of_head: bytes that the tiles of one head share.
        most: maximum number of heads; None: as many as 16 MiB hold.
    """
    held = max(1, _HEAD_GROUP_BYTES // max(1, bytes_of_head))
    return held if most is None else min(held, most)


def key_head_group(call: Call, more: int = 0, splits: int = 1) -> int:
    """Return the number of KV heads, or of their splits, that run at a time where tiles are of
    keys. A program takes the query heads that share a KV head one after the other, with their rows
    of query and dout.

    Args:
        more: bytes of a query row that its tiles share beside query and dout.
        splits: number of splits of a KV head.
    """
    query, key, value = call.query, call.key, call.value
    bytes_of_row = (query.shape[3] + value.shape[3]) * query.dtype.itemsize + more
    # Kernels multiply it by a head's tiles, in 32 bits.
    units = key.shape[0] * key.shape[1] * splits
    return min(heads_at_a_time(query.shape[2] * bytes_of_row), units)


def _described_types(spec: Spec) -> dict[str, Types]:
    pointer = pointer_type(spec.dtype)
    types = types_of(ARGUMENTS)
    types = {name: pointer if type_ == ELEMENTS else type_ for name, type_ in types.items()}
    if spec.kv_storage != "plain":
        stored = pointer_type(STORED_TYPES[spec.kv_storage])
        types |= dict.fromkeys(("key", "value", "key_rows", "value_rows"), stored)
    return types


def _mod_types(spec: Spec) -> dict[str, Types]:
    """Return the types of the arguments that mods capture."""
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
        "tables": tuple(pointer_type(facts.dtype) for facts in spec.captured),
        "ints": ("i64",) * (sizes + counts["i"]),
        "floats": ("fp32",) * counts["f"],
    }


def tile_count(rows: MaskRows | None, length: int, size: int) -> int:
    """Return the number of tiles of `size` rows in a head; none crosses a block of the mask."""
    block = size if rows is None else rows.block_size[0]
    return -(-length // block) * -(-block // size)


def _is_described(tensor: Tensor) -> bool:
    """Whether a descriptor can load tiles of a tensor's rows. Where heads lie beside each other it
    can't load padding, because those columns belong to the next head."""
    heads = heads_described(tensor)
    dims = tensor.shape[3]
    return heads == "stacked" or (heads == "beside" and dims % columns_of_part(dims) == 0)


def beside(described: Describer | None, *tensors: Tensor) -> tuple[bool, ...]:
    """Return the kernels' constant BESIDE for these tensors."""
    return tuple(described == "host" and heads_described(tensor) == "beside" for tensor in tensors)


def layouts_of(call: Call, **more: Tensor) -> dict[str, Layout]:
    """Return the layouts of query, key, value and the tensors of `more`, by name."""
    tensors = {"query": call.query, "key": call.key, "value": call.value, **more}
    return {name: layout_of(tensor) for name, tensor in tensors.items()}


def call_sizes(call: Call) -> dict[str, object]:
    """Return a call's sizes under the names that kernels have for them."""
    batch, heads, length = call.query.shape[:3]
    kv_batch, kv_heads, keys = call.key.shape[:3]
    return {
        "batch": batch, "heads": heads, "batch_heads": batch * heads, "kv_heads": kv_heads,
        "kv_batch_heads": kv_batch * kv_heads, "q_length": length, "kv_length": keys,
    }  # fmt: skip


def output_values(out: Outputs, stand_in: Tensor) -> dict[str, object]:
    """Return forward's outputs as arguments of kernels.

    Args:
        stand_in: any tensor of the device, for outputs that aren't wanted.
    """
    return {
        "out": out.out,
        "rest": out.saved[0] if len(out.saved) == 2 else out.out,
        "tops": out.saved[-1] if out.saved else stand_in,
        "lse": stand_in if out.lse is None else out.lse,
        "max_scores": stand_in if out.max_scores is None else out.max_scores,
    }


def wanted_outputs(out: Outputs) -> dict[str, bool]:
    """Return the constants of kernels that tell which outputs of forward are wanted."""
    rest, tops = kept_of(out.saved)
    return {
        "WANT_LSE": out.lse is not None, "WANT_MAX": out.max_scores is not None,
        "WANT_REST": rest is not None, "WANT_TOPS": tops is not None,
    }  # fmt: skip


def kept_of(saved: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return (rest, tops) of what forward saves for backward, `TritonKernel.saved_outputs`; None
    for either that isn't there."""
    rest = saved[0] if len(saved) == 2 else None
    return rest, saved[-1] if saved else None


def or_else(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return the tensor or its stand-in: a pointer that is never used must still be valid."""
    return stand_in if tensor is None else tensor
