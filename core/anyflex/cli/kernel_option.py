"""``--option KEY=VALUE``: an entry of ``kernel_options``."""

from __future__ import annotations

import argparse
import ast

__all__ = ["kernel_option"]


def kernel_option(text: str) -> tuple[str, object]:
    """Parse KEY=VALUE for argparse: the value is a Python literal, or else the text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value
