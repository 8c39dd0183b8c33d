"""Re-routing of torch's flex attention to anyflex, in code that imports torch's."""

from __future__ import annotations

__all__: list[str] = []
