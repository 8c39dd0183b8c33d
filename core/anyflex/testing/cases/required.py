"""Calls that must be accepted under ``--require forward``, ``backward`` and ``decode``.

Each uses only properties that its set promises: no grouped heads outside of decode, no auxiliary
output except an lse with a gradient, more than 64 rows outside of decode.
"""

from __future__ import annotations

from anyflex.testing.attention_case import ALL, LSE
from anyflex.testing.case_types import Group, Row, row

__all__ = ["CASES"]

NOTHING: frozenset[str] = frozenset()

CALLS: dict[str, tuple[int, int, str | None, str | None]] = {
    "plain": (70, 90, None, None),
    "causal": (90, 90, None, "causal"),
    "documents": (150, 150, None, "doc_sorted"),
    "documents_of_batches": (100, 100, None, "doc_batch"),
    "padding": (100, 80, None, "padding"),
    "window": (200, 200, None, "window_left"),
    "score_mod": (70, 90, "softcap", None),
    "captured": (70, 90, "alibi_learned", None),
    "score_mod_and_mask": (129, 257, "alibi_learned", "causal"),
    "dense_bias": (70, 66, "dense_bias", "doc_sorted"),
    "tails_65_17": (65, 17, None, "all_true"),
    "tails_66_1": (66, 1, None, None),
    "tails_127_129": (127, 129, None, "causal_bottom_right"),
    "tails_300_77": (300, 77, "softcap", "causal"),
    "no_keys": (70, 0, None, None),
    "no_live_pair": (70, 70, None, "all_false"),
}
"""q_length, kv_length, score mod and mask mod."""

DECODED: dict[str, tuple[int, int, int, str | None, str | None]] = {
    "plain": (4, 4, 200, None, None),
    "grouped_heads": (8, 2, 333, None, None),
    "one_key_head": (4, 1, 129, None, None),
    "position": (8, 2, 300, None, "decode_position"),
    "score_mod": (8, 2, 200, "alibi_abs", None),
    "one_key": (4, 2, 1, None, None),
}
"""heads, kv_heads, kv_length, score mod and mask mod."""


def _calls(what: str) -> dict[str, Row]:
    return {
        name: row(
            f"{what} of {q_length} queries and {kv_length} keys, {name}",
            (q_length, kv_length),
            batch=2,
            score_mod=score_mod,
            mask_mod=mask_mod,
            block_size=(128, 128) if q_length > 128 else (16, 16),
        )
        for name, (q_length, kv_length, score_mod, mask_mod) in CALLS.items()
    }


FORWARD, BACKWARD, DECODE = Group("forward"), Group("backward"), Group("decode")
FORWARD.compare({"aux": NOTHING, "required": frozenset({"forward"})}, **_calls("forward"))
for _ending, _dlse in (("", False), ("_and_lse", True)):
    BACKWARD.compare(
        {
            "aux": LSE if _dlse else NOTHING,
            "gradients": ALL,
            "dlse": _dlse,
            "required": frozenset({"backward"}),
        },
        **{f"{name}{_ending}": call for name, call in _calls("gradients").items()},
    )
DECODE.compare(
    {"batch": 2, "aux": LSE, "required": frozenset({"decode"})},
    **{
        name: row(
            f"one query of {heads} heads, {kv_length} keys of {kv_heads}, {name}",
            (1, kv_length),
            heads=(heads, kv_heads),
            score_mod=score_mod,
            mask_mod=mask_mod,
        )
        for name, (heads, kv_heads, kv_length, score_mod, mask_mod) in DECODED.items()
    },
)
CASES = {**FORWARD, **BACKWARD, **DECODE}
