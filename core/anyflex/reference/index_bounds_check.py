"""Bounds check of captured reads, before a backend's forward on a device."""

from __future__ import annotations

import torch

from anyflex.contract.call import Call
from anyflex.contract.spec import Spec
from anyflex.reference.chunks import chunks
from anyflex.reference.compiled_spec import prepare
from anyflex.reference.scores import Scores

__all__ = ["check_reads"]


@torch.no_grad()
def check_reads(spec: Spec, call: Call) -> None:
    """Compute a call's scores as the reference does, which waits for the device, and drop them.

    Raises:
        ModIndexError: a live pair's captured read leaves its tensor.
    """
    scores = Scores(prepare(spec), call, check=True)
    if call.query.numel() == 0:
        return
    for chunk in chunks(scores.layout, call.mask, scores.device):
        if chunk.width:
            scores.chunk(chunk, keep_raw=False)
