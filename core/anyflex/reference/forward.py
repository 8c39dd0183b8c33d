"""Forward of the reference: chunks of query rows, an exact softmax over each row."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.contract.call import Call, Outputs
from anyflex.reference.chunks import Chunk, chunks
from anyflex.reference.compiled_spec import Prepared
from anyflex.reference.nonfinite_products import Operand
from anyflex.reference.scores import Scores

__all__ = ["forward"]


@torch.no_grad()
def forward(prepared: Prepared, call: Call, out: Outputs) -> None:
    """Fill `out`.

    Raises:
        ModIndexError: a live pair's captured read leaves its tensor, on the CPU. Elsewhere core
            looks, under ANYFLEX_CHECK_INDICES=1.
    """
    scores = Scores(prepared, call, check=call.query.device.type == "cpu")
    rows = _Rows(scores, out)
    if call.query.numel() == 0 or scores.layout.kv_length == 0:
        rows.kill(slice(None))
        return
    values = Operand(call.value.to(scores.dtype))
    for chunk in chunks(scores.layout, call.mask, scores.device):
        where = slice(chunk.begin, chunk.end)
        if chunk.width == 0:
            rows.kill(where)
        else:
            rows.write(chunk, where, values)


class _Rows:
    """The output tensors, with heads in groups."""

    def __init__(self, scores: Scores, out: Outputs) -> None:
        grouped = scores.layout.grouped
        self.scores = scores
        self.out = grouped(out.out)
        self.lse = None if out.lse is None else grouped(out.lse)
        self.max_scores = None if out.max_scores is None else grouped(out.max_scores)

    def kill(self, where: slice) -> None:
        """Write rows without a live key."""
        self.out[:, :, :, where] = 0
        for rows in (self.lse, self.max_scores):
            if rows is not None:
                rows[:, :, :, where] = -torch.inf

    def write(self, chunk: Chunk, where: slice, values: Operand) -> None:
        """Compute and write the rows of a chunk."""
        weights = self.scores.chunk(chunk, keep_raw=False).modified
        alive: Tensor | None = weights != -torch.inf if values.nonfinite else None
        maximum = weights.amax(-1, keepdim=True)
        # Dead rows: -inf - -inf would be NaN. A +inf maximum does make its row NaN.
        shift = maximum.masked_fill(maximum == -torch.inf, 0)
        weights.sub_(shift).exp_()
        total = weights.sum(-1, keepdim=True)
        if alive is not None:
            # A NaN row is NaN at its live pairs only.
            weights.masked_fill_(~alive, 0)
        result = values.taken(chunk.take).product(self.scores.layout.times_values, weights, alive)
        self.out[:, :, :, where] = result.div_(total.masked_fill(total == 0, 1))
        if self.lse is not None:
            self.lse[:, :, :, where] = (shift + total.log()).squeeze(-1)
        if self.max_scores is not None:
            self.max_scores[:, :, :, where] = maximum.squeeze(-1)
