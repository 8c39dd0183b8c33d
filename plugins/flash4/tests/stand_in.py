"""Modules that stand in for flash_attn.cute and CUTLASS: their calls are computed by the dense
formula, with a whole score matrix as one lane."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

__all__ = ["Recorded", "install"]

TYPES = {
    "Boolean": torch.bool,
    "Uint8": torch.uint8,
    "Int8": torch.int8,
    "Int16": torch.int16,
    "Int32": torch.int32,
    "Int64": torch.int64,
    "Float16": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float32": torch.float32,
    "Float64": torch.float64,
}


class Number:
    """A scalar of CuTe: its operators keep the type, comparisons give a Boolean."""

    dtype: torch.dtype
    of: ClassVar[dict[torch.dtype, type[Number]]] = {}

    def __init__(self, value: Any) -> None:
        value = value.value if isinstance(value, Number) else value
        self.value = torch.as_tensor(value).to(self.dtype)


def _operator(function: Callable[..., Any]) -> Callable[..., Number]:
    def apply(a: Number, *rest: Number) -> Number:
        # As on the device, division rounds to zero, and nothing is promoted silently.
        assert all(type(b) is type(a) for b in rest), (type(a), [type(b) for b in rest])
        if function is operator.floordiv:
            found = torch.div(a.value, rest[0].value, rounding_mode="trunc")
        else:
            found = function(a.value, *(b.value for b in rest))
        return Number.of[found.dtype](found)

    return apply


for _name in "add sub mul truediv floordiv and_ or_ xor lshift rshift eq ne lt le gt ge".split():
    _text = f"__{_name.rstrip('_')}__"
    setattr(Number, _text, _operator(getattr(operator, _name)))
Number.__neg__ = _operator(operator.neg)  # type: ignore[attr-defined]
KINDS = {name: type(name, (Number,), {"dtype": dtype}) for name, dtype in TYPES.items()}
Number.of = {dtype: KINDS[name] for name, dtype in TYPES.items()}


class Lanes(list[Number]):
    """A register vector."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def load(self) -> Lanes:
        return self


class Table:
    """A captured tensor, as CuTe sees it."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dim() == 1 and tensor.is_contiguous() and tensor.numel()
        self.tensor = tensor

    def __getitem__(self, place: Any) -> Number:
        place = place.value if isinstance(place, Number) else torch.tensor(place)
        assert bool((place >= 0).all()) and bool((place < len(self.tensor)).all())
        return Number.of[self.tensor.dtype](self.tensor[place])


class Lists(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


class Recorded:
    """The arguments of the last forward and backward."""

    forward: dict[str, Any]
    backward: dict[str, Any]


def _lane(tensor: Tensor) -> Lanes:
    return Lanes([Number.of[tensor.dtype](tensor)])


def _scores(
    query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Masked scores [B, H, L, S] and value [B, H, S, E] in float64, differentiable."""
    batch, rows, heads, _ = query.shape
    columns, kv_heads = key.shape[1:3]
    query, key, value = (each.transpose(1, 2).double() for each in (query, key, value))
    key, value = (each.repeat_interleave(heads // kv_heads, 1) for each in (key, value))
    scores = query @ key.mT * given["softmax_scale"]
    sizes = (batch, heads, rows, columns)
    index = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in sizes), indexing="ij")
    tables = [Table(each) for each in given.get("aux_tensors") or ()]
    if given.get("score_mod") is not None:
        # As in the kernels: indices past the end are masked too.
        found = Modified.apply(scores, given, index, tables)
        scores = found
    live = torch.ones(sizes, dtype=torch.bool)
    distance = index[3] - index[2] + rows - columns
    right, left = given.get("window_size_right"), given.get("window_size_left")
    if given.get("causal"):
        right = 0
    if right is not None:
        live &= distance <= right
    if left is not None:
        live &= -distance <= left
    lists = given.get("block_sparse_tensors")
    if lists is not None:
        live &= _within(lists, given, index, tables)
    return scores.masked_fill(~live, -torch.inf), value


class Modified(torch.autograd.Function):
    """The score mod, and its own slope."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, given: dict[str, Any], index: Any, tables: list[Table]
    ) -> Tensor:
        ctx.given, ctx.index, ctx.tables = given, index, tables
        ctx.save_for_backward(scores)
        b, h, q_idx, kv_idx = (_lane(each) for each in index)
        made = given["score_mod"](
            _lane(scores.float()),
            b,
            h,
            q_idx=q_idx,
            kv_idx=kv_idx,
            seqlen_info=None,
            aux_tensors=tables,
        )
        return made[0].value.expand(scores.shape).double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (scores,) = ctx.saved_tensors
        b, h, q_idx, kv_idx = (_lane(each) for each in ctx.index)
        made = ctx.given["score_mod_bwd"](
            _lane(grad.float()),
            _lane(scores.float()),
            b,
            h,
            q_idx=q_idx,
            kv_idx=kv_idx,
            seqlen_info=None,
            aux_tensors=ctx.tables,
        )
        return made[0].value.expand(scores.shape).double(), None, None, None


def _within(
    lists: Lists, given: dict[str, Any], index: Sequence[Tensor], tables: list[Table]
) -> Tensor:
    batch, heads, rows, columns = index[0].shape
    q_block, kv_block = lists.block_size
    kept = torch.ones(batch, heads, rows, columns, dtype=torch.bool)
    if given["mask_mod"] is not None:
        made = given["mask_mod"](*(_lane(each) for each in index), None, tables)
        kept = made[0].value.bool().expand(kept.shape)
    backward = given["backward"]
    live = torch.zeros_like(kept)
    for counts, blocks, full in (
        (lists.mask_block_cnt, lists.mask_block_idx, False),
        (lists.full_block_cnt, lists.full_block_idx, True),
    ):
        counts = counts.expand(batch, heads, -1)
        blocks = blocks.expand(batch, heads, -1, -1)
        for b, h, row in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
            for column in blocks[b, h, row, : counts[b, h, row]].tolist():
                q, kv = (column, row) if backward else (row, column)
                place = (
                    b,
                    h,
                    slice(q * q_block, (q + 1) * q_block),
                    slice(kv * kv_block, (kv + 1) * kv_block),
                )
                live[place] = True if full else kept[place]
    return live


def install(patch: pytest.MonkeyPatch) -> Recorded:
    """Install the modules; return the record of their calls."""
    recorded = Recorded()

    def forward(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> None:
        recorded.forward = given
        scores, value = _scores(query, key, value, {**given, "backward": False})
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        given["out"].copy_((weights @ value).transpose(1, 2))
        if given["lse"] is not None:
            given["lse"].copy_(lse)

    def backward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        **given: Any,
    ) -> None:
        recorded.backward = given
        leaves = [each.double().requires_grad_() for each in (query, key, value)]
        with torch.enable_grad():
            scores, value_ = _scores(*leaves, {**given, "backward": True})
        dead = lse == -torch.inf
        weights = (scores.detach() - lse.masked_fill(dead, 0).unsqueeze(-1)).exp()
        dout = dout.transpose(1, 2).double()
        delta = (dout * out.transpose(1, 2)).sum(-1)
        if given["dlse"] is not None:
            delta = delta - given["dlse"]
        dscores = weights * (dout @ value_.detach().mT - delta.unsqueeze(-1))
        gradients = torch.autograd.grad(
            (scores, value_), leaves, (dscores, weights.mT @ dout), allow_unused=True
        )
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            if given[name] is not None:
                given[name].copy_(gradient)

    def function(name: str) -> Callable[..., Number]:
        found = {"rem": torch.fmod, "roundeven": torch.round}.get(name) or getattr(torch, name)

        def call(*operands: Number) -> Number:
            assert all(isinstance(each, (KINDS["Float32"], KINDS["Float64"])) for each in operands)
            made = found(*(each.value for each in operands))
            return Number.of[made.dtype](made)

        return call

    class Math(types.ModuleType):
        def __getattr__(self, name: str) -> Callable[..., Number]:
            return function(name)

    def select(condition: Number, a: Number, b: Number) -> Tensor:
        assert type(condition) is KINDS["Boolean"] and type(a) is type(b)
        return torch.where(condition.value, a.value, b.value)

    modules: dict[str, dict[str, Any]] = {
        "cutlass": dict(KINDS),
        "cutlass.cute": {
            "math": Math("math"),
            "size": len_of,
            "make_rmem_tensor": lambda count, dtype: Lanes([dtype(0)] * count),
        },
        "cutlass.cutlass_dsl": {"select_": select},
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": Lists},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        for member, value in members.items():
            setattr(module, member, value)
        patch.setitem(__import__("sys").modules, name, module)
    return recorded


def len_of(shape: tuple[int, ...]) -> int:
    """cute.size of a register vector's shape."""
    (count,) = shape
    return count
