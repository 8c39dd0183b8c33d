"""anyflex's static ops: their schemas, and where they are implemented.

Importing this module defines the ops of `OPS` and imports none of their implementations: a program
that another process has saved finds its ops, whichever it has.

torch looks for the file of each frame that registers a fake implementation, among all modules that
are imported. It remembers files: one that registers all ops is looked for once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["OPS", "StaticOp", "implement"]


class StaticOp(NamedTuple):
    """An op whose functions are imported when they are called first.

    Args:
        schema: what follows the library's name.
        run, fake: ``"module:function"``, the implementation and the one on fake tensors.
        captured: whether a device graph may capture it.
    """

    schema: str
    run: str
    fake: str
    captured: bool = True


_MASK = "-> (Tensor, Tensor, Tensor)"
OPS = (
    # tensors: those that the mask mod captured, then, as 0-d CPU float64 tensors, a 1 that no mod
    # reads and its floats. ints: how many tensors it captured; batch and heads of the mask; Q_LEN
    # and KV_LEN; the block size; then its ints. No list is ever empty: AOTInductor's executor
    # hands an empty list on as None.
    StaticOp(
        f"block_mask(Tensor[] tensors, SymInt[] ints, str request, *, Device device) {_MASK}",
        "anyflex.block_mask.op_implementations:built",
        "anyflex.block_mask.mask_ops:fake_built",
        captured=False,
    ),
    # ints: Q_LEN and KV_LEN; the block size; 1 if there is a mask mod; rows that runs must have.
    StaticOp(
        f"checked_block_mask(Tensor offsets, Tensor runs, SymInt[] ints) {_MASK}",
        "anyflex.block_mask.op_implementations:checked",
        "anyflex.block_mask.mask_ops:fake_checked",
        captured=False,
    ),
    # structure: offsets and runs, and the mark if there is one. ints: Q_LEN and KV_LEN; the block
    # size; start, stop and kv_len; 1 if the mask mod can tell what a block of two kinds holds.
    StaticOp(
        f"block_mask_rows(Tensor[] structure, SymInt[] ints) {_MASK}",
        "anyflex.block_mask.op_implementations:rows",
        "anyflex.block_mask.mask_ops:fake_rows",
        captured=False,
    ),
    # Pools are [P, Hkv, page, E] and [P, Hkv, page, Ev], any strides; scales, of pools in 8 bits,
    # float32 [P, Hkv, page]. key and value are [T, Hkv, E] and [T, Hkv, Ev]. places: int64 [T],
    # page * page size + row; a row whose place isn't in the pool is dropped. Two rows have one
    # place only if it isn't in the pool, or if nobody reads it. drops=False promises that all are
    # in it.
    StaticOp(
        "append_kv(Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor(c!)? key_scale, "
        "Tensor(d!)? value_scale, Tensor key, Tensor value, Tensor places, bool drops=True) -> ()",
        "anyflex.paging.append_op:append",
        "anyflex.paging.append_op:fake_append",
    ),
    # query is [1, Hq, T, E]; key and value are [1, Hkv, S, E | Ev], or pools of pages. tensors:
    # q_offsets, q_starts, kv_lengths, slots, page_table or kv_offsets; with scales that of key and
    # that of value; captured tensors, the score mod's, then the mask mod's; then numbers as 0-d
    # CPU float64 tensors: the scale, the score mod's floats, the mask mod's. ints: how many
    # tensors are captured; max_q and max_kv; the two of `Packed.known`, the first above the second
    # for None; then the score mod's ints and the mask mod's. Returns out [1, Hq, T, Ev], lse and
    # max_scores [1, Hq, T]; what nobody asked for has no elements.
    StaticOp(
        "flex_attention_packed(Tensor query, Tensor key, Tensor value, Tensor[] tensors, "
        f"SymInt[] ints, str request) {_MASK}",
        "anyflex.packed.op_implementation:attend",
        "anyflex.packed.packed_op:fake_attend",
    ),
)


def implement(
    library: Any, name: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Give an op that `library` defines its implementation and the one on fake tensors."""
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anyflex::{name}", fake, lib=library)


def _later(path: str) -> Callable[..., Any]:
    """Return a function that calls ``"module:function"``."""
    module, _, name = path.partition(":")

    def called(*given: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*given, **named)

    return called


# torch.library is not annotated.
_library: Any = torch.library.Library("anyflex", "FRAGMENT")  # type: ignore[no-untyped-call]
_uncapturable = getattr(torch.Tag, "cudagraph_unsafe", None)
for _op in OPS:
    _tags = () if _op.captured or _uncapturable is None else (_uncapturable,)
    _library.define(_op.schema, tags=_tags)
    implement(_library, _op.schema.partition("(")[0], _later(_op.run), _later(_op.fake))
