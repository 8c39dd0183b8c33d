"""Model of the barriers of Hopper's forward: every interleaving of producer and consumers ends,
nothing is overwritten while it is still read, and each key of a row comes once.

The generators below follow `hopper_forward.produce` and `consume` line by line, over random rows
of runs. No GPU is needed, and no Triton.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field

import pytest

FULL, PARTIAL = 1, 2
Run = tuple[int, int, int]
Steps = Generator[None, None, None]


class Barrier:
    """An mbarrier of shared memory."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = 0

    def arrive(self) -> None:
        assert self.pending > 0, "one arrival too many"
        self.pending -= 1
        if self.pending == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return (self.phase & 1) != parity


@dataclass
class Machine:
    """Model of one program.

    Args:
        tiles: row of runs of each tile, in blocks.
        shares: whether out is written to the queries' buffer.
        slots: number of tiles whose queries there is room for.
        early: whether to leave out the wait for the previous tile, for a test of this test.
    """

    tiles: list[list[Run]]
    length: int
    kv_block: int
    block_n: int
    stages: int
    consumers: int
    shares: bool
    slots: int = 1
    early: bool = False
    seen: dict[tuple[int, int], list[tuple[int, int, bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.q_full = [Barrier(1) for _ in range(self.consumers * self.slots)]
        self.k_full = [Barrier(1) for _ in range(self.stages)]
        self.v_full = [Barrier(1) for _ in range(self.stages)]
        self.k_empty = [Barrier(self.consumers) for _ in range(self.stages)]
        self.v_empty = [Barrier(self.consumers) for _ in range(self.stages)]
        self.passed = Barrier(self.consumers)
        self.queries: list[object] = [None] * (self.consumers * self.slots)
        self.keys: list[object] = [None] * self.stages
        self.values: list[object] = [None] * self.stages

    def bounded(self, run: Run) -> tuple[int, int, bool]:
        return (
            run[0] * self.kv_block, min(run[1] * self.kv_block, self.length), run[2] == FULL,
        )  # fmt: skip

    def count(self, runs: list[Run]) -> tuple[int, int]:
        masked = plain = 0
        for begin, end, full in map(self.bounded, runs):
            whole = (end - begin) // self.block_n if full else 0
            plain += whole
            masked += -(-(end - begin) // self.block_n) - whole
        return masked, plain

    def pieces(self, runs: list[Run]) -> list[tuple[int, int, bool]]:
        """Return the loads in order: first key, end, whether FULL."""
        found = []
        for begin, end, full in map(self.bounded, runs):
            first = begin + (end - begin) // self.block_n * self.block_n if full else begin
            found += [(key, end, full) for key in range(first, end, self.block_n)]
        for begin, end, full in map(self.bounded, runs):
            stop = begin + (end - begin) // self.block_n * self.block_n if full else begin
            found += [(key, stop, True) for key in range(begin, stop, self.block_n)]
        return found

    def place(self, turn: int, c: int) -> int:
        return turn % self.slots * self.consumers + c

    def produce(self) -> Steps:
        step = empties = before = previous = 0
        earlier = -1
        stages = self.stages

        def await_tile() -> Steps:
            if self.early:
                return
            if before == 2:
                while not self.passed.passed((empties - 1) & 1):
                    yield
            elif earlier >= 0 and step - earlier <= stages:
                while not self.k_empty[earlier % stages].passed((earlier // stages) & 1):
                    yield

        def load_queries(number: int, counts: tuple[int, int]) -> Steps:
            yield from await_tile()
            for c in range(self.consumers):
                self.queries[self.place(number, c)] = (number, counts)
                self.q_full[self.place(number, c)].arrive()
                yield

        for number, runs in enumerate(self.tiles):
            counts = self.count(runs)
            first_step = step
            earlier = (step if self.slots == 1 else previous) - 1
            previous = step
            for piece in self.pieces(runs):
                slot, phase = step % stages, ((step // stages) & 1) ^ 1
                while not self.k_empty[slot].passed(phase):
                    yield
                self.keys[slot] = (step, piece)
                self.k_full[slot].arrive()
                yield
                if step == first_step:
                    yield from load_queries(number, counts)
                while not self.v_empty[slot].passed(phase):
                    yield
                self.values[slot] = step
                self.v_full[slot].arrive()
                yield
                step += 1
            if step == first_step:
                yield from load_queries(number, counts)
            if self.shares or step == first_step:
                empties, before = empties + 1, 2
            else:
                before = 1
        earlier = (step if self.slots == 1 else previous) - 1
        yield from await_tile()
        for c in range(self.consumers):
            self.queries[self.place(len(self.tiles), c)] = None
            self.q_full[self.place(len(self.tiles), c)].arrive()

    def consume(self, me: int) -> Steps:
        step = turn = 0
        stages = self.stages
        place = me
        while not self.q_full[place].passed(0):
            yield
        while self.queries[place] is not None:
            held = self.queries[place]
            assert isinstance(held, tuple)
            number, (masked, plain) = held
            pieces = self.seen.setdefault((me, number), [])
            for i in range(masked + plain):
                slot, last = step % stages, (step - 1) % stages
                while not self.k_full[slot].passed((step // stages) & 1):
                    yield
                loaded = self.keys[slot]
                assert isinstance(loaded, tuple) and loaded[0] == step
                pieces.append((*loaded[1][:2], i < max(masked, 1)))
                if i:
                    while not self.v_full[last].passed(((step - 1) // stages) & 1):
                        yield
                yield
                # Products read their operands until here.
                assert self.keys[slot] == loaded and self.queries[place] == held
                self.k_empty[slot].arrive()
                yield
                if i:
                    assert self.values[last] == step - 1
                    self.v_empty[last].arrive()
                yield
                step += 1
            if masked + plain:
                slot = (step - 1) % stages
                while not self.v_full[slot].passed(((step - 1) // stages) & 1):
                    yield
                yield
                assert self.values[slot] == step - 1
                self.v_empty[slot].arrive()
            elif not self.shares:
                self.passed.arrive()
            yield
            if self.shares:
                assert self.queries[place] == held
                self.passed.arrive()
            turn += 1
            place = self.place(turn, me)
            while not self.q_full[place].passed((turn // self.slots) & 1):
                yield

    def run(self, chance: random.Random) -> None:
        """Run all threads to their end, in random order."""
        live: dict[int, Steps] = {-1: self.produce()}
        live |= {c: self.consume(c) for c in range(self.consumers)}
        idle = 0
        while live:
            name = chance.choice(list(live))
            for _ in range(chance.choice([1, 1, 2, 5, 20])):
                try:
                    next(live[name])
                except StopIteration:
                    del live[name]
                    idle = 0
                    break
            idle += 1
            assert idle < 20000, f"{sorted(live)} wait for ever"


def drawn_runs(chance: random.Random, blocks: int) -> list[Run]:
    runs, at = [], 0
    while at < blocks and chance.random() < 0.8:
        begin = at + chance.choice([0, 0, 1, 3])
        end = begin + chance.choice([1, 1, 2, 6])
        if end > blocks:
            break
        runs.append((begin, end, chance.choice([FULL, PARTIAL])))
        at = end
    return runs


def machine(chance: random.Random, early: bool = False) -> Machine:
    length = chance.choice([128, 200, 1024, 1000])
    kv_block = chance.choice([64, 96, 128, 256])
    consumers = chance.choice([2, 2, 3])
    tiles = [drawn_runs(chance, -(-length // kv_block)) for _ in range(chance.randint(1, 6))]
    stages, shares = chance.choice([2, 2, 3]), chance.random() < 0.3
    slots = 1 if shares else chance.choice([1, 2])
    return Machine(tiles, length, kv_block, 128, stages, consumers, shares, slots, early)


@pytest.mark.parametrize("part", range(8))
def test_every_interleaving_ends_and_reads_what_was_loaded(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        chance = random.Random(seed)
        made = machine(chance)
        made.run(chance)
        for number, runs in enumerate(made.tiles):
            wanted: list[int] = []
            unmasked: set[int] = set()
            for begin, end, full in map(made.bounded, runs):
                wanted += range(begin, end)
                unmasked |= set(range(begin, end)) if full else set()
            for c in range(made.consumers):
                keys: list[int] = []
                for first, end, masked in made.seen[c, number]:
                    step = range(first, first + made.block_n)
                    # Only masked steps check their end, and dead pairs.
                    keys += [key for key in step if key < end or not masked]
                    assert masked or set(step) <= unmasked
                assert sorted(keys) == wanted


def test_the_test_finds_queries_that_come_too_early() -> None:
    with pytest.raises(AssertionError):
        for seed in range(100):
            chance = random.Random(seed)
            machine(chance, early=True).run(chance)
