"""An anyflex backend in plain torch operations, over the runs of the block mask."""

from __future__ import annotations

__all__: list[str] = []
