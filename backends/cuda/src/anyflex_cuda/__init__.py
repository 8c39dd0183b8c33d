"""Kernels for NVIDIA's Hopper GPUs, in Gluon; for what they don't take, the portable Triton ones.

Nothing is imported here: a registry that only looks at metadata pays nothing for it.
"""

from __future__ import annotations

__all__: list[str] = []
