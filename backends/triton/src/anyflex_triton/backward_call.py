"""Launching backward: delta, then dK and dV, then dQ and the gradients of captured tensors."""

from __future__ import annotations

from torch import Tensor

from anyflex.plugin import Call, GradInputs, Grads, Saved
from anyflex_triton import backward, backward_keys, backward_queries
from anyflex_triton.arguments import layout_of, row_strides
from anyflex_triton.launch import Options, pointer_type
from anyflex_triton.programs import (
    Programs,
    aligned,
    classes,
    float_pointers,
    int32s,
    or_else,
    padded,
    strides,
)

__all__ = ["launch_delta", "launch_keys", "launch_queries"]


def launch_delta(
    made: Programs, call: Call, saved: Saved, grad: GradInputs, delta: Tensor
) -> None:
    """Fill delta [B, Hq, L], float32."""
    spec = made.spec
    rest = saved.extras[0] if saved.extras else None
    layouts = (
        layout_of(saved.out),
        layout_of(grad.dout),
        layout_of(or_else(rest, saved.out)),
    )
    given = grad.delta is not None
    key = ("delta", given, grad.dlse is not None, rest is not None, *classes(layouts))
    program = made.existing.get(key)
    if program is None:
        program = made.program(
            key,
            backward.delta_kernel,
            {
                **made.pointers("out", "dout", "rest"),
                **float_pointers("dlse", "given", "delta"),
                **strides("o_strides", "do_strides", "r_strides"),
                "dl_strides": ("i64",) * 3,
                **int32s("heads", "q_length"),
            },
            {
                "VALUE_DIM": spec.value_head_dim,
                "DV": padded(spec.value_head_dim),
                "UNITS": tuple(layout.unit for layout in layouts),
                "SCATTERED": tuple(layout.scattered for layout in layouts),
                "WIDE": spec.index_width == 64,
                "HAS_DLSE": grad.dlse is not None,
                "IS_GIVEN": given,
                "HAS_REST": rest is not None,
                "BLOCK_M": 32,
            },
            aligned(("out", "dout", "rest"), layouts),
            Options(4, 1),
        )
    batch, heads, length = call.query.shape[:3]
    program.launch(
        batch * heads * -(-length // 32),
        call.query.device,
        {
            "out": saved.out, "rest": or_else(rest, saved.out), "dout": grad.dout,
            "r_strides": layouts[2].strides, "dlse": or_else(grad.dlse, delta),
            "given": delta if grad.delta is None else grad.delta.contiguous(), "delta": delta,
            "o_strides": layouts[0].strides, "do_strides": layouts[1].strides,
            "dl_strides": (0, 0, 0) if grad.dlse is None else row_strides(grad.dlse),
            "heads": heads, "q_length": length,
        },
    )  # fmt: skip


def launch_keys(
    made: Programs, call: Call, dout: Tensor, lse: Tensor, delta: Tensor, grads: Grads
) -> None:
    """Fill grads.dk and grads.dv."""
    spec = made.spec
    dk, dv = grads.dk, grads.dv
    layouts = (
        *made.layouts(call, layout_of(dout)),
        layout_of(call.key if dk is None else dk),
        layout_of(call.value if dv is None else dv),
    )
    config = made.config("keys")
    described = made.describable(call.query, dout)
    key = ("keys", config, dk is not None, dv is not None, described, *classes(layouts))
    program = made.existing.get(key)
    names = ("query", "key", "value", "dout", "dk", "dv")
    if program is None:
        program = made.program(
            key,
            backward_keys.key_kernel,
            {
                **made.pointers(*names),
                **made.descriptors(described, config.block_m, query="D", dout="DV"),
                **float_pointers("lse", "delta"),
                **made.common_types,
                **strides("q_strides", "k_strides", "v_strides", "do_strides", "dk_strides",
                           "dv_strides"),
                **int32s("batch", "heads", "kv_batch_heads", "kv_heads", "q_length",
                       "kv_length", "tiles", "head_group"),
            },
            {
                **made.common_constants(layouts),
                "SCORE_MOD": made.score_mod,
                "SCORE_MOD_BACKWARD": made.score_mod_backward,
                "MASK_MOD": made.mask_mod,
                "Q_BLOCK": spec.block_size[0],
                "WANT_DK": dk is not None,
                "WANT_DV": dv is not None,
                "DESCRIBED": described,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
            },
            aligned(names, layouts, ("query", "dout") * described),
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
            **made.common_values(call, mask),
            "key": call.key, "value": call.value,
            **made.described(described, config.block_m, query=call.query, dout=dout),
            "lse": lse, "delta": delta,
            "dk": or_else(dk, call.key), "dv": or_else(dv, call.value),
            "q_strides": layouts[0].strides, "k_strides": layouts[1].strides,
            "v_strides": layouts[2].strides, "do_strides": layouts[3].strides,
            "dk_strides": layouts[4].strides, "dv_strides": layouts[5].strides,
            "batch": batch, "heads": heads, "kv_batch_heads": kv_batch * kv_heads,
            "kv_heads": kv_heads, "q_length": length, "kv_length": keys,
            "tiles": tiles, "head_group": made.head_group(call),
        },
    )  # fmt: skip


def launch_queries(
    made: Programs, call: Call, dout: Tensor, lse: Tensor, delta: Tensor, grads: Grads
) -> None:
    """Fill grads.dq, and add to the captured tensors' gradients."""
    spec = made.spec
    dq = grads.dq
    layouts = (
        *made.layouts(call, layout_of(dout)),
        layout_of(call.query if dq is None else dq),
    )
    totals = tuple(total for i in made.learned if (total := grads.captured[i]) is not None)
    config = made.config("queries")
    described = made.describable(call.key, call.value)
    key = ("queries", config, dq is not None, described, *classes(layouts))
    program = made.existing.get(key)
    names = ("query", "key", "value", "dout", "dq")
    if program is None:
        program = made.program(
            key,
            backward_queries.query_kernel,
            {
                **made.pointers(*names),
                **made.descriptors(described, config.block_n, key="D", value="DV"),
                **float_pointers("lse", "delta"),
                **made.common_types,
                "totals": tuple(pointer_type(total.dtype) for total in totals),
                **strides("q_strides", "k_strides", "v_strides", "do_strides", "dq_strides"),
                **int32s("batch_heads", "heads", "q_length", "kv_length", "tiles",
                       "head_group"),
            },
            {
                **made.common_constants(layouts),
                "SCORE_MOD": made.score_mod,
                "SCORE_MOD_BACKWARD": made.score_mod_backward,
                "CAPTURED_GRADIENTS": made.captured_gradients if totals else None,
                "MASK_MOD": made.mask_mod,
                "Q_BLOCK": spec.block_size[0],
                "WANT_DQ": dq is not None,
                "DESCRIBED": described,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
            },
            aligned(names, layouts, ("key", "value") * described),
            config.options,
        )  # fmt: skip
    batch, heads, length = call.query.shape[:3]
    tiles = made.row_tiles(call, config.block_m)
    program.launch(
        tiles * batch * heads,
        call.query.device,
        {
            **made.common_values(call, call.mask),
            "query": call.query, "dout": dout,
            **made.described(described, config.block_n, key=call.key, value=call.value),
            "lse": lse, "delta": delta, "dq": or_else(dq, call.query), "totals": totals,
            "q_strides": layouts[0].strides, "k_strides": layouts[1].strides,
            "v_strides": layouts[2].strides, "do_strides": layouts[3].strides,
            "dq_strides": layouts[4].strides,
            "batch_heads": batch * heads, "heads": heads,
            "q_length": length, "kv_length": call.key.shape[2],
            "tiles": tiles, "head_group": made.head_group(call),
        },
    )  # fmt: skip
