"""Bookkeeping of pages, held against sequences that own plain lists of rows.

A row of the model's memory is all that decides a key: the salt, and the tokens up to its own. So
a page that a sequence reads and shouldn't shows as a wrong row.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.paging.sequences import Sequences
from tests.soak import SOAK

__all__: list[str] = []

SLOTS, WIDTH, PAGES, SIZE = 4, 5, 9, 4
MOST = WIDTH * SIZE

Row = tuple[tuple[str, ...], tuple[int, ...]]
"""Salt, and the tokens up to the row's own."""


class Model:
    """Does at random what a server does, and knows which rows every sequence must have."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.sequences = Sequences(SLOTS, WIDTH, PAGES, SIZE)
        self.table = [-1] * (SLOTS * WIDTH)
        self.memory: list[list[Any]] = [["stale"] * SIZE for _ in range(PAGES)]
        self.rows: dict[int, list[Row]] = {}
        self.salts: dict[int, tuple[str, ...]] = {}
        self.committed: list[list[int]] = [[]]
        self.happened = Counter[str]()

    def act(self) -> None:
        opens = (self.open, self.fork, self.prefix)
        acts = (self.step, self.step, self.step, self.commit, self.trim, self.close)
        free = len(self.rows) < SLOTS
        choices = [*(opens if free else ()), *(acts if self.rows else ())]
        self.rng.choice(choices)()
        self.check()

    def entered(self, slot: int, rows: list[Row], salt: tuple[str, ...]) -> None:
        assert slot not in self.rows
        self.rows[slot], self.salts[slot] = rows, salt

    def chosen(self) -> int:
        return self.rng.choice(list(self.rows))

    def open(self) -> None:
        self.entered(self.sequences.open(), [], ())

    def fork(self) -> None:
        if not self.rows:
            return
        source = self.chosen()
        rows = self.rows[source]
        length = self.rng.choice([None, self.rng.randint(0, len(rows))])
        slot = self.sequences.open(source, length)
        self.entered(slot, rows[:length], self.salts[source])

    def prefix(self) -> None:
        """Look for the beginning of something that was committed, and other tokens behind it."""
        text = self.rng.choice(self.committed)[: self.rng.randint(0, MOST)]
        tokens = [*text, *self.tokens(self.rng.randint(0, SIZE))]
        salt = self.rng.choice([(), ("tenant",)])
        slot, found = self.sequences.prefix(tokens, salt)
        assert found % SIZE == 0 and found < max(1, len(tokens))
        self.happened["found"] += found > 0
        self.entered(slot, [(salt, tuple(tokens[: i + 1])) for i in range(found)], salt)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randint(0, 1) for _ in range(count)]

    def step(self) -> None:
        slots = self.rng.sample(list(self.rows), self.rng.randint(1, len(self.rows)))
        rooms = [MOST - len(self.rows[slot]) for slot in slots]
        asked = [min(room, self.rng.choice((0, 1, 1, 1, 2, 6))) for room in rooms]
        wanted = list(zip(slots, asked, strict=True))
        before = self.counts()
        reserved = self.sequences.reserve(wanted)
        if reserved is None:
            self.happened["refused"] += 1
            assert self.counts() == before
            # A copy for each, and all of its growth, would have been enough.
            most = sum(1 - -count // SIZE for count in asked if count)
            assert most > self.sequences.owners.available
            return
        assert reserved.request.slots.tolist() == slots
        assert reserved.request.tokens.tolist() == asked
        buffers = reserved.request.buffers
        assert buffers.starts.tolist() == [len(self.rows[slot]) for slot in slots]
        assert buffers.lengths.tolist() == [len(self.rows[slot]) + n for slot, n in wanted]
        assert (reserved.request.total, reserved.request.longest) == (sum(asked), max(asked))
        for source, to in reserved.copies:
            self.happened["copied"] += 1
            self.memory[to] = list(self.memory[source])
        self.update_table()
        for slot, count in wanted:
            for token in self.tokens(count):
                rows = self.rows[slot]
                row = self.salts[slot], (*(rows[-1][1] if rows else ()), token)
                page, at = self.place(slot, len(rows))
                assert self.sequences.owners.owners[page] == 1, "a page has two writers"
                self.memory[page][at] = row
                self.rows[slot] = [*rows, row]

    def commit(self) -> None:
        slot = self.chosen()
        rows = self.rows[slot]
        tokens = list(rows[-1][1]) if rows else []
        self.sequences.commit(slot, [*tokens, 7])
        self.committed.append(tokens)

    def trim(self) -> None:
        slot = self.chosen()
        length = self.rng.randint(0, len(self.rows[slot]))
        self.sequences.trim(slot, length)
        self.rows[slot] = self.rows[slot][:length]

    def close(self) -> None:
        slot = self.chosen()
        self.sequences.close(slot)
        del self.rows[slot]

    def update_table(self) -> None:
        for index, page in self.sequences.changes.items():
            self.table[index] = page
        self.sequences.changes.clear()

    def place(self, slot: int, position: int) -> tuple[int, int]:
        return self.table[slot * WIDTH + position // SIZE], position % SIZE

    def counts(self) -> tuple[object, ...]:
        owners = self.sequences.owners
        lengths = [self.sequences.length(slot) for slot in self.rows]
        return list(owners.owners), owners.available, lengths

    def check(self) -> None:
        """Every sequence reads its own rows, and each page's owners are those that read it."""
        self.update_table()
        owned = Counter[int]()
        for slot, rows in self.rows.items():
            assert self.sequences.length(slot) == len(rows)
            places = [self.place(slot, i) for i in range(len(rows))]
            assert [self.memory[page][at] for page, at in places] == rows
            owned.update({page for page, _ in places})
        owners = self.sequences.owners
        assert owners.owners == [owned[page] for page in range(PAGES)]
        assert owners.available + len(owned) == PAGES


def test_sequences_read_their_own_rows_whatever_happens_to_others() -> None:
    happened = Counter[str]()
    for seed in range(5000 if SOAK else 150):
        model = Model(seed)
        for _ in range(100):
            model.act()
        happened.update(model.happened)
    assert min(happened[event] for event in ("found", "refused", "copied")) > 50


def fed(sequences: Sequences, tokens: list[int], salt: tuple[Any, ...] = ()) -> tuple[int, int]:
    """A committed sequence of these tokens: its slot, and how many tokens were found."""
    slot, found = sequences.prefix(tokens, salt)
    assert sequences.reserve([(slot, len(tokens) - found)]) is not None
    sequences.commit(slot, tokens)
    return slot, found


def test_a_prefix_is_found_by_its_tokens_and_its_salt() -> None:
    sequences = Sequences(8, 8, 32, 4)
    text = list(range(11))
    first, found = fed(sequences, text)
    assert found == 0
    assert sequences.prefix(text)[1] == 8
    assert sequences.prefix([*text[:4], 99, 99, 99, 99, 99])[1] == 4
    assert sequences.prefix([99, *text[1:]])[1] == 0
    assert sequences.prefix(text, ("adapter", 1))[1] == 0
    assert sequences.owners.available == 32 - 3
    sequences.close(first)
    assert sequences.prefix(text)[1] == 8


def test_the_last_token_is_always_left_to_be_fed() -> None:
    sequences = Sequences(8, 8, 32, 4)
    fed(sequences, list(range(8)))
    assert sequences.prefix(list(range(8)))[1] == 4
    assert sequences.prefix(list(range(9)))[1] == 8
    assert sequences.prefix([0])[1] == 0
    assert sequences.prefix([])[1] == 0


def test_pages_of_closed_sequences_are_taken_again_least_recently_used_first() -> None:
    sequences = Sequences(8, 4, 4, 4)
    texts = [[n] * 5 for n in range(2)]
    for text in texts:
        sequences.close(fed(sequences, text)[0])
    assert sequences.owners.available == 4
    sequences.close(sequences.prefix(texts[0])[0])  # now texts[1] is the older one
    slot = sequences.open()
    assert sequences.reserve([(slot, 12)]) is not None
    assert [sequences.prefix(text)[1] for text in texts] == [4, 0]


def test_a_page_that_is_written_again_after_a_trim_is_no_longer_found() -> None:
    sequences = Sequences(8, 4, 4, 4)
    slot, _ = fed(sequences, [0, 1, 2, 3, 4])
    sequences.trim(slot, 2)
    assert sequences.prefix([0, 1, 2, 3, 4])[1] == 4  # nobody has written to it yet
    sequences.close(1)
    sequences.reserve([(slot, 1)])
    assert sequences.prefix([0, 1, 2, 3, 4])[1] == 0


def test_a_request_that_was_changed_in_place_is_read_anew() -> None:
    sequences = Sequences(2, 4, 8, 4)
    slot = sequences.open()
    wanted = [(slot, 2)]
    requests, lengths = [], []
    for count in (2, 2, 3):
        wanted[0] = (slot, count)
        reserved = sequences.reserve(wanted)
        assert reserved is not None
        requests.append(reserved.request)
        lengths.append(reserved.request.buffers.lengths.tolist())
    assert requests[0] is requests[1] is not requests[2]
    assert lengths == [[2], [4], [7]]


def test_a_refused_request_isnt_taken_for_the_one_before() -> None:
    sequences = Sequences(2, 4, 8, 4)
    slots = sequences.open(), sequences.open()
    wanted = [(slots[0], 1)]
    sequences.reserve(wanted)
    with pytest.raises(ArgumentTypeError, match="must be a list of"):
        sequences.reserve({slots[1]: 2})  # type: ignore[arg-type]
    sequences.reserve(wanted)
    assert [sequences.length(slot) for slot in slots] == [2, 0]


@pytest.mark.parametrize("way", ["trim", "fork"])
def test_other_tokens_behind_a_common_beginning_are_found_as_what_they_are(way: str) -> None:
    sequences = Sequences(8, 8, 32, 4)
    text, other = list(range(12)), [0, 1, 2, 3, *range(50, 58)]
    slot, _ = fed(sequences, text)
    if way == "trim":
        sequences.trim(slot, 5)
    else:
        slot = sequences.open(slot, 5)
    sequences.reserve([(slot, 7)])
    sequences.commit(slot, other)
    assert sequences.prefix([*other, 9])[1] == 12
    assert sequences.prefix([*text[:8], *other[8:], 9])[1] == (4 if way == "trim" else 8)


def test_the_last_of_two_forks_that_write_to_a_page_keeps_it() -> None:
    sequences = Sequences(2, 4, 3, 4)
    a = sequences.open()
    sequences.reserve([(a, 6)])
    b = sequences.open(a)
    reserved = sequences.reserve([(b, 1), (a, 1)])
    assert reserved is not None and len(reserved.copies) == 1
    assert sequences.owners.owners == [1 + 1, 1, 1]


def test_a_step_that_lacks_a_page_changes_nothing() -> None:
    sequences = Sequences(2, 4, 2, 4)
    a, b = sequences.open(), sequences.open()
    sequences.reserve([(a, 4)])
    assert sequences.reserve([(a, 1), (b, 1)]) is None
    assert (sequences.length(a), sequences.length(b)) == (4, 0)
    assert sequences.owners.available == 1
    assert sequences.reserve([]) is not None


WRONG: dict[str, tuple[Callable[[Sequences], Any], type[Exception], str]] = {
    "slot twice": (lambda s: s.reserve([(0, 1), (0, 1)]), ArgumentError, "slot 0 is there twice"),
    "closed slot": (lambda s: s.reserve([(1, 1)]), ArgumentError, "slot 1 is not open"),
    "closed slot, no tokens": (lambda s: s.reserve([(1, 0)]), ArgumentError, "slot 1 is not"),
    "negative slot": (lambda s: s.reserve([(-1, 1)]), ArgumentError, "slot -1 is not open"),
    "slot too large": (lambda s: s.reserve([(9, 1)]), ArgumentError, "slot 9 is not open"),
    "negative tokens": (lambda s: s.reserve([(0, -1)]), ArgumentError, "at least 0, got -1"),
    "huge count": (lambda s: s.reserve([(0, 2**40)]), ArgumentError, "new tokens must be at most"),
    "many tokens": (lambda s: s.reserve([(0, 17)]), ArgumentError, "must be at most 16.*got 17"),
    "too long": (lambda s: s.reserve([(0, 12)]), ArgumentError, "width 4 holds 16.*wider"),
    "not pairs": (lambda s: s.reserve([0, 1]), ArgumentTypeError, r"must hold \(slot, new"),
    "no list": (lambda s: s.reserve(3), ArgumentTypeError, "must be a list of"),
    "dict": (lambda s: s.reserve({0: 1}), ArgumentTypeError, "must be a list of.*got dict"),
    "text": (lambda s: s.reserve([("0", 1)]), ArgumentTypeError, "slot must be an int, got str"),
    "float": (lambda s: s.reserve([(0, 1.0)]), ArgumentTypeError, "new tokens must be an int"),
    "trim upward": (lambda s: s.trim(0, 6), ArgumentError, "at most that of the sequence, 5"),
    "trim below 0": (lambda s: s.trim(0, -1), ArgumentError, "trim: length must be at least 0"),
    "trim closed": (lambda s: s.trim(1, 0), ArgumentError, "trim: slot 1 is not open"),
    "close twice": (lambda s: s.close(1), ArgumentError, "close: slot 1 is not open"),
    "length of closed": (lambda s: s.length(1), ArgumentError, "length: slot 1 is not open"),
    "fork of closed": (lambda s: s.open(1), ArgumentError, "open: fork_of: slot 1 is not"),
    "fork too long": (lambda s: s.open(0, 6), ArgumentError, "at most that of fork_of, 5"),
    "length alone": (lambda s: s.open(length=3), ArgumentError, "Give both, or neither"),
    "few tokens": (lambda s: s.commit(0, [1, 2]), ArgumentError, "all of the sequence, 5, got 2"),
    "commit closed": (lambda s: s.commit(1, []), ArgumentError, "commit: slot 1 is not open"),
    "text of tokens": (
        lambda s: s.commit(0, ["a"] * 5),  # type: ignore[list-item]
        ArgumentTypeError,
        "tokens must be ints",
    ),
    "large tokens": (lambda s: s.commit(0, [2**64] * 5), ArgumentError, "must fit 64 bits"),
    "text as salt": (lambda s: s.prefix([1], "me"), ArgumentTypeError, "must be a tuple of ints"),
    "object as salt": (lambda s: s.prefix([1], (s,)), ArgumentTypeError, "got Sequences"),
}


@pytest.mark.parametrize("wrong", [(0, 1.0), (0, True), (False, 1), (0.0, 1)])
def test_a_request_that_equals_the_last_one_must_be_of_ints_too(wrong: Any) -> None:
    sequences = Sequences(2, 4, 8, 4)
    assert sequences.open() == 0
    for _ in range(2):
        with pytest.raises(ArgumentTypeError, match="must be an int, got"):
            sequences.reserve([wrong])
        assert sequences.reserve([(0, 1)]) is not None
    assert sequences.length(0) == 2


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_is_named_and_changes_nothing(name: str) -> None:
    call, error, match = WRONG[name]
    sequences = Sequences(2, 4, 8, 4)
    assert sequences.open() == 0
    sequences.reserve([(0, 5)])
    with pytest.raises(error, match=match):
        call(sequences)
    assert sequences.length(0) == 5
    assert sequences.owners.available == 6
    assert sequences.open() == 1
