"""A compiled spec: chooses a kernel for a call, and launches it."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from anyflex.plugin import (
    Call,
    GradInputs,
    Grads,
    Kernel,
    MaskViews,
    Outputs,
    Saved,
    Spec,
    TensorSpec,
)
from anyflex_triton import backward, backward_keys, backward_queries, decode, forward
from anyflex_triton.arguments import (
    Layout,
    descriptor_of,
    is_described,
    layout_of,
    row_strides,
)
from anyflex_triton.configs import Config, KernelName, Target, config_for, fitted
from anyflex_triton.launch import Options, Program, Types, pointer_type, without_bools

__all__ = ["TritonKernel"]

_SHORT_ROWS = 64
"""Up to so many query rows of a key head are decoded."""
_HEAD_GROUP_BYTES = 16 << 20
"""Keys and values of the heads that run at a time: a part of the second cache."""
_PROGRAMS_A_CORE = 4
_DESCRIBING = frozenset({"hopper", "blackwell", "interpreter"})
"""Targets whose tensor descriptors are faster than pointers."""
_LEAST_SPLIT = 256
"""Keys: a shorter split isn't worth its combination."""


class TritonKernel(Kernel):
    """Holds what is fixed by a spec, and the programs that calls have needed so far.

    Args:
        spec: what the backend accepted.
        module: the mods, of `anyflex_triton.mods.write_source`.
        target: which configs.
        overrides: the user's options by name.
    """

    def __init__(
        self, spec: Spec, module: ModuleType | None, target: Target, overrides: Mapping[str, int]
    ) -> None:
        self.spec = spec
        self.target = target
        self.overrides = dict(overrides)
        functions = vars(module) if module is not None else {}
        self._score_mod = functions.get("score_mod")
        self._mask_mod = functions.get("mask_mod")
        self._score_mod_backward = functions.get("score_mod_backward")
        self._captured_gradients = functions.get("captured_gradients")
        self._programs: dict[object, Program] = {}
        self._lock = threading.Lock()
        self._learned = tuple(i for i, facts in enumerate(spec.captured) if facts.needs_grad)

    # What a call is

    def describe(self, call: Call) -> str:
        """``decode splits=8`` or ``prefill 128x64``."""
        if self._decodes(call):
            return f"decode splits={self._splits(call)}"
        config = self._config("forward")
        return f"prefill {config.block_m}x{config.block_n}"

    def _packed(self, call: Call) -> int:
        """Query heads that share the rows of a decoding tile: those of a key head, if their rows
        of blocks are the same."""
        if call.mask is not None and call.mask.offsets.shape[1] > 1:
            return 1
        return self.spec.gqa_ratio

    def _decodes(self, call: Call) -> bool:
        length = call.query.shape[2]
        if length == 0 or self._packed(call) * length > _SHORT_ROWS:
            return False
        return call.mask is None or length <= call.mask.block_size[0]

    def _splits(self, call: Call) -> int:
        batch, heads = call.query.shape[:2]
        units = batch * (heads // self._packed(call))
        keys = call.key.shape[2]
        wanted = -(-_PROGRAMS_A_CORE * cores(call.query.device) // max(units, 1))
        return max(1, min(wanted, keys // _LEAST_SPLIT))

    def _config(self, name: KernelName) -> Config:
        spec = self.spec
        config = config_for(
            self.target, name, max(spec.head_dim, spec.value_head_dim), spec.dtype.itemsize
        )
        options = config.options
        if name == "forward" or name == "decode":
            config = replace(
                config,
                block_m=self.overrides.get("block_m", config.block_m)
                if name == "forward"
                else config.block_m,
                block_n=self.overrides.get("block_n", config.block_n),
                options=replace(
                    options,
                    num_warps=self.overrides.get("num_warps", options.num_warps),
                    num_stages=self.overrides.get("num_stages", options.num_stages),
                ),
            )
        if spec.mask_kind == "runs":
            q_block, kv_block = spec.block_size
            if name == "forward" or name == "queries":
                config = fitted(config, q_block, config.block_n)
            elif name == "keys":
                config = fitted(config, config.block_m, kv_block)
        return config

    # Memory

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """What rounding took from out: backward's delta needs those digits."""
        spec = self.spec
        if spec.dtype is torch.float32 or not spec.needs_backward:
            return ()
        return (TensorSpec((*call.query.shape[:3], spec.value_head_dim), spec.dtype),)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Splits' sums for decoding; delta for backward."""
        batch, heads, length = call.query.shape[:3]
        if direction == "backward":
            # dV needs none.
            if self.spec.gradients == ("v",) and not self._learned:
                return ()
            return (TensorSpec((batch, heads, length), torch.float32),)
        if not self._decodes(call):
            return ()
        splits = self._splits(call)
        return (
            TensorSpec((batch, heads, length, splits, self.spec.value_head_dim), torch.float32),
            TensorSpec((batch, heads, length, splits, 3), torch.float32),
        )

    # Forward

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""
        if out.out.numel() == 0 and (out.lse is None or out.lse.numel() == 0):
            return
        if self._decodes(call):
            self._decode(call, out)
        else:
            self._prefill(call, out)

    def _prefill(self, call: Call, out: Outputs) -> None:
        spec = self.spec
        rest = out.saved[0] if out.saved else None
        layouts = self._layouts(call, layout_of(out.out), layout_of(_or(rest, out.out)))
        positive = call.scale > 0 and math.isfinite(call.scale)
        config = self._config("forward")
        described = self._describable(call.key, call.value)
        key = ("forward", config, positive, described, rest is not None, *_classes(layouts))
        program = self._programs.get(key)
        if program is None:
            plain = None if positive else forward.plain_score
            program = self._program(
                key,
                forward.forward_kernel,
                {
                    **self._pointers("query", "key", "value", "out", "rest"),
                    **self._descriptors(described, config.block_n, key="D", value="DV"),
                    **_floats("lse", "max_scores"),
                    **self._common_types(),
                    **_strides("q_strides", "k_strides", "v_strides", "o_strides", "r_strides"),
                    **_i32("batch_heads", "heads", "q_length", "kv_length", "tiles", "head_group"),
                },
                {
                    **self._common_constants(layouts),
                    "SCORE_MOD": self._score_mod or plain,
                    "MASK_MOD": self._mask_mod,
                    "Q_BLOCK": spec.block_size[0],
                    "WANT_LSE": out.lse is not None,
                    "WANT_MAX": out.max_scores is not None,
                    "WANT_REST": rest is not None,
                    "DESCRIBED": described,
                    "BLOCK_M": config.block_m,
                    "BLOCK_N": config.block_n,
                },
                _aligned(
                    ("query", "key", "value", "out", "rest"),
                    layouts,
                    ("key", "value") * described,
                ),
                config.options,
            )
        batch, heads, length = call.query.shape[:3]
        tiles = self._row_tiles(call, config.block_m)
        program.launch(
            tiles * batch * heads,
            call.query.device,
            {
                **self._common_values(call, call.mask),
                "query": call.query, "out": out.out, "rest": _or(rest, out.out),
                **self._described(described, config.block_n, key=call.key, value=call.value),
                "lse": _or(out.lse, out.out), "max_scores": _or(out.max_scores, out.out),
                "q_strides": layouts[0].strides, "k_strides": layouts[1].strides,
                "v_strides": layouts[2].strides, "o_strides": layouts[3].strides,
                "r_strides": layouts[4].strides,
                "batch_heads": batch * heads, "heads": heads,
                "q_length": length, "kv_length": call.key.shape[2],
                "tiles": tiles, "head_group": self._head_group(call),
            },
        )  # fmt: skip

    def _decode(self, call: Call, out: Outputs) -> None:
        spec = self.spec
        batch, heads, length = call.query.shape[:3]
        keys = call.key.shape[2]
        packed = self._packed(call)
        o_layout = layout_of(out.out)
        layouts = self._layouts(call)
        config = self._config("decode")
        rows = max(16, 1 << (packed * length - 1).bit_length())
        key = ("decode", config, packed, rows, *_classes(layouts))
        program = self._programs.get(key)
        if program is None:
            program = self._program(
                key,
                decode.decode_kernel,
                {
                    **self._pointers("query", "key", "value"),
                    **_floats("partial_out", "partial_sums"),
                    **self._common_types(),
                    **_strides("q_strides", "k_strides", "v_strides"),
                    **_i32("heads", "q_length", "kv_length", "splits", "split_length"),
                },
                {
                    **self._common_constants(layouts),
                    "SCORE_MOD": self._score_mod,
                    "MASK_MOD": self._mask_mod,
                    "PACKED": packed,
                    "BLOCK_M": rows,
                    "BLOCK_N": config.block_n,
                },
                _aligned(("query", "key", "value"), layouts),
                config.options,
            )
        splits = self._splits(call)
        partial_out, partial_sums = out.workspace
        pieces = -(-max(keys, 1) // config.block_n)
        program.launch(
            batch * (heads // packed) * splits,
            call.query.device,
            {
                **self._common_values(call, call.mask),
                "query": call.query, "key": call.key, "value": call.value,
                "partial_out": partial_out, "partial_sums": partial_sums,
                "q_strides": layouts[0].strides, "k_strides": layouts[1].strides,
                "v_strides": layouts[2].strides,
                "heads": heads, "q_length": length, "kv_length": keys, "splits": splits,
                "split_length": -(-pieces // splits) * config.block_n,
            },
        )  # fmt: skip
        rest = out.saved[0] if out.saved else None
        key = ("combine", o_layout.unit, rest is not None)
        program = self._programs.get(key)
        if program is None:
            program = self._program(
                key,
                decode.combine_kernel,
                {
                    **_floats("partial_out", "partial_sums", "lse", "max_scores"),
                    **self._pointers("out", "rest"),
                    **_strides("o_strides"),
                    **_i32("heads", "q_length", "splits"),
                },
                {
                    "VALUE_DIM": spec.value_head_dim,
                    "DV": _padded(spec.value_head_dim),
                    "SPLITS": 16,
                    "UNIT": o_layout.unit,
                    "WANT_LSE": out.lse is not None,
                    "WANT_MAX": out.max_scores is not None,
                    "WANT_REST": rest is not None,
                },
                (),
                Options(4, 1),
            )
        program.launch(
            batch * heads * length,
            call.query.device,
            {
                "partial_out": partial_out, "partial_sums": partial_sums, "out": out.out,
                "rest": _or(rest, out.out),
                "lse": _or(out.lse, partial_sums), "max_scores": _or(out.max_scores, partial_sums),
                "o_strides": o_layout.strides, "heads": heads, "q_length": length,
                "splits": splits,
            },
        )  # fmt: skip

    # Backward

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`."""
        dout = grad.dout
        if call.query.numel() == 0 or call.key.numel() == 0 or call.value.numel() == 0:
            for gradient in (grads.dq, grads.dk, grads.dv):
                if gradient is not None:
                    gradient.zero_()
            return
        lse = saved.lse.contiguous()
        delta = lse
        if grads.workspace:
            (delta,) = grads.workspace
            self._delta(call, saved, grad, delta)
        if grads.dk is not None or grads.dv is not None:
            self._keys(call, dout, lse, delta, grads)
        if grads.dq is not None or any(total is not None for total in grads.captured):
            self._queries(call, dout, lse, delta, grads)

    def _delta(self, call: Call, saved: Saved, grad: GradInputs, delta: Tensor) -> None:
        spec = self.spec
        rest = saved.extras[0] if saved.extras else None
        layouts = (
            layout_of(saved.out),
            layout_of(grad.dout),
            layout_of(_or(rest, saved.out)),
        )
        given = grad.delta is not None
        key = ("delta", given, grad.dlse is not None, rest is not None, *_classes(layouts))
        program = self._programs.get(key)
        if program is None:
            program = self._program(
                key,
                backward.delta_kernel,
                {
                    **self._pointers("out", "dout", "rest"),
                    **_floats("dlse", "given", "delta"),
                    **_strides("o_strides", "do_strides", "r_strides"),
                    "dl_strides": ("i64",) * 3,
                    **_i32("heads", "q_length"),
                },
                {
                    "VALUE_DIM": spec.value_head_dim,
                    "DV": _padded(spec.value_head_dim),
                    "UNITS": tuple(layout.unit for layout in layouts),
                    "SCATTERED": tuple(layout.scattered for layout in layouts),
                    "WIDE": spec.index_width == 64,
                    "HAS_DLSE": grad.dlse is not None,
                    "IS_GIVEN": given,
                    "HAS_REST": rest is not None,
                    "BLOCK_M": 32,
                },
                _aligned(("out", "dout", "rest"), layouts),
                Options(4, 1),
            )
        batch, heads, length = call.query.shape[:3]
        program.launch(
            batch * heads * -(-length // 32),
            call.query.device,
            {
                "out": saved.out, "rest": _or(rest, saved.out), "dout": grad.dout,
                "r_strides": layouts[2].strides, "dlse": _or(grad.dlse, delta),
                "given": delta if grad.delta is None else grad.delta.contiguous(), "delta": delta,
                "o_strides": layouts[0].strides, "do_strides": layouts[1].strides,
                "dl_strides": (0, 0, 0) if grad.dlse is None else row_strides(grad.dlse),
                "heads": heads, "q_length": length,
            },
        )  # fmt: skip

    def _keys(self, call: Call, dout: Tensor, lse: Tensor, delta: Tensor, grads: Grads) -> None:
        spec = self.spec
        dk, dv = grads.dk, grads.dv
        layouts = (
            *self._layouts(call, layout_of(dout)),
            layout_of(call.key if dk is None else dk),
            layout_of(call.value if dv is None else dv),
        )
        config = self._config("keys")
        described = self._describable(call.query, dout)
        key = ("keys", config, dk is not None, dv is not None, described, *_classes(layouts))
        program = self._programs.get(key)
        names = ("query", "key", "value", "dout", "dk", "dv")
        if program is None:
            program = self._program(
                key,
                backward_keys.key_kernel,
                {
                    **self._pointers(*names),
                    **self._descriptors(described, config.block_m, query="D", dout="DV"),
                    **_floats("lse", "delta"),
                    **self._common_types(),
                    **_strides("q_strides", "k_strides", "v_strides", "do_strides", "dk_strides",
                               "dv_strides"),
                    **_i32("batch", "heads", "kv_batch_heads", "kv_heads", "q_length",
                           "kv_length", "tiles", "head_group"),
                },
                {
                    **self._common_constants(layouts),
                    "SCORE_MOD": self._score_mod,
                    "SCORE_MOD_BACKWARD": self._score_mod_backward,
                    "MASK_MOD": self._mask_mod,
                    "Q_BLOCK": spec.block_size[0],
                    "WANT_DK": dk is not None,
                    "WANT_DV": dv is not None,
                    "DESCRIBED": described,
                    "BLOCK_M": config.block_m,
                    "BLOCK_N": config.block_n,
                },
                _aligned(names, layouts, ("query", "dout") * described),
                config.options,
            )  # fmt: skip
        batch, heads, length = call.query.shape[:3]
        kv_batch, kv_heads, keys = call.key.shape[:3]
        mask = None if call.mask is None else call.mask.transposed()
        if mask is None:
            tiles = -(-keys // config.block_n)
        else:
            tiles = -(-keys // mask.block_size[0]) * -(-mask.block_size[0] // config.block_n)
        program.launch(
            tiles * kv_batch * kv_heads,
            call.query.device,
            {
                **self._common_values(call, mask),
                "key": call.key, "value": call.value,
                **self._described(described, config.block_m, query=call.query, dout=dout),
                "lse": lse, "delta": delta,
                "dk": _or(dk, call.key), "dv": _or(dv, call.value),
                "q_strides": layouts[0].strides, "k_strides": layouts[1].strides,
                "v_strides": layouts[2].strides, "do_strides": layouts[3].strides,
                "dk_strides": layouts[4].strides, "dv_strides": layouts[5].strides,
                "batch": batch, "heads": heads, "kv_batch_heads": kv_batch * kv_heads,
                "kv_heads": kv_heads, "q_length": length, "kv_length": keys,
                "tiles": tiles, "head_group": self._head_group(call),
            },
        )  # fmt: skip

    def _queries(self, call: Call, dout: Tensor, lse: Tensor, delta: Tensor, grads: Grads) -> None:
        spec = self.spec
        dq = grads.dq
        layouts = (
            *self._layouts(call, layout_of(dout)),
            layout_of(call.query if dq is None else dq),
        )
        totals = tuple(total for i in self._learned if (total := grads.captured[i]) is not None)
        config = self._config("queries")
        described = self._describable(call.key, call.value)
        key = ("queries", config, dq is not None, described, *_classes(layouts))
        program = self._programs.get(key)
        names = ("query", "key", "value", "dout", "dq")
        if program is None:
            program = self._program(
                key,
                backward_queries.query_kernel,
                {
                    **self._pointers(*names),
                    **self._descriptors(described, config.block_n, key="D", value="DV"),
                    **_floats("lse", "delta"),
                    **self._common_types(),
                    "totals": tuple(pointer_type(total.dtype) for total in totals),
                    **_strides("q_strides", "k_strides", "v_strides", "do_strides", "dq_strides"),
                    **_i32("batch_heads", "heads", "q_length", "kv_length", "tiles",
                           "head_group"),
                },
                {
                    **self._common_constants(layouts),
                    "SCORE_MOD": self._score_mod,
                    "SCORE_MOD_BACKWARD": self._score_mod_backward,
                    "CAPTURED_GRADIENTS": self._captured_gradients if totals else None,
                    "MASK_MOD": self._mask_mod,
                    "Q_BLOCK": spec.block_size[0],
                    "WANT_DQ": dq is not None,
                    "DESCRIBED": described,
                    "BLOCK_M": config.block_m,
                    "BLOCK_N": config.block_n,
                },
                _aligned(names, layouts, ("key", "value") * described),
                config.options,
            )  # fmt: skip
        batch, heads, length = call.query.shape[:3]
        tiles = self._row_tiles(call, config.block_m)
        program.launch(
            tiles * batch * heads,
            call.query.device,
            {
                **self._common_values(call, call.mask),
                "query": call.query, "dout": dout,
                **self._described(described, config.block_n, key=call.key, value=call.value),
                "lse": lse, "delta": delta, "dq": _or(dq, call.query), "totals": totals,
                "q_strides": layouts[0].strides, "k_strides": layouts[1].strides,
                "v_strides": layouts[2].strides, "do_strides": layouts[3].strides,
                "dq_strides": layouts[4].strides,
                "batch_heads": batch * heads, "heads": heads,
                "q_length": length, "kv_length": call.key.shape[2],
                "tiles": tiles, "head_group": self._head_group(call),
            },
        )  # fmt: skip

    # What all kernels are given

    def _program(
        self,
        key: object,
        function: Any,
        types: Mapping[str, Types],
        constants: Mapping[str, object],
        aligned: Sequence[str],
        options: Options,
    ) -> Program:
        with self._lock:
            found = self._programs.get(key)
            if found is None:
                found = Program(function, types, constants, aligned, options)
                self._programs[key] = found
        return found

    def _layouts(self, call: Call, *more: Layout) -> tuple[Layout, ...]:
        return (layout_of(call.query), layout_of(call.key), layout_of(call.value), *more)

    def _pointers(self, *names: str) -> dict[str, Types]:
        return dict.fromkeys(names, pointer_type(self.spec.dtype))

    def _describable(self, *tensors: Tensor) -> bool:
        """Whether descriptors can stand for these tensors, and the target has them."""
        return self.target in _DESCRIBING and all(is_described(tensor) for tensor in tensors)

    def _descriptors(self, described: bool, rows: int, **dims: str) -> dict[str, Types]:
        if not described:
            return {}
        spec = self.spec
        width = {"D": _padded(spec.head_dim), "DV": _padded(spec.value_head_dim)}
        inner = pointer_type(spec.dtype)[1:]
        return {name: f"tensordesc<{inner}[{rows}, {width[d]}]>" for name, d in dims.items()}

    def _described(self, described: bool, rows: int, **tensors: Tensor) -> dict[str, object]:
        if not described:
            return dict(tensors)
        return {
            name: descriptor_of(tensor, rows, _padded(tensor.shape[3]))
            for name, tensor in tensors.items()
        }

    def _common_types(self) -> dict[str, Types]:
        spec = self.spec
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

    def _common_constants(self, layouts: Sequence[Layout]) -> dict[str, object]:
        spec = self.spec
        return {
            "HAS_MASK": spec.mask_kind == "runs",
            "KV_BLOCK": spec.block_size[1],
            "GROUP": spec.gqa_ratio,
            "KV_SHARED": spec.kv_broadcast,
            "DIM": spec.head_dim,
            "VALUE_DIM": spec.value_head_dim,
            "D": _padded(spec.head_dim),
            "DV": _padded(spec.value_head_dim),
            "UNITS": tuple(layout.unit for layout in layouts),
            "SCATTERED": tuple(layout.scattered for layout in layouts),
            "WIDE": spec.index_width == 64,
            "PRECISION": "ieee",
        }

    def _common_values(self, call: Call, mask: MaskViews | None) -> dict[str, object]:
        types = self._common_types()
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

    def _row_tiles(self, call: Call, block_m: int) -> int:
        length = call.query.shape[2]
        if call.mask is None:
            return -(-length // block_m)
        q_block = call.mask.block_size[0]
        return -(-length // q_block) * -(-q_block // block_m)

    def _head_group(self, call: Call) -> int:
        """Query heads that run at a time."""
        spec = self.spec
        of_head = call.key.shape[2] * (spec.head_dim + spec.value_head_dim) * spec.dtype.itemsize
        return max(1, _HEAD_GROUP_BYTES // max(1, of_head)) * spec.gqa_ratio


def cores(device: torch.device) -> int:
    """Multiprocessors of an accelerator, or what its vendor calls them."""
    if device.type == "cpu":
        return 2
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count"):
        count = getattr(properties, name, None)
        if count:
            return int(count)
    return 32


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _classes(layouts: Sequence[Layout]) -> tuple[tuple[int, bool], ...]:
    return tuple((layout.unit, layout.scattered) for layout in layouts)


def _aligned(
    names: Sequence[str], layouts: Sequence[Layout], described: Sequence[str] = ()
) -> tuple[str, ...]:
    return tuple(
        name
        for name, layout in zip(names, layouts, strict=True)
        if layout.unit > 1 and name not in described
    )


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer that is never used must still be one."""
    return stand_in if tensor is None else tensor


def _floats(*names: str) -> dict[str, Types]:
    return dict.fromkeys(names, "*fp32")


def _strides(*names: str) -> dict[str, Types]:
    return dict.fromkeys(names, ("i64",) * 4)


def _i32(*names: str) -> dict[str, Types]:
    return dict.fromkeys(names, "i32")
