"""Packed documents: mask functions without the detour over positions inside of documents."""

from __future__ import annotations

from typing import Any

from transformers import masking_utils

__all__ = ["keeps_documents_apart", "without_positions"]


def without_positions(function: Any) -> Any:
    """Return the mask function in terms of tokens, where that is the same.

    For packed documents transformers asks whether two tokens are of one document, and calls the
    pattern with their positions in it. Inside of a document positions are tokens, but for a
    constant, which causal masks and windows don't see. Positions that are read from a table hide
    from a block mask that they rise, and cost it four times as much.
    """
    if not _is_made_by(_AND, function):
        return function
    parts = _closed_over(function)["mask_functions"]
    if len(parts) != 2 or not _is_made_by(_REMAPPED, parts[0]):
        return function
    pattern = _closed_over(parts[0])["mask_function"]
    if not _is_made_by(_SAME_DOCUMENT, parts[1]) or not _depends_on_distance(pattern):
        return function
    return masking_utils.and_masks(pattern, parts[1])


def keeps_documents_apart(function: Any) -> bool:
    """Whether transformers has made the mask function of position_ids of packed documents."""
    if _is_made_by(_AND, function):
        return any(map(keeps_documents_apart, _closed_over(function)["mask_functions"]))
    return _is_made_by(_SAME_DOCUMENT, function)


def _depends_on_distance(function: Any) -> bool:
    if function is masking_utils.causal_mask_function or _is_made_by(_WINDOW, function):
        return True
    if not _is_made_by(_AND, function):
        return False
    return all(map(_depends_on_distance, _closed_over(function)["mask_functions"]))


def _is_made_by(code: Any, function: Any) -> bool:
    return code is not None and getattr(function, "__code__", None) is code


def _closed_over(function: Any) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return {
        name: cell.cell_contents for name, cell in zip(names, function.__closure__, strict=True)
    }


_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_SAME_DOCUMENT = masking_utils.packed_sequence_mask_function(None).__code__
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = None if _remap is None else _remap(None, None).__code__
"""Code of the function that calls a pattern with positions; None where transformers has none."""
