"""torch's flex attention, re-routed to anyflex."""

from __future__ import annotations

__all__: list[str] = []
