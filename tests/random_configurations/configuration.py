"""One random configuration, and how it is drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Sizes
from anyflex.testing.mods.mod import FORMS, Form
from tests.soak import SOAK

__all__ = ["COUNT", "SEED", "TRAITS", "Configuration", "asked_for", "configurations"]

SEED = 20261120
COUNT = 500

MEMORY = ("contiguous", "transposed", "expanded_batch", "expanded_heads", "every_second", "column")
"""Memory layouts of a tensor; all but the first are strided or expanded."""
Memory = Literal[
    "contiguous", "transposed", "expanded_batch", "expanded_heads", "every_second", "column"
]
ORIGINS = ("built", "from_torch", "torch_mask", "from_runs")
"""Origins of the block mask."""
Origin = Literal["built", "from_torch", "torch_mask", "from_runs"]


@dataclass(frozen=True)
class Configuration:
    """Everything that determines one call, forward and backward.

    Args:
        number: position in the list; also seeds the values.
        score, mask: names of the list, or None for no mod.
        score_form, mask_form: in which form the mods are passed.
        kv_batch: 1 or the batch.
        mask_batch, mask_heads: the mask's own batch and heads, each 1 or the call's.
        block_size: of the mask, (q, kv).
        memory: of query, key and value.
        scale: None for the default.
        aux: which of lse and max_scores are asked for.
        wanted: which of query, key and value require a gradient; learned tables always do.
        arrives: outputs in the loss: ``"out"``, ``"lse"`` or ``"both"``.
        expanded_dout: the gradient that arrives at out has stride 0, as from ``out.sum()``.
        poisoned: run under deterministic algorithms, where torch fills fresh memory with NaN.
    """

    number: int
    sizes: Sizes
    head_dim: int
    value_head_dim: int
    kv_batch: int
    score: str | None
    mask: str | None
    score_form: Form
    mask_form: Form
    mask_batch: int
    mask_heads: int
    block_size: tuple[int, int]
    origin: Origin
    memory: tuple[Memory, Memory, Memory]
    scale: float | None
    aux: tuple[str, ...]
    wanted: tuple[str, ...]
    arrives: Literal["out", "lse", "both"]
    expanded_dout: bool
    poisoned: bool

    def __str__(self) -> str:
        s = self.sizes
        return (
            f"{self.number}-{self.score}-{self.mask}-B{s.batch}H{s.heads}G{s.group}"
            f"L{s.q_length}S{s.kv_length}"
        )

    @property
    def traits(self) -> frozenset[str]:
        """Which of `TRAITS` this configuration has."""
        s = self.sizes
        has = {
            "gqa": s.group > 1,
            "broadcast mask": self.mask is not None
            and ((self.mask_batch == 1 < s.batch) or (self.mask_heads == 1 < s.heads)),
            "Ev != E": self.head_dim != self.value_head_dim,
            "tails": self.mask is not None
            and bool(s.q_length % self.block_size[0] or s.kv_length % self.block_size[1]),
            "aux": bool(self.aux),
            "captured gradients": self.score is not None and SCORE_MODS[self.score].learns,
            "strided or expanded": any(memory != "contiguous" for memory in self.memory),
        }
        return frozenset(name for name, present in has.items() if present)


TRAITS = (
    "gqa",
    "broadcast mask",
    "Ev != E",
    "tails",
    "aux",
    "captured gradients",
    "strided or expanded",
)
"""At least 20 % of the configurations have each."""

_LENGTHS: Sequence[tuple[int, int]] = [
    (1, 1),
    (1, 200),
    (128, 128),
    (129, 257),
    (300, 77),
    (0, 5),
    (5, 0),
    (0, 0),
] + [(64, 64), (33, 47), (100, 1), (17, 130), (40, 96), (77, 12), (2, 160), (65, 129)] * 3
_BLOCKS = ((16, 16), (64, 64), (128, 128), (32, 128))


def asked_for() -> int:
    """Number of configurations that this run of pytest takes."""
    return 500 if SOAK else 50


def configurations(count: int = COUNT) -> list[Configuration]:
    """The first `count` configurations. The first 50 hold every score and mask mod."""
    draw = random.Random(SEED)
    scores = _rounds(draw, list(SCORE_MODS), COUNT)
    masks = _rounds(draw, list(MASK_MODS), COUNT)
    return [_draw(draw, i, scores[i], masks[i]) for i in range(COUNT)][:count]


def _rounds(draw: random.Random, names: list[str], count: int) -> list[str | None]:
    # Shuffled rounds: every name comes equally often; after the first round some are left out.
    rounds: list[str | None] = []
    while len(rounds) < count:
        some = list(names)
        draw.shuffle(some)
        if rounds:
            rounds += [None if draw.random() < 0.1 else name for name in some]
        else:
            rounds += some
    return rounds[:count]


def _draw(draw: random.Random, number: int, score: str | None, mask: str | None) -> Configuration:
    group, kv_heads = draw.choice([(1, 4), (2, 2), (4, 1), (1, 2), (3, 2), (1, 1), (2, 1)])
    length = draw.choice(_LENGTHS)
    batch = draw.choice([1, 2, 3])
    heads = group * kv_heads
    sizes = Sizes(batch, heads, group, *length)
    head_dim = draw.choice([1, 5, 8, 16, 24])
    mask_entry = MASK_MODS[mask] if mask is not None else None
    batched = mask_entry is not None and mask_entry.batched
    headed = mask_entry is not None and mask_entry.headed
    aux = draw.choice([(), ("lse",), ("max_scores",), ("lse", "max_scores")])
    memory = tuple(draw.choice(MEMORY) if draw.random() < 0.4 else "contiguous" for _ in "qkv")
    return Configuration(
        number=number,
        sizes=sizes,
        head_dim=head_dim,
        value_head_dim=draw.choice([head_dim, 3, 12]),
        kv_batch=draw.choice([1, batch, batch, batch]),
        score=score,
        mask=mask,
        score_form=draw.choice(FORMS),
        mask_form=draw.choice(FORMS),
        mask_batch=batch if batched else draw.choice([1, batch]),
        mask_heads=heads if headed else draw.choice([1, heads]),
        block_size=draw.choice(_BLOCKS),
        origin=draw.choice(ORIGINS),
        memory=memory,  # type: ignore[arg-type]
        scale=_scale(score, draw.choice([None, None, 0.3])),
        aux=aux,
        wanted=tuple("qkv")
        if draw.random() < 0.7
        else tuple(draw.sample("qkv", draw.randint(0, 2))),
        arrives=draw.choice(("out", "lse", "both", "both")) if "lse" in aux else "out",
        expanded_dout=draw.random() < 0.25,
        poisoned=draw.random() < 0.3,
    )


def _scale(score: str | None, drawn: float | None) -> float | None:
    # Scores of several thousand turn an error of 1e-16 in themselves into one of 1e-10 in a
    # gradient. With a power of two, and values on a grid, they are exact in any order of summing;
    # other mods get no grid, because it would put scores on their kinks.
    return 0.25 if score == "big_scores" else drawn
