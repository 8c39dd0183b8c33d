"""Calls that the fuzzer draws: shapes, layouts, mods, masks, options."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_mods import MASKS, SCORES, Drawn, index
from fuzz_tensors import laid_out, with_nonfinite
from torch import Tensor

import anyflex

__all__ = ["Call", "arguments_of", "arriving", "draw_call"]

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 1, 2, 3, 5, 7, 16, 17, 17, 33, 40, 64, 65, 130)
BLOCKS = ((16, 16), (32, 64), (128, 128), (1, 1), (16, 48))

# Kinds of large calls, which take paths that other calls are too short for: `fuzz_paths.OF_LARGE`.
KEYS = (520, 777, 1024, 1025, 1300, 1700, 2049, 3000)
FEW = (1, 1, 2, 3, 4, 4, 7, 16)
"""Queries of decoding."""
MANY = (20, 65, 130, 257, 400, 700)
WIDE = (65, 80, 96, 128, 192, 200, 256, 512)
LARGE_BLOCKS = ((16, 16), (32, 64), (128, 128), (64, 256), (16, 48))
PAIRS = 370_000
PRODUCTS = 50_000_000
"""Maximum number of products: pairs times elements of keys and values. One core takes 50 ms for
such a call."""

OF_BATCHES = ("lengths",)
OF_HEADS = ("stripes", "any pairs")


@dataclass
class Call:
    """A right call.

    Args:
        inputs: query, key, value.
        kinds: names of the mods.
        score, mask: the mods, or None.
        mask_size: batch and heads of the block mask, None for one mask for all.
        learned: names of inputs, and positions of the score mod's tensors, that require a
            gradient.
        aux: whether the gradient arrives at lse too.
        nonfinite: some input holds NaN or infinity.
    """

    inputs: dict[str, Tensor]
    kinds: dict[str, str]
    score: Drawn | None
    mask: Drawn | None
    mask_size: tuple[int | None, int | None]
    block_size: tuple[int, int]
    scale: float | None
    options: dict[str, Any] | None
    learned: frozenset[str]
    aux: bool
    nonfinite: bool

    def __str__(self) -> str:
        inputs = [
            f"{name} {list(each.shape)} strides {each.stride()} {each.dtype}"
            for name, each in self.inputs.items()
        ]
        mods = [
            f"{name} {self.kinds[name]} of {[(list(t.shape), t.dtype) for t in mod.tensors]}"
            for name, mod in (("score", self.score), ("mask", self.mask))
            if mod is not None
        ]
        facts = [
            f"{name}={getattr(self, name)}"
            for name in (
                "mask_size",
                "block_size",
                "scale",
                "options",
                "learned",
                "aux",
                "nonfinite",
            )
        ]
        return ", ".join(inputs + mods + facts)


@dataclass(frozen=True)
class Shapes:
    batch: int
    kv_batch: int
    kv_heads: int
    group: int
    length: int
    keys: int
    dim: int
    value_dim: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def pairs(self) -> int:
        return self.batch * self.heads * self.length * self.keys


def small_sizes(draw: random.Random) -> Shapes:
    batch = draw.choice([1, 1, 2, 3])
    dim = draw.choice([1, 8, 17, 32, 64])
    return Shapes(
        batch=batch,
        kv_batch=draw.choice([batch, batch, 1]),
        kv_heads=draw.choice([1, 1, 2]),
        group=draw.choice([1, 1, 2, 3]),
        length=draw.choice(LENGTHS),
        keys=draw.choice(LENGTHS),
        dim=dim,
        value_dim=draw.choice([dim, dim, 3, 40]),
    )


def large_sizes(draw: random.Random) -> Shapes:
    """Many keys and wide heads, for a few queries or for as many as `PAIRS` and `PRODUCTS`
    allow."""
    decodes = draw.random() < 0.6
    while True:
        batch = draw.choice([1, 1, 2])
        dim = draw.choice(WIDE)
        shapes = Shapes(
            batch=batch,
            kv_batch=draw.choice([batch, batch, 1]),
            kv_heads=draw.choice([1, 1, 2]),
            group=draw.choice([1, 2, 8, 8, 16] if decodes else [1, 1, 2, 3]),
            length=draw.choice(FEW if decodes else MANY),
            keys=draw.choice(KEYS),
            dim=dim,
            value_dim=draw.choice([dim, dim, 40, *WIDE]),
        )
        products = shapes.pairs * (shapes.dim + shapes.value_dim)
        if shapes.pairs <= PAIRS and products <= PRODUCTS:
            return shapes


def draw_call(draw: random.Random, *, large: bool = False) -> Call:
    dtype = draw.choice(DTYPES)
    drawn = large_sizes(draw) if large else small_sizes(draw)
    batch, heads, length, keys = drawn.batch, drawn.heads, drawn.length, drawn.keys
    of_keys = (drawn.kv_batch, drawn.kv_heads, keys)
    inputs = {
        "query": laid_out(draw, (batch, heads, length, drawn.dim), dtype),
        "key": laid_out(draw, (*of_keys, drawn.dim), dtype),
        "value": laid_out(draw, (*of_keys, drawn.value_dim), dtype),
    }
    nonfinite = draw.random() < 0.15
    if nonfinite:
        name = draw.choice(list(inputs))
        inputs[name] = with_nonfinite(draw, inputs[name])
    sizes = (batch, heads, length, keys)
    score_kind = draw.choice(list(SCORES)) if draw.random() < 0.7 else ""
    score = SCORES[score_kind](draw, sizes) if score_kind else None
    kind = draw.choice(list(MASKS)) if draw.random() < 0.6 else ""
    learned = {name for name in inputs if draw.random() < 0.4}
    if score is not None and draw.random() < 0.4:
        learned |= {str(position) for position in score.learned}
    mods = draw.choice(["auto", "interpreter", "interpreter", "interpreter", "jit", None])
    return Call(
        inputs=inputs,
        kinds={"score": score_kind, "mask": kind},
        score=score,
        mask=MASKS[kind](draw, sizes) if kind else None,
        mask_size=(
            batch if kind in OF_BATCHES or draw.random() < 0.2 else None,
            heads if kind in OF_HEADS or draw.random() < 0.2 else None,
        ),
        block_size=draw.choice(LARGE_BLOCKS if large else BLOCKS),
        scale=draw.choice([None, None, None, 0.0, -0.25]),
        options=None if mods is None else {"cpu": {"mods": mods}},
        learned=frozenset(learned),
        aux=draw.random() < 0.4,
        nonfinite=nonfinite,
    )


def arguments_of(call: Call) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the arguments, and the leaves that gradients are asked of.

    Raises AnyflexError where the block mask can't be made.
    """
    leaves = []
    arguments: dict[str, Any] = {"scale": call.scale, "enable_gqa": True}
    arguments["kernel_options"] = call.options
    for name, tensor in call.inputs.items():
        # A view keeps its strides, which a copy as a leaf might not.
        if name in call.learned:
            leaf = tensor.detach().requires_grad_()
            leaves.append(leaf)
            arguments[name] = leaf
        else:
            arguments[name] = tensor
    if call.score is not None:
        tensors = list(call.score.tensors)
        for position in call.score.learned:
            if str(position) in call.learned:
                tensors[position] = tensors[position].detach().requires_grad_()
                leaves.append(tensors[position])
        arguments["score_mod"] = call.score.function(index, tensors)
    if call.mask is not None:
        arguments["block_mask"] = anyflex.create_block_mask(
            call.mask.function(index),
            *call.mask_size,
            call.inputs["query"].shape[2],
            call.inputs["key"].shape[2],
            BLOCK_SIZE=call.block_size,
        )
    if call.aux:
        arguments["return_aux"] = anyflex.AuxRequest(lse=True, max_scores=True)
    return arguments, leaves


def arriving(call: Call, out: Tensor, lse: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The gradients that arrive at out and lse, in their types."""
    generator = torch.Generator().manual_seed(seed)
    dtype = call.inputs["query"].dtype
    dout = torch.randn(out.shape, generator=generator).to(dtype)
    dlse = torch.randn(lse.shape, generator=generator) if call.aux else torch.zeros(lse.shape)
    return dout, dlse
