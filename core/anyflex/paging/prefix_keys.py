"""Keys of whole pages of tokens, each chained to all that stands before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from anyflex.errors import ArgumentError, ArgumentTypeError

__all__ = ["page_key", "root_key"]


def root_key(salt: Sequence[Any]) -> bytes:
    """Return the key that stands before a sequence's first page.

    Args:
        salt: ints, strings and bytes; sequences of different salts share no page.
    """
    if isinstance(salt, (str, bytes)) or not isinstance(salt, Sequence):
        raise ArgumentTypeError(
            f"salt must be a tuple of ints, strings and bytes, got {type(salt).__name__}."
        )
    for part in salt:
        # The text of anything else may be an address, or that of an equal but different object.
        if not isinstance(part, (int, str, bytes)):
            raise ArgumentTypeError(
                f"salt must hold ints, strings and bytes, got {type(part).__name__}."
            )
    return hashlib.sha256(repr(tuple(salt)).encode()).digest()


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a page that holds these tokens.

    A collision would show one user another's conversation, so the hash is cryptographic.

    Args:
        before: key of the page before it, or the root's.
    """
    if isinstance(tokens, (str, bytes, bytearray)):
        raise ArgumentTypeError(f"tokens must be a list of ints, got {type(tokens).__name__}.")
    try:
        ids = array("q", tokens)
    except TypeError as error:
        raise ArgumentTypeError(f"tokens must be ints: {error}.") from error
    except OverflowError as error:
        raise ArgumentError(f"tokens must fit 64 bits: {error}.") from error
    return hashlib.sha256(before + ids.tobytes()).digest()
