"""StepNumbers: whose tokens a step feeds and where their pages are, on the device by one copy."""

from __future__ import annotations

from array import array
from itertools import islice

import torch
from torch import Tensor

from anyflex.packed.packed import Packed
from anyflex.packed.staged_copy import StagedCopy
from anyflex.paging.sequences import Request, Reserved

__all__ = ["StepNumbers"]

_SHORT = 64
"""Maximum number of a sequence's new tokens in a step that counts as short; a step of one token
each, and a long one, are classes of their own. Kernels are planned for a class."""


class StepNumbers:
    """Tensors that stay where they are and are written for each step.

    Args:
        slots, width: of the page table.
        longest: tokens of the longest sequence that there can be.

    Attributes:
        page_table: int32 [slots, width].
        batches: the tensors as batches of `slots` sequences, one for each class of steps.
    """

    def __init__(self, slots: int, width: int, longest: int, device: torch.device) -> None:
        self.page_table = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self._entries = self.page_table.view(-1)
        # Room behind the numbers of sequences is for what moves with them: changed entries of the
        # page table, and pages to be copied.
        self._numbers = 4 * slots + 1
        self._most_changes = max(slots, 256)
        size = self._numbers + 2 * self._most_changes + 2 * slots
        self._host = array("i", [0]) * size
        self._moved = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = StagedCopy(self._moved)
        self._last: Request | None = None
        parts = [slots + 1, slots, slots, slots]
        host = torch.frombuffer(self._host, dtype=torch.int32)
        self._host_parts = torch.split(host[: self._numbers], parts)
        offsets, lengths, owners, starts = torch.split(self._moved[: self._numbers], parts)
        for part in (self._host_parts[2], owners):
            part.copy_(torch.arange(slots))
        self.batches = [
            Packed(
                offsets,
                lengths,
                page_table=self.page_table,
                slots=owners,
                q_starts=starts,
                max_q=max_q,
                max_kv=longest,
            )
            for max_q in sorted({1, min(_SHORT, longest), longest})
        ]

    def batch(self, longest: int) -> Packed:
        """Return the batch for steps in which no sequence has more new tokens."""
        return next(batch for batch in self.batches if longest <= batch.max_q)

    def send(self, reserved: Reserved, changes: dict[int, int], pools: list[Tensor]) -> None:
        """Write a step's numbers, the changed entries of the page table, and copies of pages.

        Args:
            changes: row * width + column -> page; is emptied.
            pools: [layers, P, ...], all in which a page is copied.
        """
        self._write(reserved)
        sources, targets = zip(*reserved.copies, strict=True) if reserved.copies else ((), ())
        entries = iter(changes.items())
        # There is a second round only where many forks and long prefixes meet in one step.
        for _ in range(max(1, -(-len(changes) // self._most_changes))):
            some = dict(islice(entries, self._most_changes))
            more = array("i", [*some, *some.values(), *sources, *targets])
            end = self._numbers + len(more)
            self._host[self._numbers : end] = more
            self._staged.send(self._host[:end])
            if more:
                parts = [len(some), len(some), len(sources), len(targets)]
                moved = self._moved[self._numbers : end]
                where, page, source, target = torch.split(moved, parts)
                self._entries.index_copy_(0, where.long(), page)
                for pool in pools if sources else ():
                    pool.index_copy_(1, target.long(), pool.index_select(1, source))
        changes.clear()

    def _write(self, reserved: Reserved) -> None:
        """Write a step's numbers into the host's buffer."""
        request, starts, lengths, _ = reserved
        count, slots = len(request.counts), self.page_table.shape[0]
        q_offsets, kv_lengths, owners, q_starts = self._host_parts
        kv_lengths[:count].copy_(lengths)
        q_starts[:count].copy_(starts)
        if request is self._last:
            return
        self._last = request
        torch.cumsum(request.tokens, 0, dtype=torch.int32, out=q_offsets[1 : count + 1])
        owners[:count].copy_(request.slots)
        if count < slots:  # the others have no rows and no keys
            q_offsets[count + 1 :].fill_(request.total)
            kv_lengths[count:].fill_(0)
