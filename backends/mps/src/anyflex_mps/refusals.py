"""Reasons why Metal can't compute a spec that the backend's capabilities allow."""

from __future__ import annotations

import torch

from anyflex.plugin import Spec
from anyflex_mps.options import wants_mpp
from anyflex_mps.targets import MATRIX_UNITS, family_of

__all__ = ["MOST_BUFFERS", "OWN_BUFFERS", "buffer_count", "refusal"]

MOST_BUFFERS = 31
"""Largest number of a kernel's buffers."""
OWN_BUFFERS = 13
"""Largest number of a kernel's buffers beside those of captured tensors."""


def refusal(spec: Spec) -> str | None:
    """Return why no kernel can compute a spec, with the cure, or None."""
    family = family_of(spec.arch)
    if family is None:
        return (
            f"the GPU {spec.arch!r} is older than Apple's M1, or virtual: it has no simdgroup "
            "matrices. Use a Mac with Apple silicon, or backend='reference'"
        )
    if wants_mpp(spec):
        if spec.dtype is torch.float32:
            return (
                "the option mpp takes float16 and bfloat16, got float32, whose products matrix "
                "units round: convert query, key and value, or leave the option out"
            )
        if family < MATRIX_UNITS:
            return (
                f"the option mpp needs the matrix units of an M5 or newer, got {spec.arch!r}: "
                "leave the option out"
            )
    for name, graph in (("score_mod", spec.score_graph), ("mask_mod", spec.mask_graph)):
        if graph is not None and any(node.dtype is torch.float64 for node in graph.nodes):
            return (
                f"{name} computes in float64, and Metal has no float64: convert to float32 in it"
            )
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


def buffer_count(spec: Spec) -> int:
    """Return the largest number of buffers of a spec's kernels."""
    # On demand: the generators are needed for calls with many captured tensors only.
    from anyflex_mps.inventory import shaders_of

    return max(len(shader.buffers) for shader in shaders_of(spec))
