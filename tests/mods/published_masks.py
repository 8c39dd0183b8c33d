"""Mask mods of the kinds that published collections hold, each beside its meaning in plain Python.

`PUBLISHED_MASKS["sliding"]` is a list of (mask mod, meaning); a meaning takes four ints and
returns a bool. Batch 2, heads 2, `LENGTH` queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LENGTH", "PUBLISHED_MASKS", "TOP_BLOCKS", "TOP_K_BLOCK"]

LENGTH = 48

MaskMod = Callable[..., Any]
Meaning = Callable[[int, int, int, int], bool]
PUBLISHED_MASKS: dict[str, list[tuple[MaskMod, Meaning]]] = {}


def _published(build: Callable[[], list[tuple[MaskMod, Meaning]]]) -> None:
    PUBLISHED_MASKS[build.__name__] = build()


@_published
def causal() -> list[tuple[MaskMod, Meaning]]:
    later = 5
    return [
        (lambda b, h, q, k: q >= k, lambda b, h, q, k: q >= k),
        (lambda b, h, q, k: k - q <= later, lambda b, h, q, k: k <= q + 5),
    ]


@_published
def sliding() -> list[tuple[MaskMod, Meaning]]:
    width, learned_width = 7, torch.tensor(7)

    def meaning(b: int, h: int, q: int, k: int) -> bool:
        return k in range(q - 6, q + 1)

    return [
        (lambda b, h, q, k: (q >= k) & (q - k < width), meaning),
        (lambda b, h, q, k: (q >= k) & (q - k < learned_width), meaning),
    ]


@_published
def global_sliding() -> list[tuple[MaskMod, Meaning]]:
    everywhere = {0, 11, 30, 31}
    table = torch.tensor([i in everywhere for i in range(LENGTH)])
    return [
        (
            lambda b, h, q, k: table[q] | table[k] | ((q - k).abs() <= 4),
            lambda b, h, q, k: q in everywhere or k in everywhere or abs(q - k) <= 4,
        )
    ]


@_published
def dilated() -> list[tuple[MaskMod, Meaning]]:
    step = 3
    return [
        (
            lambda b, h, q, k: (q >= k) & ((q - k) % step == 0) & (q - k < 5 * step),
            lambda b, h, q, k: k in {q, q - 3, q - 6, q - 9, q - 12},
        )
    ]


@_published
def prefix_lm() -> list[tuple[MaskMod, Meaning]]:
    prefix = 13
    return [
        (lambda b, h, q, k: (k < prefix) | (q >= k), lambda b, h, q, k: k < 13 or k <= q),
    ]


@_published
def document() -> list[tuple[MaskMod, Meaning]]:
    lengths = [9, 1, 20, 18]
    ids = [i for i, length in enumerate(lengths) for _ in range(length)]
    starts = [sum(lengths[:i]) for i in ids]
    document_of, start_of = torch.tensor(ids), torch.tensor(starts, dtype=torch.int32)

    def inside(inner: MaskMod) -> MaskMod:
        def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            local = inner(b, h, q - start_of[q], k - start_of[k])
            return (document_of[q] == document_of[k]) & local

        return mod

    def meaning(inner: Meaning) -> Meaning:
        return lambda b, h, q, k: ids[q] == ids[k] and inner(b, h, q - starts[q], k - starts[k])

    return [
        (inside(lambda b, h, q, k: q >= k), meaning(lambda b, h, q, k: q >= k)),
        (
            inside(lambda b, h, q, k: (k < 2) | ((q - k).abs() < 3)),
            meaning(lambda b, h, q, k: k < 2 or abs(q - k) < 3),
        ),
    ]


@_published
def batchify() -> list[tuple[MaskMod, Meaning]]:
    offsets = [0, 17]
    table = torch.tensor(offsets)

    def shifted(inner: MaskMod) -> MaskMod:
        return lambda b, h, q, k: inner(b, h, q + table[b], k)

    return [
        (
            shifted(lambda b, h, q, k: (q >= k) & (q - k < 20)),
            lambda b, h, q, k: 0 <= q + offsets[b] - k < 20,
        )
    ]


@_published
def batch() -> list[tuple[MaskMod, Meaning]]:
    lengths = torch.tensor([20, 48], dtype=torch.int32)

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = torch.where(b == 0, q >= k, (q - k).abs() < 6)
        return row & (k < lengths[b])

    return [
        (
            mod,
            lambda b, h, q, k: (k <= q and k < 20) if b == 0 else abs(q - k) < 6,
        )
    ]


@_published
def shared_prefix() -> list[tuple[MaskMod, Meaning]]:
    # Two prompts; two answers after the first, three after the second.
    group = [0] * 6 + [0] * 5 + [0] * 4 + [1] * 9 + [1] * 8 + [1] * 8 + [1] * 8
    answer = [-1] * 6 + [0] * 5 + [1] * 4 + [-1] * 9 + [2] * 8 + [3] * 8 + [4] * 8
    group_of, answer_of = torch.tensor(group), torch.tensor(answer, dtype=torch.int16)

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        own = answer_of[q] == answer_of[k]
        return (group_of[q] == group_of[k]) & (own | (answer_of[k] < 0)) & (q >= k)

    return [
        (
            mod,
            lambda b, h, q, k: k <= q and group[q] == group[k] and answer[k] in (-1, answer[q]),
        )
    ]


@_published
def block_diffusion() -> list[tuple[MaskMod, Meaning]]:
    half, size = LENGTH // 2, 6

    # Training: a noisy copy of the text, then the clean one.
    def training(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_clean, k_clean = q >= half, k >= half
        q_block = torch.where(q_clean, q - half, q) // size
        k_block = torch.where(k_clean, k - half, k) // size
        own = (q_block == k_block) & (q_clean == k_clean)
        earlier = ~q_clean & k_clean & (k_block < q_block)
        return own | earlier | (q_clean & k_clean & (k_block <= q_block))

    def training_meaning(b: int, h: int, q: int, k: int) -> bool:
        q_block, k_block = q % half // size, k % half // size
        if k < half:
            return q < half and q_block == k_block
        return k_block <= q_block if q >= half else k_block < q_block

    return [
        (training, training_meaning),
        (lambda b, h, q, k: q // size >= k // size, lambda b, h, q, k: k < (q // 6 + 1) * 6),
    ]


@_published
def flamingo() -> list[tuple[MaskMod, Meaning]]:
    # Keys are 4 images of 12 patches; a text token sees the images since the last break.
    first, last = [], []
    for q in range(LENGTH):
        last.append(min(q // 10, 4) - 1)
        first.append(max(last[-1] - 1, 0))
    first_image, last_image = torch.tensor(first), torch.tensor(last, dtype=torch.int32)
    return [
        (
            lambda b, h, q, k: (first_image[q] <= k // 12) & (k // 12 <= last_image[q]),
            lambda b, h, q, k: any(
                k in range(12 * image, 12 * image + 12) for image in range(first[q], last[q] + 1)
            ),
        )
    ]


def _morton(row: int, column: int) -> int:
    """Interleaved bits: the place of a cell on the Z curve."""
    return sum(
        ((column >> bit & 1) << 2 * bit) | ((row >> bit & 1) << 2 * bit + 1) for bit in range(4)
    )


@_published
def natten() -> list[tuple[MaskMod, Meaning]]:
    rows, columns = 6, 8
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    tiled = sorted(cells, key=lambda cell: (cell[0] // 3, cell[1] // 4, *cell))
    curved = sorted(cells, key=lambda cell: _morton(*cell))

    def over(order: list[tuple[int, int]]) -> tuple[MaskMod, Meaning]:
        row_of = torch.tensor([row for row, _ in order], dtype=torch.int32)
        column_of = torch.tensor([column for _, column in order], dtype=torch.int32)

        def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            row = row_of[q].clamp(1, rows - 2)
            column = torch.clamp(column_of[q], 2, columns - 3)
            return ((row_of[k] - row).abs() <= 1) & ((column_of[k] - column).abs() <= 2)

        def meaning(b: int, h: int, q: int, k: int) -> bool:
            (row, column), (its_row, its_column) = order[q], order[k]
            top = min(max(row - 1, 0), rows - 3)
            left = min(max(column - 2, 0), columns - 5)
            return its_row in range(top, top + 3) and its_column in range(left, left + 5)

        return mod, meaning

    return [over(cells), over(tiled), over(curved)]


@_published
def sta() -> list[tuple[MaskMod, Meaning]]:
    text = 40  # the last 8 positions are text, which sees and is seen by all

    # 2-D: 5 rows of 8 in tiles of 5 x 2; 3-D: 2 x 4 x 5 in tiles of 1 x 2 x 5.
    def flat(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= text) | (k >= text) | ((q % 8 // 2 - k % 8 // 2).abs() <= 1)

    def cubes(b: Any, h: Any, q: Any, k: Any) -> Any:
        near = ((q // 20 - k // 20).abs() <= 0) & ((q // 5 % 4 // 2 - k // 5 % 4 // 2).abs() <= 0)
        return (q >= text) | (k >= text) | near

    return [
        (
            flat,
            lambda b, h, q, k: (
                max(q, k) >= 40 or (k % 8) // 2 in {(q % 8) // 2 + step for step in (-1, 0, 1)}
            ),
        ),
        (
            cubes,
            lambda b, h, q, k: (
                max(q, k) >= 40
                or (divmod(q, 20)[0], q % 20 // 5 // 2) == (divmod(k, 20)[0], k % 20 // 5 // 2)
            ),
        ),
    ]


@_published
def svg() -> list[tuple[MaskMod, Meaning]]:
    frame = 12
    temporal = torch.tensor([False, True])

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        space = q // frame == k // frame
        time = q % frame == k % frame
        return torch.where(temporal[h], time, space) | (k < frame)

    return [
        (
            mod,
            lambda b, h, q, k: k < 12 or (k % 12 == q % 12 if h == 1 else k // 12 == q // 12),
        )
    ]


TOP_K_BLOCK = 16
TOP_BLOCKS = torch.tensor(
    [
        [[True, False, True], [False, True, False], [True, True, False]],
        [[False, False, True], [True, False, True], [False, True, True]],
    ]
)
"""[H, L/16, S/16]: blocks that another computation has chosen."""


@_published
def vsa() -> list[tuple[MaskMod, Meaning]]:
    chosen = TOP_BLOCKS.tolist()
    # The same as lists of blocks; -1 stands for no more.
    listed = torch.full((2, 2, 3, 3), -1)
    for h, rows in enumerate(chosen):
        for row, blocks in enumerate(rows):
            places = torch.tensor([column for column, live in enumerate(blocks) if live])
            listed[:, h, row, : len(places)] = places

    def in_list(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = listed[b, h, q // TOP_K_BLOCK]
        return (row == (k // TOP_K_BLOCK).unsqueeze(-1)).any(-1)

    def meaning(b: int, h: int, q: int, k: int) -> bool:
        return bool(chosen[h][q // 16][k // 16])

    return [
        (lambda b, h, q, k: TOP_BLOCKS[h, q // TOP_K_BLOCK, k // TOP_K_BLOCK], meaning),
        (in_list, meaning),
        (lambda b, h, q, k: torch.isin(k // 16, listed[b, h, q // 16]), meaning),
    ]


@_published
def searched_documents() -> list[tuple[MaskMod, Meaning]]:
    ends = [9, 10, 30, LENGTH]
    ends_of = torch.tensor(ends, dtype=torch.int32)

    def searched(b: Any, h: Any, q: Any, k: Any) -> Any:
        same = torch.bucketize(q, ends_of, right=True) == torch.bucketize(k, ends_of, right=True)
        return same & (q >= k)

    def sorted_into(b: Any, h: Any, q: Any, k: Any) -> Any:
        document = torch.searchsorted(ends_of, torch.stack([q, k]), side="right")
        return (document[0] == document[1]) & (q >= k)

    def meaning(b: int, h: int, q: int, k: int) -> bool:
        return k <= q and not any(k < end <= q for end in ends)

    return [(searched, meaning), (sorted_into, meaning)]


@_published
def near_in_space() -> list[tuple[MaskMod, Meaning]]:
    generator = torch.Generator().manual_seed(4)
    places = torch.randn(LENGTH, 3, generator=generator)
    points = [place.tolist() for place in places]
    nearest = torch.cdist(places, places).topk(5, largest=False).indices

    def within(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (places[q] - places[k]).square().sum(-1) < 1.5

    def one_of_five(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.stack([nearest[q, i] == k for i in range(5)]).any()

    return [
        (
            within,
            lambda b, h, q, k: (
                sum((x - y) ** 2 for x, y in zip(points[q], points[k], strict=True)) < 1.5
            ),
        ),
        (one_of_five, lambda b, h, q, k: k in nearest[q].tolist()),
        (lambda b, h, q, k: (nearest[q] == k).any(), lambda b, h, q, k: k in nearest[q].tolist()),
    ]


@_published
def jetspec() -> list[tuple[MaskMod, Meaning]]:
    prefix = 20
    parent = [-1] * prefix + [prefix + (i - 1) // 3 if i else -1 for i in range(LENGTH - prefix)]
    depth = [0] * prefix
    for i in range(prefix, LENGTH):
        depth.append(0 if parent[i] < 0 else depth[parent[i]] + 1)
    # A draft token's ancestors by the number of steps up; the token itself where the tree has
    # ended.
    up = [parent[i] if parent[i] >= 0 else i for i in range(LENGTH)]
    parent_of, depth_of = torch.tensor(up), torch.tensor(depth, dtype=torch.int8)

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        node, line = q, q == k
        for _ in range(3):  # the deepest leaf is 3 steps below the root
            node = parent_of[node]
            line = line | (node == k)
        return (k < prefix) & ((q >= prefix) | (q >= k)) | (
            (q >= prefix) & line & (depth_of[k] <= depth_of[q])
        )

    def meaning(b: int, h: int, q: int, k: int) -> bool:
        if k < prefix:
            return q >= prefix or k <= q
        line = []
        while q >= prefix:
            line.append(q)
            q = parent[q]
        return k in line

    return [(mod, meaning)]
