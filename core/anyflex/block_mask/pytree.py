"""BlockMask as a pytree, for torch.compile, export and tree_map.

Leaves: offsets, runs, Q_LEN, KV_LEN, the captured tensors, then the numbers of the mask mod.
Lengths and numbers are leaves because they change from call to call: as part of the structure each
value would compile another program. A map may replace leaves with anything, and torch replaces
them with fake tensors and plain objects: a mask is checked at its first use, not when it is
rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from anyflex.block_mask.mask_function import sliced_mask_mod
from anyflex.block_mask.mask_state import MaskContent
from anyflex.tensors.torch_versions import GetAttrKey, register_pytree_node
from anyflex.tracing.trace import TracedMod

__all__ = ["register"]

_Context = tuple[Any, ...]
Mask = TypeVar("Mask", bound=MaskContent)


def register(cls: type[MaskContent]) -> None:
    """Register the class; done once, where it is defined."""
    register_pytree_node(
        cls,
        _flatten,
        lambda leaves, context: _unflatten(cls, leaves, context),
        serialized_type_name="anyflex.BlockMask",
        to_dumpable_context=_to_json,
        from_dumpable_context=_from_json,
        flatten_with_keys_fn=_flatten_with_keys,
    )


def _flatten(mask: MaskContent) -> tuple[list[Any], _Context]:
    traced = mask.traced
    leaves: list[Any] = [mask.offsets, mask.runs, *mask.seq_lengths]
    form: tuple[Any, ...] | None = None
    if traced is not None:
        leaves += [*traced.captured, *traced.ints, *traced.floats]
        counts = (len(traced.captured), len(traced.ints))
        form = (traced.text, *counts, traced.depends_on_facts)
    return leaves, (mask.BLOCK_SIZE, form, mask.opaque, mask.needs_mask_mod, mask._zero_alone)


def _flatten_with_keys(mask: MaskContent) -> tuple[list[tuple[Any, Any]], _Context]:
    leaves, context = _flatten(mask)
    names = ["offsets", "runs", "q_length", "kv_length"]
    names += [f"mask_mod_{i}" for i in range(len(leaves) - len(names))]
    keys = [GetAttrKey(name) for name in names]
    return list(zip(keys, leaves, strict=True)), context


def _unflatten(cls: type[Mask], leaves: Iterable[Any], context: _Context) -> Mask:
    offsets, runs, q_length, kv_length, *rest = leaves
    block_size, form, opaque, needs_mask_mod, zero_alone = context
    traced = None
    if form is not None:
        text, captured, ints, depends_on_facts = form
        numbers = rest[captured:]
        traced = TracedMod(
            text,
            list(rest[:captured]),
            list(numbers[:ints]),
            list(numbers[ints:]),
            [""] * captured,
            depends_on_facts,
        )
    return cls._unchecked(
        offsets,
        runs,
        (q_length, kv_length),
        block_size,
        traced,
        opaque,
        sliced_mask_mod if needs_mask_mod else opaque,
        zero_alone,
    )


def _to_json(context: _Context) -> Any:
    block_size, form, opaque, needs_mask_mod, zero_alone = context
    if opaque is not None:
        raise ValueError(
            "a block mask whose mask_mod could not be traced can't be saved: write mask_mod with "
            "the operations of the documentation's table"
        )
    return [block_size, form, needs_mask_mod, zero_alone]


def _from_json(saved: Any) -> _Context:
    # JSON has no tuples.
    block_size, form, needs_mask_mod, zero_alone = (
        tuple(item) if isinstance(item, list) else item for item in saved
    )
    return block_size, form, None, needs_mask_mod, zero_alone
