"""Dropout of the reference: which pairs are kept, on torch tensors of any device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anyflex.contract.dropout import Dropout

__all__ = ["kept_pairs"]

_WORD = (1 << 32) - 1
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
"""Multipliers of a 32-bit integer hash whose output bits all depend on all input bits: found by
hill climbing over such functions, github.com/skeeto/hash-prospector, issue 19. Both are below
2^31, so that products of words fit int64."""


def _mixed(words: Tensor) -> Tensor:
    words = ((words >> 16) ^ words) * _FIRST & _WORD
    words = ((words >> 15) ^ words) * _SECOND & _WORD
    return (words >> 15) ^ words


def kept_pairs(dropout: Dropout, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a bool tensor, True where a pair is kept.

    Args:
        inputs: b, h, q_idx and kv_idx as mods see them, int64, which broadcast to the pairs.
    """
    b, h, q_idx = (inputs[name] & _WORD for name in ("b", "h", "q_idx"))
    first, second = (_mixed(_mixed(_mixed(b ^ word) ^ h) ^ q_idx) for word in dropout.words)
    # The hash once more, of the key, with the row's second word added halfway: no two rows then
    # share a sequence, as they would if one word were all that they had.
    words = (inputs["kv_idx"] & _WORD) ^ first
    words = (((words >> 16) ^ words) * _FIRST & _WORD) ^ second
    words = ((words >> 15) ^ words) * _SECOND & _WORD
    bits = (words >> 15) ^ words
    return bits >= dropout.threshold
