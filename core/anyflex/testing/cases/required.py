"""Calls that must be accepted under ``--require forward``, ``backward`` and ``decode``.

Each uses only properties that its set promises: no grouped heads outside of decode, no auxiliary
output except an lse with a gradient, more than 64 rows outside of decode.
"""

from __future__ import annotations

from anyflex.testing.attention_case import LSE, QKV, AttentionCase
from anyflex.testing.case_types import Group

__all__ = ["CASES"]

CASES = Group()
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

for _name, (_q_length, _kv_length, _score_mod, _mask_mod) in CALLS.items():
    CASES.compare(
        AttentionCase(
            f"forward/{_name}",
            f"forward of {_q_length} queries and {_kv_length} keys, {_name}",
            batch=2,
            q_length=_q_length,
            kv_length=_kv_length,
            score_mod=_score_mod,
            mask_mod=_mask_mod,
            block_size=(128, 128) if _q_length > 128 else (16, 16),
            aux=NOTHING,
            required=frozenset({"forward"}),
        ),
        *(
            AttentionCase(
                f"backward/{_name}{'_and_lse' if dlse else ''}",
                f"gradients of {_q_length} queries and {_kv_length} keys, {_name}",
                batch=2,
                q_length=_q_length,
                kv_length=_kv_length,
                score_mod=_score_mod,
                mask_mod=_mask_mod,
                block_size=(128, 128) if _q_length > 128 else (16, 16),
                aux=LSE if dlse else NOTHING,
                gradients=QKV | {"captured"},
                dlse=dlse,
                required=frozenset({"backward"}),
            )
            for dlse in (False, True)
        ),
    )

for _name, (_heads, _kv_heads, _kv_length, _score_mod, _mask_mod) in DECODED.items():
    CASES.compare(
        AttentionCase(
            f"decode/{_name}",
            f"one query of {_heads} heads, {_kv_length} keys of {_kv_heads}, {_name}",
            batch=2,
            heads=_heads,
            kv_heads=_kv_heads,
            q_length=1,
            kv_length=_kv_length,
            score_mod=_score_mod,
            mask_mod=_mask_mod,
            aux=LSE,
            required=frozenset({"decode"}),
        ),
    )
