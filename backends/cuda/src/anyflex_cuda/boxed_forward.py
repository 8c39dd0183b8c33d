"""What forward's kernels in Gluon have in common: which tensors TMA loads for them, what they are
compiled with and given. `forward_call` has Hopper's, `blackwell_call` Blackwell's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from anyflex.plugin import Call, Outputs, Spec, TensorSpec
from anyflex_cuda.gluon_program import descriptor, descriptor_type, is_boxed
from anyflex_cuda.gluon_programs import GluonPrograms
from anyflex_triton.launch import Launch, Program, Types
from anyflex_triton.programs import MaskRows, float_pointers, int32s, or_else

__all__ = [
    "boxed_constants",
    "boxed_launch",
    "boxed_types",
    "refusal",
    "width",
    "workspace",
]

_STRIDES = ("q_strides", "k_strides", "v_strides", "o_strides", "r_strides")
Boxes = Mapping[str, tuple[int, ...]]
"""What one load or store moves, by names of descriptors: of query, key, value, out and rest."""


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


def workspace() -> tuple[TensorSpec, ...]:
    """The counter of tiles."""
    return (TensorSpec((1,), torch.int32, zeroed=True),)


def width(dim: int) -> int:
    """Columns of a tile in shared memory, and of a product."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def boxed_types(made: GluonPrograms, boxes: Boxes) -> dict[str, Types]:
    """Types of all arguments."""
    return {
        **{name: descriptor_type(made.spec.dtype, box) for name, box in boxes.items()},
        **made.pointers("query", "key", "value", "out", "rest"),
        **dict.fromkeys(_STRIDES, ("i64",) * 3),
        **float_pointers("lse", "max_scores"),
        "counter": "*i32",
        **made.common_types,
        **int32s("batch_heads", "heads", "q_length", "kv_length", "tiles", "head_group"),
    }


def boxed_constants(
    spec: Spec, score_mod: object, mask_mod: object, even: bool, lse: bool, max_scores: bool,
    rest: bool,
) -> dict[str, object]:  # fmt: skip
    """Constants that each of them has.

    Args:
        score_mod, mask_mod: of `GluonPrograms.mods`.
        even: lengths of keys, and of the mask's blocks, are multiples of a step's.
        lse, max_scores, rest: which outputs beside out are wanted.
    """
    return {
        "SCORE_MOD": score_mod,
        "MASK_MOD": mask_mod,
        "HAS_MASK": spec.mask_kind == "runs",
        "Q_BLOCK": spec.block_size[0],
        "KV_BLOCK": spec.block_size[1],
        "GROUP": spec.gqa_ratio,
        "KV_SHARED": spec.kv_broadcast,
        "DIM": spec.head_dim,
        "VALUE_DIM": spec.value_head_dim,
        "D": width(spec.head_dim),
        "DV": width(spec.value_head_dim),
        "WANT_LSE": lse,
        "WANT_MAX": max_scores,
        "WANT_REST": rest,
        "EVEN": even,
    }


def boxed_launch(
    made: GluonPrograms, program: Program, boxes: Boxes, call: Call, out: Outputs,
    rows: MaskRows | None, tiles: int, most: int,
) -> Launch:  # fmt: skip
    """The launch for a call without `refusal`.

    Args:
        rows: of the call's mask.
        tiles: of a head.
        most: programs at a time.
    """
    rest = out.saved[0] if out.saved else None
    batch, heads, length = call.query.shape[:3]
    tensors = (call.query, call.key, call.value, out.out, or_else(rest, out.out))
    (counter,) = out.workspace
    return Launch(
        program,
        min(tiles * batch * heads, most),
        {
            **made.common_values(call, rows),
            **{
                name: descriptor(tensor, box)
                for (name, box), tensor in zip(boxes.items(), tensors, strict=True)
            },
            **dict(zip(("query", "key", "value", "out", "rest"), tensors, strict=True)),
            **{name: t.stride()[:3] for name, t in zip(_STRIDES, tensors, strict=True)},
            "lse": or_else(out.lse, out.out),
            "max_scores": or_else(out.max_scores, out.out),
            "counter": counter,
            "batch_heads": batch * heads,
            "heads": heads,
            "q_length": length,
            "kv_length": call.key.shape[2],
            "tiles": tiles,
            "head_group": made.head_group(call),
        },
    )
