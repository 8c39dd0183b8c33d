"""Host side of a paged cache: lengths and pages of its sequences, without any tensor of keys.

A slot is a sequence's number, stable for as long as it is open. Numbers of all slots lie in arrays
that tensors share, so that a decode step costs a few operations and not a loop: only sequences
that need a page are looked at one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.mods.factory_arguments import checked_int
from anyflex.paging.page_owners import PageOwners
from anyflex.paging.prefix_keys import page_key, root_key

__all__ = ["Request", "Reserved", "Sequences"]

_CLOSED = -1
"""Room of a slot that isn't open: any step looks at it closer."""


class Buffers:
    """Numbers of a request's sequences at one step.

    Args:
        count: N.
        staged: memory of starts and of lengths, which requests share.

    Attributes:
        starts, lengths: int32 [N], length of each sequence before and after.
        rooms: int32 [N], length up to which a sequence can grow.
        crowded: N bytes, 1 for a sequence that is to grow beyond it.
        crowded_tensor: a view of them, bool [N].
    """

    def __init__(self, count: int, staged: tuple[Tensor, Tensor]) -> None:
        self.starts, self.lengths = (part[:count] for part in staged)
        self.crowded = bytearray(count)
        # Tensors that are made in inference mode can't be written outside of it.
        with torch.inference_mode(False):
            self.rooms = torch.empty(count, dtype=torch.int32)
            self.crowded_tensor = (
                torch.frombuffer(self.crowded, dtype=torch.bool)
                if count
                else torch.empty(0, dtype=torch.bool)
            )


class Request(NamedTuple):
    """Sequences that want to grow, in their order in the batch.

    Args:
        counts: slot -> number of new tokens.
        slots: int64 [N], on the host as the next one.
        tokens: int32 [N], new tokens of each.
        total: sum of the tokens.
        longest: largest of them.
        buffers: memory that each step writes again.
    """

    counts: dict[int, int]
    slots: Tensor
    tokens: Tensor
    total: int
    longest: int
    buffers: Buffers

    def feeds_one_each(self) -> bool:
        """Tell whether each sequence gets one token, as in decoding."""
        return self.longest == 1 and self.total == len(self.counts)


class Reserved(NamedTuple):
    """Room for the new tokens of one step.

    Args:
        request: the same object as the last step's, if it asks for the same; its buffers hold
            this step's numbers.
        copies: (from, to): pages to be copied before anything is written.
    """

    request: Request
    copies: list[tuple[int, int]]


class Sequences:
    """Lengths and pages of all slots.

    Args:
        slots, width, pages, page_size: of the cache.
        staged: int32 [slots] each, to which `reserve` writes the lengths of the request's
            sequences before and after the step; None makes some.

    Attributes:
        owners: of the pages.
        changes: entries of the page table to be written: row * width + column -> page.
    """

    def __init__(
        self,
        slots: int,
        width: int,
        pages: int,
        page_size: int,
        staged: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if staged is None:
            staged = torch.empty(slots, dtype=torch.int32), torch.empty(slots, dtype=torch.int32)
        self._staged = staged
        self.owners = PageOwners(pages)
        self.changes: dict[int, int] = {}
        self._width, self._page_size = width, page_size
        self._idle = list(range(slots - 1, -1, -1))
        self._pages: list[list[int] | None] = [None] * slots
        # Keys of the pages that `commit` has seen, the root's first.
        self._keys: list[list[bytes]] = [[] for _ in range(slots)]
        self._lengths = array("i", [0]) * slots
        # Length up to which a sequence can grow without a look at its pages.
        self._rooms = array("i", [_CLOSED]) * slots
        self._length_tensor = torch.frombuffer(self._lengths, dtype=torch.int32)
        self._room_tensor = torch.frombuffer(self._rooms, dtype=torch.int32)
        self._last_wanted: list[tuple[int, ...]] | None = None
        self._last_request = Request({}, torch.empty(0), torch.empty(0), 0, 0, Buffers(0, staged))

    def length(self, slot: int) -> int:
        """Return the number of tokens of an open sequence."""
        self._opened("length", slot)
        return self._lengths[slot]

    def open(self, fork_of: int | None = None, length: int | None = None) -> int:
        """Return a slot: empty, or with the first `length` tokens of another one."""
        if fork_of is None:
            if length is not None:
                raise ArgumentError(
                    f"open: length = {length} counts tokens of the sequence fork_of, and fork_of "
                    "is None. Give both, or neither."
                )
            return self._new([], 0, [root_key(())])
        source = self._opened("open: fork_of", fork_of)
        whole = self._lengths[fork_of]
        length = whole if length is None else checked_int("open: length", length, 0)
        if length > whole:
            raise ArgumentError(
                f"open: length must be at most that of fork_of, {whole} tokens, got {length}."
            )
        pages = source[: -(-length // self._page_size)]
        keys = self._keys[fork_of][: length // self._page_size + 1]
        slot = self._new(pages, length, keys)
        self._rooms[fork_of] = whole  # its last page may have another owner now
        return slot

    def prefix(self, tokens: Sequence[int], salt: Sequence[Any] = ()) -> tuple[int, int]:
        """Open a sequence with the pages that hold the beginning of `tokens`.

        Returns slot and number of tokens found, a multiple of the page size and smaller than
        len(tokens): the last token must be fed in any case, for what it says comes next.
        """
        keys, pages, size = [root_key(salt)], [], self._page_size
        for begin in range(0, (len(tokens) - 1) // size * size, size):
            key = page_key(keys[-1], tokens[begin : begin + size])
            page = self.owners.find(key)
            if page is None:
                break
            keys.append(key)
            pages.append(page)
        found = len(pages) * size
        return self._new(pages, found, keys), found

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Make the whole pages of a sequence findable by `prefix`."""
        pages = self._opened("commit", slot)
        length, size, keys = self._lengths[slot], self._page_size, self._keys[slot]
        if len(tokens) < length:
            raise ArgumentError(
                f"commit: tokens must be all of the sequence, {length}, got {len(tokens)}."
            )
        for index in range(len(keys) - 1, length // size):
            key = page_key(keys[-1], tokens[index * size : (index + 1) * size])
            keys.append(key)
            self.owners.register(pages[index], key)

    def trim(self, slot: int, length: int) -> None:
        """Forget what stands behind the first `length` tokens."""
        pages = self._opened("trim", slot)
        if checked_int("trim: length", length, 0) > self._lengths[slot]:
            raise ArgumentError(
                f"trim: length must be at most that of the sequence, {self._lengths[slot]}, got "
                f"{length}. `step` makes sequences longer."
            )
        size = self._page_size
        kept = -(-length // size)
        # Backwards: of a prefix that is kept, the end is taken again before the beginning.
        for page in reversed(pages[kept:]):
            self.owners.drop(page)
        del pages[kept:]
        del self._keys[slot][length // size + 1 :]
        self._lengths[slot] = self._rooms[slot] = length

    def close(self, slot: int) -> None:
        """Give a sequence's pages and slot back."""
        self._opened("close", slot)
        self.trim(slot, 0)
        self._pages[slot], self._rooms[slot] = None, _CLOSED
        self._idle.append(slot)

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> Reserved | None:
        """Reserve room for [(slot, new tokens)]: all of it, or nothing and None."""
        # Most steps of decoding ask for what the last one did, and reading that takes longest.
        if type(wanted) is not list or wanted != self._last_wanted or not _all_ints(wanted):
            # Pairs that are tuples are compared by their identity first.
            self._last_wanted, self._last_request = self._read(wanted)
        request = self._last_request
        slots, buffers = request.slots, request.buffers
        torch.index_select(self._length_tensor, 0, slots, out=buffers.starts)
        torch.add(buffers.starts, request.tokens, out=buffers.lengths)
        torch.index_select(self._room_tensor, 0, slots, out=buffers.rooms)
        torch.gt(buffers.lengths, buffers.rooms, out=buffers.crowded_tensor)
        growing = list(compress(request.counts, buffers.crowded))
        copies: list[tuple[int, int]] = []
        if growing and not (request.feeds_one_each() and self._give_page_to_each(growing)):
            if self._pages_needed(growing, request.counts) > self.owners.available:
                return None
            copies = self._give_pages(growing, request.counts)
        self._length_tensor.index_copy_(0, slots, buffers.lengths)
        return Reserved(request, copies)

    def _read(self, wanted: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, ...]], Request]:
        """Check a request's form, and return its pairs and what a step needs of them."""
        try:
            pairs = [tuple(pair) for pair in wanted]
            if bool in _types(pairs):
                raise TypeError("a bool is no slot and no number of tokens")
            counts = dict(wanted)
            slots = _tensor(array("q", [*counts]), torch.int64)
            tokens = _tensor(array("i", [*counts.values()]), torch.int32)
            count = len(wanted)
        except (TypeError, ValueError, OverflowError) as error:
            self._refuse(wanted, error)
        least, longest = map(int, torch.aminmax(tokens)) if counts else (0, 0)
        first, last = map(int, torch.aminmax(slots)) if counts else (0, 0)
        most = self._width * self._page_size
        if len(counts) != count or first < 0 or last >= len(self._pages):
            self._refuse(wanted)
        if least < 0 or longest > most:
            self._refuse(wanted)
        total = sum(counts.values())
        buffers = Buffers(count, self._staged)
        return pairs, Request(counts, slots, tokens, total, longest, buffers)

    def _give_page_to_each(self, slots: list[int]) -> bool:
        """Give sequences whose pages are full one more, as decoding does in each step. Returns
        False, and does nothing, where that isn't all there is to do."""
        size, width, lengths, pages = self._page_size, self._width, self._lengths, self._pages
        for slot in slots:
            own = pages[slot]
            if own is None or lengths[slot] != len(own) * size or len(own) == width:
                return False
        if len(slots) > self.owners.available:
            return False
        for slot in slots:
            own = pages[slot]
            assert own is not None
            page = self.changes[slot * width + len(own)] = self.owners.take()
            own.append(page)
            self._rooms[slot] = self._lengths[slot] + size
        return True

    def _pages_needed(self, slots: list[int], counts: dict[int, int]) -> int:
        """Number of pages that sequences need to grow, copies of shared ones included."""
        size, needed = self._page_size, 0
        writers: dict[int, int] = {}
        for slot in slots:
            pages, length, count = self._pages[slot], self._lengths[slot], counts[slot]
            if pages is None:
                self._refuse_closed("step", slot)
            if count == 0:
                continue
            columns = -(-(length + count) // size)
            if columns > self._width:
                raise ArgumentError(
                    f"step: slot {slot} would have {length + count} tokens, and width "
                    f"{self._width} holds {self._width * size} in pages of {size}. Make the cache "
                    "wider, or close the sequence."
                )
            needed += columns - len(pages)
            if length % size:
                writers[pages[-1]] = writers.get(pages[-1], 0) + 1
        # The last owner that writes to a page keeps it.
        owners = self.owners.owners
        return needed + sum(min(n, owners[page] - 1) for page, n in writers.items())

    def _give_pages(self, slots: list[int], counts: dict[int, int]) -> list[tuple[int, int]]:
        """Give sequences the pages that they need. Return pages to be copied, as (from, to)."""
        size, owners, changes = self._page_size, self.owners, self.changes
        copies = []
        for slot in slots:
            pages, length, count = self._pages[slot], self._lengths[slot], counts[slot]
            if pages is None or count == 0:
                continue
            row = slot * self._width
            if length % size:
                last = pages[-1]
                if owners.owners[last] > 1:
                    owners.drop(last)
                    pages[-1] = changes[row + len(pages) - 1] = owners.take()
                    copies.append((last, pages[-1]))
                else:
                    owners.forget(last)  # it may be findable, and is about to change
            columns = -(-(length + count) // size)
            for column in range(len(pages), columns):
                page = changes[row + column] = owners.take()
                pages.append(page)
            self._rooms[slot] = columns * size
        return copies

    def _new(self, pages: list[int], length: int, keys: list[bytes]) -> int:
        """Open a sequence that shares pages."""
        if not self._idle:
            raise ArgumentError(
                f"all {len(self._pages)} slots are open: close a sequence, or make the cache with "
                "more slots."
            )
        slot = self._idle.pop()
        for page in pages:
            self.owners.share(page)
        self._pages[slot], self._keys[slot] = list(pages), keys
        self._lengths[slot] = self._rooms[slot] = length
        row = slot * self._width
        self.changes.update(enumerate(pages, row))
        return slot

    def _opened(self, argument: str, slot: int) -> list[int]:
        """Return the pages of a slot, which must be open."""
        checked_int(f"{argument}: slot", slot)
        pages = self._pages[slot] if 0 <= slot < len(self._pages) else None
        if pages is None:
            self._refuse_closed(argument, slot)
        return pages

    def _refuse_closed(self, argument: str, slot: int) -> NoReturn:
        raise ArgumentError(
            f"{argument}: slot {slot} is not open. `open` and `prefix` return slots that are, "
            "until `close`."
        )

    def _refuse(self, wanted: Any, cause: BaseException | None = None) -> NoReturn:
        """Name what is wrong with a step's request."""
        if not isinstance(wanted, Sequence):
            raise ArgumentTypeError(
                f"step: wanted must be a list of (slot, new tokens), got {type(wanted).__name__}."
            )
        seen = set()
        for pair in wanted:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ArgumentTypeError(
                    f"step: wanted must hold (slot, new tokens), got {pair!r}."
                )
            slot, count = pair
            self._opened("step", slot)
            most = self._width * self._page_size
            if checked_int("step: new tokens", count, 0) > most:
                raise ArgumentError(
                    f"step: new tokens must be at most {most}, what width {self._width} holds in "
                    f"pages of {self._page_size}, got {count} for slot {slot}."
                )
            if slot in seen:
                raise ArgumentError(
                    f"step: slot {slot} is there twice. Ask for all of its new tokens at once."
                )
            seen.add(slot)
        raise AssertionError("a step's request is in order") from cause


def _types(pairs: Sequence[Sequence[object]]) -> set[type]:
    return set(map(type, chain.from_iterable(pairs)))


def _all_ints(pairs: Sequence[Sequence[object]]) -> bool:
    """Whether all are ints: 3.0 and True equal some."""
    return _types(pairs) <= {int}


def _tensor(numbers: array[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of an array's memory."""
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
