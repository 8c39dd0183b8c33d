"""Forward of the reference: chunks of query rows, an exact softmax over each row."""

from __future__ import annotations

import torch

from anyflex.contract.call import Call, Outputs
from anyflex.contract.spec import Spec
from anyflex.reference.chunks import chunks
from anyflex.reference.compiled_spec import Prepared, prepare
from anyflex.reference.dropout import kept_pairs
from anyflex.reference.nonfinite_products import Operand
from anyflex.reference.scores import Scores

__all__ = ["check_reads", "forward"]


@torch.no_grad()
def forward(prepared: Prepared, call: Call, out: Outputs) -> None:
    """Fill `out`.

    Raises:
        ModIndexError: a live pair's captured read leaves its tensor, on the CPU. Elsewhere core
            looks, under ANYFLEX_CHECK_INDICES=1.
    """
    scores = Scores(prepared, call, check=call.query.device.type == "cpu")
    grouped = scores.layout.grouped
    # Rows without a live key keep these values.
    result = grouped(out.out).zero_()
    lse, max_scores = (
        None if output is None else grouped(output).fill_(-torch.inf)
        for output in (out.lse, out.max_scores)
    )
    if call.query.numel() == 0 or scores.layout.kv_length == 0:
        return
    values = Operand(call.value.to(scores.dtype))
    for chunk in chunks(scores.layout, call.mask, scores.device):
        if chunk.width == 0:
            continue
        rows = slice(chunk.begin, chunk.end)
        chunked = scores.chunk(chunk, keep_raw=False)
        weights = chunked.modified
        alive = weights != -torch.inf if values.nonfinite else None
        maximum = weights.amax(-1, keepdim=True)
        # Dead rows: -inf - -inf would be NaN. A +inf maximum does make its row NaN.
        shift = maximum.masked_fill(maximum == -torch.inf, 0)
        weights.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True)
        if alive is not None:
            # A NaN row is NaN at its live pairs only.
            weights.masked_fill_(~alive, 0)
        if call.dropout is not None:
            kept = kept_pairs(call.dropout, chunked.inputs)
            weights.mul_(call.dropout.scale).masked_fill_(~kept, 0)
            # An infinite value that is dropped contributes as little as a dead pair's.
            alive = alive if alive is None else alive & kept
        product = values.taken(chunk.take).product(scores.layout.times_values, weights, alive)
        whole = scores.add_sink(total, shift)
        result[:, :, :, rows] = product.div_(whole.masked_fill(whole == 0, 1))
        if lse is not None:
            lse[:, :, :, rows] = (shift + total.log()).squeeze(-1)
        if max_scores is not None:
            max_scores[:, :, :, rows] = maximum.squeeze(-1)


@torch.no_grad()
def check_reads(spec: Spec, call: Call) -> None:
    """Compute a call's scores, which waits for the device, and drop them: a check of captured
    reads before a backend's forward.

    Raises:
        ModIndexError: a live pair's captured read leaves its tensor.
    """
    scores = Scores(prepare(spec), call, check=True)
    if call.query.numel() == 0:
        return
    for chunk in chunks(scores.layout, call.mask, scores.device):
        if chunk.width:
            scores.chunk(chunk, keep_raw=False)
