"""Masks and score mods whose tensors are drawn: sized for the call, the same ones each time.

A name, and after a colon whole numbers: ``random_documents:200,1800``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflex import masks, mods
from anyflex.bench.usage_errors import WrongUsage

__all__ = ["DRAWN_MASKS", "DRAWN_MODS", "DrawnPattern", "PatternCall"]

_BLOCK = 128
"""Rows, and columns, of a block of ``random_blocks``."""


class PatternCall(NamedTuple):
    """Facts of the call that a pattern is made for.

    Args:
        shape: [B, Hq, L, S].
        device: of the call, and so of drawn tensors.
        dtype: of query.
        learns: whether the call has a backward. Learned tensors then require gradients.
    """

    shape: tuple[int, int, int, int]
    device: torch.device
    dtype: torch.dtype = torch.float32
    learns: bool = False

    def drawn(self, *shape: int, seed: int = 0) -> Tensor:
        """Return random normal numbers in query's dtype. They are drawn on the host, the same for
        every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)


class DrawnPattern(NamedTuple):
    """A pattern by its spelling.

    Args:
        example: a spelling.
        make: takes the call and the numbers, as many as the example has; raises ValueError for
            numbers that mean nothing.
    """

    example: str
    make: Callable[..., Callable[..., Any]]

    def made(self, option: str, text: str, call: PatternCall) -> Callable[..., Any]:
        """Return the mod that `text` spells. Raises WrongUsage, which names `option`."""
        written, wanted = (each.partition(":")[2] for each in (text, self.example))
        try:
            numbers = [int(part) for part in written.split(",")] if written else []
            if len(numbers) != (wanted.count(",") + 1 if wanted else 0):
                raise ValueError
            return self.make(call, *numbers)
        except ValueError as error:
            raise WrongUsage(f"{option} {text}: write it like {self.example}") from error


def _random_documents(call: PatternCall, low: int, high: int) -> Callable[..., Any]:
    """Packed documents of `low` to ``high - 1`` tokens."""
    if not 0 < low < high:
        raise ValueError
    length = call.shape[3]
    # A short sequence gets shorter documents, so that it too has several.
    low, high = min(low, max(1, length // 8)), min(high, max(2, length // 3))
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(low, high, (length // low + 1,), generator=generator).cumsum(0)
    ids = torch.bucketize(torch.arange(length), ends, right=True)
    return masks.document(ids.to(call.device))


def _random_blocks(call: PatternCall, percent: int) -> Callable[..., Any]:
    """Blocks of which each row of blocks has `percent`, and one at least."""
    if not 0 < percent <= 100:
        raise ValueError
    rows, columns = (-(-length // _BLOCK) for length in call.shape[2:])
    count = max(1, round(columns * percent / 100))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(rows, columns, generator=generator).argsort(-1)[:, :count]
    live = torch.zeros(rows, columns, dtype=torch.bool).scatter(1, chosen, True).to(call.device)

    def random_blocks(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return live[q_idx // _BLOCK, kv_idx // _BLOCK]

    return random_blocks


def _random_tree(call: PatternCall) -> Callable[..., Any]:
    """A tree of drafts behind a prefix: each query but the first has a parent among those before
    it, and the keys are the prefix's and the queries' own."""
    queries, keys = call.shape[2:]
    if queries > keys:
        raise WrongUsage(f"--mask random_tree: {queries} queries have {keys} keys, not their own")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(queries, generator=generator) * torch.arange(queries)
    parents = drawn.to(torch.int32)
    parents[:1] = -1
    # As a tensor, because it is another number at each step.
    prefix = torch.tensor(keys - queries, device=call.device)
    return masks.tree(parents.to(call.device), prefix)


def _random_t5(call: PatternCall, buckets: int) -> Callable[..., Any]:
    """T5's bias of a decoder, with a learned table in float32."""
    table = call._replace(dtype=torch.float32).drawn(buckets, call.shape[1])
    return mods.t5_bias(table.requires_grad_(call.learns), bidirectional=False)


def _random_bias(call: PatternCall) -> Callable[..., Any]:
    """A bias for each query and key, the same one for all heads."""
    return mods.dense_bias(call.drawn(*call.shape[2:]))


def _random_image_bias(call: PatternCall, width: int) -> Callable[..., Any]:
    """Decomposed relative position: for each query a bias by the key's row of an image `width`
    keys wide, and one by its column. Source: Li et al. 2022, MViTv2, arXiv:2112.01526."""
    if width < 1:
        raise ValueError
    batch, heads, queries, keys = call.shape
    by_row = call.drawn(batch, heads, queries, -(-keys // width))
    by_column = call.drawn(batch, heads, queries, width, seed=1)

    def image_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        of_row = by_row[b, h, q_idx, kv_idx // width]
        return score + of_row + by_column[b, h, q_idx, kv_idx % width]

    return image_bias


DRAWN_MASKS: Mapping[str, DrawnPattern] = {
    "random_documents": DrawnPattern("random_documents:200,1800", _random_documents),
    "random_blocks": DrawnPattern("random_blocks:10", _random_blocks),
    "random_tree": DrawnPattern("random_tree", _random_tree),
}
"""Name -> mask."""

DRAWN_MODS: Mapping[str, DrawnPattern] = {
    "random_t5": DrawnPattern("random_t5:32", _random_t5),
    "random_bias": DrawnPattern("random_bias", _random_bias),
    "random_image_bias": DrawnPattern("random_image_bias:64", _random_image_bias),
}
"""Name -> score mod."""
