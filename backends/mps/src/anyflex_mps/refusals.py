"""Reasons why Metal can't compute a spec that the backend's capabilities allow."""

from __future__ import annotations

import torch

from anyflex.plugin import Spec
from anyflex_mps.options import wants_mpp
from anyflex_mps.targets import MATRIX_UNITS, family_of

__all__ = ["MOST_BUFFERS", "OWN_BUFFERS", "buffer_count", "option_refusal", "refusal"]

MOST_BUFFERS = 31
"""Largest number of a kernel's buffers."""
OWN_BUFFERS = 18
"""Largest number of a kernel's buffers beside those of captured tensors."""


def refusal(spec: Spec) -> str | None:
    """Return why no kernel can compute a spec, with the cure, or None."""
    if family_of(spec.arch) is None:
        return (
            f"the GPU {spec.arch!r} is older than Apple's M1, or virtual: it has no simdgroup "
            "matrices. Use a Mac with Apple silicon, or backend='reference'"
        )
    if spec.q_layout == "packed" and wants_mpp(spec):
        return "the kernel of kernel_options['mps']: mpp takes no packed sequences"
    learned = sum(facts.needs_grad for facts in spec.captured)
    if len(spec.captured) + 2 * learned <= MOST_BUFFERS - OWN_BUFFERS:
        return None
    count = buffer_count(spec)
    if count <= MOST_BUFFERS:
        return None
    return (
        f"mods read {len(spec.captured)} captured tensors, {learned} of which need gradients: a "
        f"kernel would need {count} buffers, and Metal has {MOST_BUFFERS}. Stack tensors of one "
        "shape (torch.stack), and read the stack with one more index"
    )


def option_refusal(spec: Spec) -> str | None:
    """Return why the user's options can't be honoured, with the cure, or None."""
    if not wants_mpp(spec):
        return None
    if spec.dtype is torch.float32:
        return (
            "kernel_options['mps']: mpp needs query, key and value in float16 or bfloat16, got "
            "float32, which matrix units round: convert them, or leave mpp out"
        )
    family = family_of(spec.arch)
    if family is None or family < MATRIX_UNITS:
        return (
            "kernel_options['mps']: mpp needs a GPU with matrix units, an M5 or newer, got "
            f"{spec.arch!r}: leave mpp out"
        )
    return None


def buffer_count(spec: Spec) -> int:
    """Return the largest number of buffers of a spec's kernels."""
    # On demand: the generators are needed for calls with many captured tensors only.
    from anyflex_mps.inventory import shaders_of

    return max(len(shader.buffers) for shader in shaders_of(spec))
