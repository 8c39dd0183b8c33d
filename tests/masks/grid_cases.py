"""Chunks, block diffusion, neighbourhoods and trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

import anyflex
from anyflex import masks
from anyflex.tracing.mod_types import MaskMod
from tests.masks.case import Made, case, tensor

__all__: list[str] = []


@case
def chunked(n: int) -> Made:
    chunks = [set(range(i, i + 12)) for i in range(0, n, 12)]
    mask_mod = masks.chunked(12, offset=5)
    return Made(
        mask_mod,
        lambda b, h, q, k: any(k in chunk and q + 5 in chunk for chunk in chunks),
        n - 5,
        n,
    )


@case
def chunked_and_causal(n: int) -> Made:
    mask_mod = anyflex.and_masks(masks.causal(), masks.chunked(12))
    return Made(mask_mod, lambda b, h, q, k: k in range(q - q % 12, q + 1), n, n)


@case
def block_causal(n: int) -> Made:
    ends = [min(i + 10, n) for i in range(0, n, 10) for _ in range(10)]
    return Made(masks.block_causal(10), lambda b, h, q, k: k < ends[q], n, n)


def diffusion_sets(length: int, size: int) -> list[set[int]]:
    """The keys that each of the 2 * length tokens sees."""
    blocks = [range(i, min(i + size, length)) for i in range(0, length, size)]
    noisy: list[set[int]] = []
    clean: list[set[int]] = []
    before: set[int] = set()
    for block in blocks:
        noisy += [before | set(block) for _ in block]
        before = before | {length + i for i in block}
        clean += [before for _ in block]
    return noisy + clean


@case
def block_diffusion(n: int) -> Made:
    half = n // 2 // 8 * 8
    seen = diffusion_sets(half, 8) if n < 1000 else []
    return Made(
        masks.block_diffusion(half, 8), lambda b, h, q, k: k in seen[q], 2 * half, 2 * half
    )


@case
def block_diffusion_with_a_short_block(n: int) -> Made:
    half = n // 2 // 6 * 6 + 1
    seen = diffusion_sets(half, 6) if n < 1000 else []
    return Made(
        masks.block_diffusion(half, 6), lambda b, h, q, k: k in seen[q], 2 * half, 2 * half
    )


def windows_of(size: int, window: int, dilation: int, causal: bool) -> list[set[int]]:
    """The coordinates that each coordinate sees along one dimension, by walking its own grid."""
    seen: list[set[int]] = [set() for _ in range(size)]
    for remainder in range(dilation):
        line = list(range(remainder, size, dilation))
        for place, point in enumerate(line):
            if causal:
                seen[point] = set(line[: place + 1][-window:])
                continue
            first = place - window // 2
            while first < 0:
                first += 1
            while first + window > len(line):
                first -= 1
            seen[point] = set(line[first : first + window])
    return seen


def coordinates(grid: Sequence[int]) -> list[tuple[int, ...]]:
    points: list[tuple[int, ...]] = [()]
    for size in grid:
        points = [(*point, i) for point in points for i in range(size)]
    return points


def neighbourhood_case(
    grid: Sequence[int],
    window: Sequence[int],
    dilation: Sequence[int],
    causal: Sequence[bool],
    mask_mod: MaskMod,
) -> Made:
    axes = [windows_of(*axis) for axis in zip(grid, window, dilation, causal, strict=True)]
    points = coordinates(grid)

    def live(b: int, h: int, q: int, k: int) -> bool:
        return all(
            key in axis[query] for axis, query, key in zip(axes, points[q], points[k], strict=True)
        )

    return Made(mask_mod, live, len(points), len(points))


@case
def neighbourhood_1d(n: int) -> Made:
    return neighbourhood_case([n], [7], [1], [False], masks.neighbourhood(n, 7))


@case
def neighbourhood_1d_even_window(n: int) -> Made:
    return neighbourhood_case([n], [6], [1], [False], masks.neighbourhood((n,), 6))


@case
def neighbourhood_1d_dilated(n: int) -> Made:
    return neighbourhood_case([n], [5], [3], [False], masks.neighbourhood(n, 5, 3))


@case
def neighbourhood_1d_causal(n: int) -> Made:
    return neighbourhood_case([n], [5], [2], [True], masks.neighbourhood(n, 5, 2, causal=True))


@case
def neighbourhood_2d(n: int) -> Made:
    grid = (max(n // 9, 5), 9)
    return neighbourhood_case(
        grid, (3, 5), (1, 1), (False,) * 2, masks.neighbourhood(grid, (3, 5))
    )


@case
def neighbourhood_2d_dilated(n: int) -> Made:
    grid = (max(n // 8, 7), 8)
    mask_mod = masks.neighbourhood(grid, 3, (2, 1), (False, True))
    return neighbourhood_case(grid, (3, 3), (2, 1), (False, True), mask_mod)


@case
def neighbourhood_3d(n: int) -> Made:
    grid = (max(n // 20, 3), 5, 4)
    mask_mod = masks.neighbourhood(grid, (2, 3, 3), causal=(True, False, False))
    return neighbourhood_case(grid, (2, 3, 3), (1, 1, 1), (True, False, False), mask_mod)


def parents_of(n: int, seed: int, shuffled: bool = False) -> list[int]:
    draw = random.Random(seed)
    parents = [-1 if i % 23 == 0 else draw.randrange(max(0, i - 6), i) for i in range(n)]
    if not shuffled:
        return parents
    place = draw.sample(range(n), n)
    moved = [0] * n
    for i, parent in enumerate(parents):
        moved[place[i]] = -1 if parent < 0 else place[parent]
    return moved


def is_ancestor(parents: Sequence[int], token: int, other: int) -> bool:
    while token >= 0 and token != other:
        token = parents[token]
    return token == other


@case
def tree(n: int) -> Made:
    parents = parents_of(n, 10)
    mask_mod = masks.tree(tensor(parents))
    return Made(mask_mod, lambda b, h, q, k: is_ancestor(parents, q, k), n, n)


@case
def tree_after_a_prefix(n: int) -> Made:
    parents = [parents_of(20, 11), parents_of(20, 12, shuffled=True)]
    before = [n - 20, n - 31]
    mask_mod = masks.tree(tensor(parents, torch.int64), tensor(before))

    def live(b: int, h: int, q: int, k: int) -> bool:
        draft = k - before[b]
        return draft < 0 or (draft < 20 and is_ancestor(parents[b], q, draft))

    # The second entry's last keys belong to nobody: its row is shorter.
    shortest = anyflex.and_masks(mask_mod, masks.padding(tensor([n, n - 11])))
    return Made(shortest, live, 20, n, batch=2)
