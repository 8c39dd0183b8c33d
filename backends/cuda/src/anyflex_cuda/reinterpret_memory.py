"""Reinterpretation of shared and tensor memory, under one name for all versions of Triton."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import shared_memory_descriptor

__all__ = ["reinterpret"]

if hasattr(shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Another view of shared or tensor memory."""
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
else:

    @gluon.jit
    def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Another view of shared or tensor memory; Triton 3.6 has another name for it."""
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)
