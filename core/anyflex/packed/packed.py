"""Packed and Step: whose rows are whose in a call over many sequences, and one pass over them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from anyflex.packed.packed_checks import (
    bound_of,
    check_count,
    check_slots,
    check_tensors,
    check_values,
)
from anyflex.packed.staged_copy import StagedCopy
from anyflex.runtime.kernel_cache import is_capturing
from anyflex.tensors.dynamo_disabled import in_graph
from anyflex.tensors.dynamo_errors import fail

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Packed", "Step"]

Kept = TypeVar("Kept")
_MISSING = object()


class Packed:
    """A batch: which rows of packed tensors belong to which sequence, and which keys it reads.

    Sequence i has the query rows ``q_offsets[i]:q_offsets[i + 1]``. Its keys are one of:

    - the same rows of key and value, where nothing else is said: self-attention;
    - rows ``kv_offsets[i]:kv_offsets[i + 1]`` of key and value, the first ``kv_lengths[i]`` of
      them where `kv_lengths` is given too;
    - `kv_lengths[i]` keys in pages: key p is row ``p % page`` of page
      ``page_table[slots[i], p // page]``, or of table row i where no `slots` are given. Entries
      past a length mean nothing and are never followed.

    Mods see ``b = slots[i]``, ``q_idx = q_starts[i] + row`` within the sequence, and ``kv_idx``
    from 0 to ``kv_lengths[i] - 1``. Rows from ``q_offsets[N]`` on are padding rows: their out is 0
    and their lse -inf.

    Tensors are used where they are and not copied: on an accelerator nothing reads them on the
    host, and who writes new values of the same bounds into them, as a captured graph's owner
    does, calls `begin` again, which says what becomes of numbers beyond the bounds.

    Args:
        q_offsets: int32 [N + 1], not falling, from 0; on the device of the call.
        kv_lengths: int32 [N].
        kv_offsets: int32 [N + 1], for packed keys.
        page_table: int32 [R, W], any row stride; key and value are then pools of pages.
        slots: int32 [N], different for sequences with rows or keys; None is 0 to N - 1.
        q_starts: int32 [N], position of each sequence's first query row; None is
            ``kv_length - q_length``, which lets the last query row be the last key's.
        max_q, max_kv: no sequence has more query rows, or keys. None reads them from the tensors:
            on an accelerator that waits for the device once.

    Attributes:
        sequences: N.
        device: of the tensors.
        table_rows: row of the page table that each sequence reads, or None: its own number.
        known: no index that mods see is below the first or above the second, by the books of who
            made the batch, which page ids follow too; None where nobody keeps any.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument; values are looked at on a CPU only.
        GraphCaptureError: a bound is None while a device graph is being captured.

    Examples:
        >>> import torch, anyflex
        >>> offsets = torch.tensor([0, 3, 8], dtype=torch.int32)  # sequences of 3 and 5 rows
        >>> step = anyflex.Packed(offsets).begin()
        >>> q, k, v = torch.randn(3, 8, 4, 16).unbind(0)
        >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        >>> anyflex.flex_attention_packed(q, k, v, step, mask_mod=causal).shape
        torch.Size([8, 4, 16])
    """

    def __init__(
        self,
        q_offsets: Tensor,
        kv_lengths: Tensor | None = None,
        *,
        kv_offsets: Tensor | None = None,
        page_table: Tensor | None = None,
        slots: Tensor | None = None,
        q_starts: Tensor | None = None,
        max_q: int | None = None,
        max_kv: int | None = None,
    ) -> None:
        given = {
            "q_offsets": q_offsets,
            "kv_lengths": kv_lengths,
            "kv_offsets": kv_offsets,
            "page_table": page_table,
            "slots": slots,
            "q_starts": q_starts,
        }
        check_tensors(given)
        if page_table is not None and (kv_offsets is not None or kv_lengths is None):
            fail(
                "ArgumentError",
                "Packed: page_table needs kv_lengths, the number of keys of each sequence, and no "
                "kv_offsets, which are for packed keys.",
            )
        if page_table is None and kv_offsets is None and kv_lengths is not None:
            fail(
                "ArgumentError",
                "Packed: kv_lengths needs kv_offsets, where keys are packed, or page_table.",
            )
        self.q_offsets = q_offsets
        self.kv_offsets = q_offsets if kv_offsets is None else kv_offsets
        self._given = kv_lengths, q_starts
        self._derive()
        self.page_table = page_table
        self.slots = _numbered(q_offsets) if slots is None else slots
        self.sequences = q_offsets.shape[0] - 1
        self.device = q_offsets.device
        self.table_rows = slots
        self.known: tuple[int, int] | None = None
        self._staged: StagedCopy | None = None
        self._changes = 0
        if self.device.type == "cpu" and not in_graph():
            check_values(q_offsets, self.kv_offsets, self.kv_lengths, page_table, slots)
        self.max_q = bound_of("max_q", max_q, q_offsets.diff())
        self.max_kv = bound_of("max_kv", max_kv, self.kv_lengths)

    @classmethod
    def with_capacity(
        cls,
        sequences: int,
        max_q: int,
        max_kv: int,
        *,
        page_table: Tensor,
    ) -> Self:
        """Return an empty batch that `set` fills, for pages whose lengths the host knows.

        Its tensors stay where they are, so that a captured graph reads what `set` wrote last.

        Args:
            sequences: the most sequences of a step; fewer leave the rest empty.
            max_q, max_kv: the most query rows, and keys, of a sequence.
            page_table: int32 [R, W] on the device of the calls; slot s reads row s.

        Raises:
            ArgumentError, ArgumentTypeError: naming the argument.
        """
        for name, value in (("sequences", sequences), ("max_q", max_q), ("max_kv", max_kv)):
            check_count(f"Packed.with_capacity: {name}", value)
        check_tensors({"page_table": page_table})
        # Tensors that are made in inference mode can't be written outside of it.
        with torch.inference_mode(False):
            numbers = torch.zeros(4 * sequences + 1, dtype=torch.int32, device=page_table.device)
        q_offsets, kv_lengths, slots, q_starts = torch.split(
            numbers, [sequences + 1, sequences, sequences, sequences]
        )
        slots.copy_(_numbered(q_offsets))
        packed = cls(
            q_offsets,
            kv_lengths,
            page_table=page_table,
            slots=slots,
            q_starts=q_starts,
            max_q=max_q,
            max_kv=max_kv,
        )
        packed._staged = StagedCopy(numbers)
        return packed

    def set(
        self,
        q_lengths: Sequence[int],
        kv_lengths: Sequence[int],
        slots: Sequence[int] | None = None,
    ) -> None:
        """Write the next step's numbers: one asynchronous copy to the device.

        Args:
            q_lengths: query rows of each sequence.
            kv_lengths: its keys, those of the step included.
            slots: which one it is; None is 0, 1, ...

        Raises:
            ArgumentError: more than the batch was made for, negative lengths, a slot twice, or a
                batch that wasn't made by `with_capacity`.
        """
        if self._staged is None:
            fail(
                "ArgumentError",
                "Packed.set: this batch reads the tensors that it was made of; write to those, or "
                "make it by Packed.with_capacity.",
            )
        if is_capturing(self.device.type):
            fail(
                "GraphCaptureError",
                "Packed.set: a device graph is being captured, and each replay would copy these "
                "numbers again: call it before the capture and before each replay.",
            )
        count, capacity = len(q_lengths), self.sequences
        rows = list(range(count)) if slots is None else list(slots)
        if not (len(kv_lengths) == len(rows) == count <= capacity):
            fail(
                "ArgumentError",
                "Packed.set: q_lengths, kv_lengths and slots must have one number for each of at "
                f"most {capacity} sequences, got {count}, {len(kv_lengths)} and {len(rows)}.",
            )
        for name, lengths, most in (
            ("q_lengths", q_lengths, self.max_q),
            ("kv_lengths", kv_lengths, self.max_kv),
        ):
            if count and (min(lengths) < 0 or max(lengths) > most):
                fail(
                    "ArgumentError",
                    f"Packed.set: {name} must be from 0 to {most}, the bound that this batch was "
                    f"made with, got {min(lengths)} to {max(lengths)}.",
                )
        check_slots("Packed.set", rows, self.page_table)
        rest = capacity - count
        numbers = [
            *accumulate(q_lengths, initial=0),
            *[sum(q_lengths)] * rest,
            *kv_lengths,
            *[0] * rest,
            *rows,
            # Slot 0, so that no mod reads outside of a table by it.
            *[0] * rest,
            *[kv - q for q, kv in zip(q_lengths, kv_lengths, strict=True)],
            *[0] * rest,
        ]
        try:
            self._staged.send(torch.frombuffer(array("i", numbers), dtype=torch.int32))
        except (TypeError, OverflowError) as error:
            fail("ArgumentTypeError", f"lengths and slots must be ints of 32 bits: {error}.")
        self.outdate_steps()

    def begin(self) -> Step:
        """Return the step of one forward pass, which keeps what its layers share.

        Raises:
            ArgumentError: on a CPU numbers that were written since the batch was made are wrong,
                or exceed max_q or max_kv. Elsewhere nothing waits for them: kernels that take
                packed sequences as they are read no more than max_kv keys, and if q_offsets are
                wrong or a sequence has more than max_q rows, all rows are padding rows.
        """
        self._derive()
        if self.device.type == "cpu" and not in_graph():
            self._check_written()
        return Step(self)

    def _check_written(self) -> None:
        """Check numbers that the batch's owner may have written since it was made."""
        if self.known is not None or self._staged is not None:  # our own code writes them
            return
        check_values(
            self.q_offsets, self.kv_offsets, self.kv_lengths, self.page_table, self.table_rows
        )
        bound_of("max_q", self.max_q, self.q_offsets.diff())
        bound_of("max_kv", self.max_kv, self.kv_lengths)

    def outdate_steps(self) -> None:
        """Make the steps that began before refuse to be used."""
        self._changes += 1

    def _derive(self) -> None:
        """Compute the lengths and first positions that weren't given. Other tensors may have been
        written to since the last step."""
        kv_lengths, q_starts = self._given
        self.kv_lengths = self.kv_offsets.diff() if kv_lengths is None else kv_lengths
        self.q_starts = self.kv_lengths - self.q_offsets.diff() if q_starts is None else q_starts


def _numbered(q_offsets: Tensor) -> Tensor:
    return torch.arange(q_offsets.shape[0] - 1, dtype=torch.int32, device=q_offsets.device)


class Step:
    """One forward pass over a batch, made by `Packed.begin`.

    A step keeps the blocks that it found for each mask mod, so that many layers with one mask look
    for them once. It is of its batch's numbers: after `Packed.set`, or after new values were
    written into the tensors of the batch, begin another one. Begin it where it is used: a step
    made inside of a captured device graph serves that graph alone.

    Attributes:
        packed: the batch.
        captured: it began inside of a captured device graph.
    """

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self._changes = packed._changes
        self._on_cpu = packed.device.type == "cpu"
        self.captured = not (self._on_cpu or in_graph() or not is_capturing(packed.device.type))
        # Keys name what a value is and what it depends on beside the batch.
        self._kept: dict[tuple[Any, ...], Any] = {}

    def check(self) -> None:
        """Check that this step may be used now.

        Raises:
            ArgumentError: the batch has been set again.
            GraphCaptureError: it was begun on the other side of a capture's border.
        """
        if self._changes != self.packed._changes:
            fail(
                "ArgumentError",
                "step: its batch was set again after it began; begin another one by "
                "Packed.begin().",
            )
        # Nothing captures a CPU's work.
        if self._on_cpu or in_graph():
            return
        if self.captured != is_capturing(self.packed.device.type):
            began, used = ("inside", "outside") if self.captured else ("outside", "inside")
            fail(
                "GraphCaptureError",
                f"step: it began {began} of a captured device graph and is used {used}: what it "
                "keeps would be missing in each replay. Begin it where it is used.",
            )

    def keep(self, key: tuple[Any, ...], make: Callable[..., Kept], *given: Any) -> Kept:
        """Return what ``make(*given)`` was when it was first asked for by this key; in a recorded
        program what it is now."""
        return make(*given) if in_graph() else self.once(key, make, *given)

    def once(self, key: tuple[Any, ...], make: Callable[..., Kept], *given: Any) -> Kept:
        """Return what `keep` does outside of recorded programs, without asking where this is."""
        found = self._kept.get(key, _MISSING)
        if found is _MISSING:
            found = self._kept[key] = make(*given)
        return found  # type: ignore[no-any-return]
