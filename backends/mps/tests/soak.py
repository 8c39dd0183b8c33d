"""Whether the tests run in full, as in `make soak`: `make test` runs a part."""

from __future__ import annotations

import os

__all__ = ["SOAK"]

SOAK = os.environ.get("ANYFLEX_SOAK") == "1"
