"""Ready-made score mods: each function returns ``f(score, b, h, q_idx, kv_idx) -> score``.

Tables may be learned: their gradients come from `flex_attention` like those of any captured
tensor. An ``offset`` is what is added to q_idx to get the query's place among the keys, as for
`anyflex.masks`.

>>> import anyflex
>>> gemma = anyflex.mods.compose(anyflex.mods.alibi(8), anyflex.mods.softcap(50.0))
"""

from __future__ import annotations

from anyflex.mods.caps import softcap
from anyflex.mods.composition import compose
from anyflex.mods.slopes import alibi, alibi_slopes
from anyflex.mods.t5 import t5_bias, t5_buckets
from anyflex.mods.tables import dense_bias, relative_bias, table_bias

__all__ = [
    "alibi",
    "alibi_slopes",
    "compose",
    "dense_bias",
    "relative_bias",
    "softcap",
    "t5_bias",
    "t5_buckets",
    "table_bias",
]
