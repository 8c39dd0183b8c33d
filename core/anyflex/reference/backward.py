"""Gradients in chunks of query rows: the reference's own backward, and core's for every backend
without one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anyflex.contract.call import Call, GradInputs, Grads, Saved
from anyflex.contract.spec import Spec
from anyflex.errors import ArgumentError
from anyflex.reference.chunks import Chunk, chunks
from anyflex.reference.compiled_spec import Prepared, prepare
from anyflex.reference.dropout import kept_pairs
from anyflex.reference.layout import Layout
from anyflex.reference.nonfinite_products import Operand, has_nonfinite
from anyflex.reference.scatter import TableGradient
from anyflex.reference.scores import ChunkScores, Scores
from anyflex.tracing import vmapped_mods

__all__ = ["backward", "core_backward"]


def core_backward(spec: Spec, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
    """Fill `grads`, whichever backend ran the forward. The spec's options don't matter."""
    backward(prepare(spec), call, saved, grad, grads)


@torch.no_grad()
def backward(prepared: Prepared, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
    """Fill `grads`.

    Args:
        saved: lse [B, Hq, L]; it may come from outside (ring attention) and cover more keys than
            the call's, and then delta does too.
    """
    for total in (grads.dq, grads.dk, grads.dv):
        if total is not None:
            total.zero_()
    if call.query.numel() == 0 or call.key.numel() == 0:
        return
    work = _Backward(prepared, call, saved, grad, grads)
    for chunk in chunks(work.layout, call.mask, work.scores.device):
        if chunk.width > 0:
            work.add(chunk)
    work.finish()


class _Backward:
    def __init__(
        self, prepared: Prepared, call: Call, saved: Saved, grad: GradInputs, grads: Grads
    ) -> None:
        self.call = call
        self.grads = grads
        self.prepared = prepared
        # The forward has raised for reads outside, whichever backend ran it.
        self.scores = Scores(prepared, call, check=False)
        self.layout: Layout = self.scores.layout
        dtype = self.scores.dtype
        grouped = self.layout.grouped

        lse = grouped(saved.lse).unsqueeze(-1)
        dead = lse == -torch.inf
        # exp(s - inf) is 0: a row without a live key has weights 0.
        self.lse = lse.masked_fill(dead, torch.inf)
        # Gradients that arrive at a dead row are dropped here.
        dout = grouped(grad.dout).to(dtype).masked_fill(dead, 0)
        # Without a delta from outside the call holds whole rows: weights are made from their own
        # maxima and sums, and delta from the weights, because out has been rounded to query's
        # dtype.
        self.delta: Tensor | None = None
        if grad.delta is not None:
            self.delta = grouped(grad.delta).unsqueeze(-1).to(dtype).masked_fill(dead, 0)
        self.dlse: Tensor | None = None
        if grad.dlse is not None:
            self.dlse = grouped(grad.dlse).unsqueeze(-1).to(dtype).masked_fill(dead, 0)

        self.dout_as_given = dout
        self.dout = Operand(dout)
        self.value = call.value.to(dtype)
        self.key = Operand(self.scores.key)
        self.query = Operand(self.scores.query.to(dtype) * call.scale)
        self.nonfinite = (
            any(operand.nonfinite for operand in (self.dout, self.key, self.query))
            or has_nonfinite(self.value)
            or any(t is not None and has_nonfinite(t) for t in (self.delta, self.dlse))
            or bool(lse.isnan().any())
        )
        self.modifies = prepared.score is not None or call.score_function is not None

        self.dq = None if grads.dq is None else grouped(grads.dq)
        self.dk = _sums(grads.dk, dtype)
        self.dv = _sums(grads.dv, dtype)
        self.tables = {
            position: TableGradient(target)
            for position, target in enumerate(grads.captured)
            if target is not None
        }
        self.opaque_reads = list(self._opaque_reads())

    def _opaque_reads(self) -> Iterator[tuple[int, Tensor]]:
        """(position in the captured tensors, the tensor that the function reads)."""
        if self.call.score_function is None or not self.tables:
            return
        read = vmapped_mods.read_tensors(
            self.call.score_function, self.scores.device, self.scores.dtype
        )
        for position in self.tables:
            captured = self.call.captured[position]
            # Autograd may hand over another object than the mod reads, of the same memory.
            same = [tensor for tensor in read if tensor is captured] or [
                tensor for tensor in read if tensor.requires_grad and _same(tensor, captured)
            ]
            if not same:
                raise ArgumentError(
                    "score_mod, which can't be traced, is called again in backward, and doesn't "
                    f"read a tensor of shape {list(self.call.captured[position].shape)} there "
                    "that it read in forward: don't rebind what it reads, as the variable of a "
                    "loop, before backward."
                )
            for tensor in same:
                yield position, tensor

    def add(self, chunk: Chunk) -> None:
        """Add the contribution of one chunk's pairs."""
        rows = slice(chunk.begin, chunk.end)
        scores = self.scores.chunk(chunk, keep_raw=self.modifies)
        weights = scores.modified
        alive = weights != -torch.inf if self.nonfinite else None
        if self.delta is None:
            # lse is rounded: with large scores it isn't the number that makes weights sum to 1.
            maximum = weights.amax(-1, keepdim=True)
            shift = maximum.masked_fill(maximum == -torch.inf, 0)
            weights.sub_(shift).exp_()
            total = self.scores.add_sink(weights.sum(-1, keepdim=True), shift)
            weights.div_(total.masked_fill(total == 0, 1))
        else:
            weights.sub_(self.lse[:, :, :, rows]).exp_()
        if alive is not None:
            weights.masked_fill_(~alive, 0)
        dropout = self.call.dropout
        kept = None if dropout is None else kept_pairs(dropout, scores.inputs)
        if self.dv is not None:
            dout = self.dout.taken(lambda tensor: tensor[:, :, :, rows])
            if dropout is None or kept is None:
                part = dout.product(self._transposed, weights, alive)
            else:
                given = (weights * dropout.scale).masked_fill_(~kept, 0)
                seen = None if alive is None else alive & kept
                part = dout.product(self._transposed, given, seen)
            chunk.add_to(self.dv, part)
        if self.dq is None and self.dk is None and not self.tables:
            return
        grad = self.layout.times_keys(self.dout_as_given[:, :, :, rows], chunk.take(self.value))
        if dropout is not None and kept is not None:
            grad.mul_(dropout.scale).masked_fill_(~kept, 0)
        if self.delta is not None:
            delta = self.delta[:, :, :, rows]
        else:
            products = grad * weights
            if alive is not None:
                products.masked_fill_(~alive, 0)
            delta = products.sum(-1, keepdim=True)
        if self.dlse is not None:
            delta = delta - self.dlse[:, :, :, rows]
        grad.sub_(delta).mul_(weights)
        if alive is not None:
            grad.masked_fill_(~alive, 0)
        passed = self._through_score_mod(chunk, scores, grad)
        if passed is None:
            return
        if self.dq is not None:
            key = self.key.taken(chunk.take)
            part = key.product(self.layout.times_values, passed, alive)
            self.dq[:, :, :, rows] = part.mul_(self.call.scale)
        if self.dk is not None:
            query = self.query.taken(lambda tensor: tensor[:, :, :, rows])
            chunk.add_to(self.dk, query.product(self._transposed, passed, alive))

    def _transposed(self, weights: Tensor, rows: Tensor) -> Tensor:
        return self.layout.summed_rows(weights, rows)

    def _through_score_mod(self, chunk: Chunk, scores: ChunkScores, grad: Tensor) -> Tensor | None:
        """Return the gradient of the raw scores, None for zero; feed the captured tensors'."""
        call = self.call
        if call.score_function is not None:
            return self._through_opaque(chunk, scores, grad)
        derivative, evaluator = self.prepared.derivative, self.prepared.gradients
        if derivative is None or evaluator is None:
            return grad
        inputs = {**scores.inputs, "grad": grad}
        values = iter(evaluator(inputs, call.captured, call.ints, call.floats))
        passed = None if derivative.score is None else _masked(next(values), scores, grad.shape)
        for scatter in derivative.scatters:
            value = next(values)
            indices = [next(values) for _ in scatter.indices]
            table = self.tables.get(scatter.captured)
            if table is not None:
                table.add(indices, _masked(value, scores, grad.shape), grad.shape)
        return passed

    def _through_opaque(self, chunk: Chunk, scores: ChunkScores, grad: Tensor) -> Tensor | None:
        assert self.call.score_function is not None
        passed, others = vmapped_mods.score_gradients(
            self.call.score_function,
            self.layout.ungrouped(scores.raw),
            self.scores.flat_indices(chunk),
            self.layout.ungrouped(grad),
            [tensor for _, tensor in self.opaque_reads],
        )
        for (position, _), gradient in zip(self.opaque_reads, others, strict=True):
            if gradient is not None:
                self.tables[position].add_dense(gradient)
        if passed is None:
            return None
        return _masked(self.layout.grouped(passed), scores, grad.shape)

    def finish(self) -> None:
        """Convert the sums to the gradients."""
        for target, total in ((self.grads.dk, self.dk), (self.grads.dv, self.dv)):
            if target is not None and total is not None and total is not target:
                target.copy_(total)
        for table in self.tables.values():
            table.finish()


def _sums(target: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The zeroed target itself where its type fits, else a zeroed tensor to sum in."""
    if target is None or target.dtype is dtype:
        return target
    return torch.zeros_like(target, dtype=dtype)


def _masked(value: Tensor, scores: ChunkScores, shape: torch.Size) -> Tensor:
    """0 at dead pairs, where the mod's derivative may be anything.

    The incoming gradient is 0 there, so a dead pair can only have become 0 or NaN: if the sum is
    finite, nothing has to be done, which saves a copy of the chunk.
    """
    value = value.expand(shape)
    if scores.dead is None or not has_nonfinite(value):
        return value
    return value.masked_fill(scores.dead, 0)


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are the same elements in memory."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.dtype is other.dtype
    )
