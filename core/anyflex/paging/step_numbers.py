"""StepNumbers: whose tokens a step feeds and where their pages are, on the device by one copy."""

from __future__ import annotations

from array import array

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
        staged: for `Sequences`, which writes each step's numbers there.
    """

    def __init__(self, slots: int, width: int, longest: int, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        # A CPU's entries are written here one by one: few change in a step.
        self._table = array("i", [0]) * (slots * width if self._on_cpu else 0)
        if self._on_cpu:
            self._entries = torch.frombuffer(self._table, dtype=torch.int32)
        else:
            self._entries = torch.zeros(slots * width, dtype=torch.int32, device=device)
        self.page_table = self._entries.view(slots, width)
        # Room behind the numbers of sequences is for what moves with them: changed entries of the
        # page table, and pages to be copied.
        self._numbers = 4 * slots + 1
        self._most_changes = max(slots, 256)
        parts = [slots + 1, slots, slots, slots, *[self._most_changes] * 2, slots, slots]
        self._host = array("i", [0]) * sum(parts)
        self._host_tensor = torch.frombuffer(self._host, dtype=torch.int32)
        moved = torch.zeros(sum(parts), dtype=torch.int32, device=device)
        self._staged = StagedCopy(moved)
        self._host_parts = torch.split(self._host_tensor, parts)[:4]
        offsets, lengths, owners, starts, *self._changed, sources, targets = torch.split(
            moved, parts
        )
        self._copied = sources, targets
        for part in (self._host_parts[2], owners):
            part.copy_(torch.arange(slots))
        self._last: Request | None = None
        self.staged = self._host_parts[3], self._host_parts[1]
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
        for batch in self.batches:
            batch.known = 0, max(slots, longest)

    def batch(self, longest: int) -> Packed:
        """Return the batch for steps in which no sequence has more new tokens."""
        for batch in self.batches:
            if longest <= batch.max_q:
                return batch
        raise AssertionError("the last class has the longest sequence that there can be")

    def send(self, reserved: Reserved, changes: dict[int, int], pools: list[Tensor]) -> None:
        """Write a step's numbers, the changed entries of the page table, and copies of pages.

        Args:
            changes: row * width + column -> page; is emptied.
            pools: [layers, P, ...], all in which a page is copied.
        """
        if reserved.request is not self._last:
            self._begin(reserved.request)
        if self._on_cpu:
            for place, page in changes.items():
                self._table[place] = page
            changes.clear()
        if not changes and not reserved.copies:
            self._staged.send(self._host_tensor)
            return
        places, pages = array("i", changes), array("i", changes.values())
        # There is a second round only where many forks and long prefixes meet in one step.
        for begin in range(0, max(1, len(places)), self._most_changes):
            some = slice(begin, begin + self._most_changes)
            count = self._stage(places[some], pages[some], reserved.copies)
            self._staged.send(self._host_tensor)
            if count:
                at, page_of = (part[:count] for part in self._changed)
                self._entries.index_put_((at,), page_of)
        if reserved.copies:
            source, target = (part[: len(reserved.copies)].long() for part in self._copied)
            for pool in pools:
                pool.index_copy_(1, target, pool.index_select(1, source))
        changes.clear()

    def _stage(self, places: array[int], pages: array[int], copies: list[tuple[int, int]]) -> int:
        """Write what moves with a step's numbers into the host's buffer, and return the number of
        changed entries."""
        at = self._numbers
        for entries in (places, pages):
            self._host[at : at + len(entries)] = entries
            at += self._most_changes
        for copied in zip(*copies, strict=True):
            self._host[at : at + len(copied)] = array("i", copied)
            at += self.page_table.shape[0]
        return len(places)

    def _begin(self, request: Request) -> None:
        """Write what all steps of a request have in common."""
        count, slots = len(request.counts), self.page_table.shape[0]
        q_offsets, kv_lengths, owners, _ = self._host_parts
        torch.cumsum(request.tokens, 0, dtype=torch.int32, out=q_offsets[1 : count + 1])
        owners[:count].copy_(request.slots)
        if count < slots:  # the others have no rows and no keys
            q_offsets[count + 1 :].fill_(request.total)
            kv_lengths[count:].fill_(0)
        self._last = request
