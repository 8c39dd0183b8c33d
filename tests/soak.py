"""Whether the tests run in full.

`make test` runs a part of the random calls, compiles and kits; `make soak` sets ANYFLEX_SOAK=1 and
runs all of them.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["SOAK", "only_in_soak"]

SOAK = os.environ.get("ANYFLEX_SOAK") == "1"


def only_in_soak(reason: str) -> pytest.MarkDecorator:
    """Skip a test in `make test`, because of what it takes and what else holds the same."""
    return pytest.mark.skipif(not SOAK, reason=f"only in make soak: {reason}")
