"""The portable Triton kernels on Intel GPUs: their target, what must be there, and IPEX.

Nothing is imported here: a registry that only looks at metadata pays nothing for it.
"""

from __future__ import annotations

__all__: list[str] = []
