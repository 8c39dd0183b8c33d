"""Trees: a token sees itself and its ancestors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.errors import ArgumentError
from anyflex.mods.factory_arguments import (
    INDICES,
    check_one_device,
    check_tensor,
    number_at,
    table_at,
)
from anyflex.tensors.dynamo_disabled import outside_graphs
from anyflex.tracing.mod_types import MaskMod

__all__ = ["tree"]


@outside_graphs
def tree(parents: Tensor, prefix: int | Tensor = 0) -> MaskMod:
    """Return the mask mod in which a token sees itself and its ancestors.

    A draft that is verified with one call is such a tree, and so are sampled answers that share
    their beginnings. The parents are read here, once: on a device that is a synchronisation.
    Numbering a tree takes about a microsecond a token.

    Examples:
        >>> import torch
        >>> # a root, its two children, two below one
        >>> mask_mod = tree(torch.tensor([-1, 0, 0, 1, 1]))

    Args:
        parents: [N] or [B, N], int32 or int64: the index of each token's parent, -1 for a root.
            Roots may be several, and tokens in any order.
        prefix: keys in front of the tree that everybody sees: the call has N queries and
            ``prefix + N`` keys. At least 0; int, or int32 or int64 tensor, [] or [B].

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a tensor of a wrong rank, a parent outside of -1 to N - 1, a cycle, a
            negative prefix, or tensors on different devices.

    Source: Miao et al. 2023, SpecInfer, arXiv:2305.09781; Cai et al. 2024, Medusa,
    arXiv:2401.10774. Ancestors by ranges of preorder numbers are common knowledge.
    """
    check_tensor("tree: parents", parents, ("[N]", "[B, N]"), INDICES)
    before = number_at("tree: prefix", prefix, "B", 0)
    check_one_device("tree", parents=parents, prefix=prefix)
    rows = parents.tolist() if parents.dim() == 2 else [parents.tolist()]
    numbered = torch.tensor([_preorder(row) for row in rows], dtype=torch.int32, device="cpu")
    numbered = numbered.reshape(len(rows), 2, parents.shape[-1]).to(parents.device)
    numbers, ends = (numbered[:, i].reshape(parents.shape) for i in range(2))
    number = table_at("tree: parents", numbers, (torch.int32,), "N")
    end = table_at("tree: parents", ends, (torch.int32,), "N")
    alone = isinstance(prefix, int) and prefix == 0

    def tree_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        # Keys of the prefix have no number; the clamp keeps their reads inside of the table.
        key = kv_idx if alone else (kv_idx - before(b)).clamp(min=0)
        mine = number(b, q_idx)
        live = (number(b, key) <= mine) & (mine < end(b, key))
        return live if alone else live | (kv_idx < before(b))

    return tree_mask


def _preorder(parents: list[int]) -> list[list[int]]:
    """Return each token's number in a walk of the trees, and the first number past its subtree."""
    count = len(parents)
    children: list[list[int]] = [[] for _ in range(count + 1)]  # the last one's: the roots
    for token, parent in enumerate(parents):
        if not -1 <= parent < count:
            raise ArgumentError(
                f"tree: parents must be -1 (a root) to {count - 1}, got {parent} for token "
                f"{token}."
            )
        children[parent].append(token)
    numbers, ends = [-1] * count, [0] * count
    walk: list[int] = []
    stack = children[-1][::-1]
    while stack:
        token = stack.pop()
        numbers[token] = len(walk)
        walk.append(token)
        stack.extend(reversed(children[token]))
    if len(walk) < count:
        token = numbers.index(-1)
        raise ArgumentError(
            f"tree: parents has a cycle: token {token} has no root among its ancestors."
        )
    for token in reversed(walk):
        ends[token] = max(ends[token], numbers[token] + 1)
        parent = parents[token]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[token])
    return [numbers, ends]
