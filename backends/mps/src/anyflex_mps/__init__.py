"""Metal kernels for Apple GPUs: generated source, its launches, and what a call has to be.

Nothing is imported here: a registry that only looks at metadata pays nothing for it.
"""

from __future__ import annotations

__all__: list[str] = []
