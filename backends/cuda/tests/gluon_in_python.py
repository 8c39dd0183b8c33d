"""Simulator that runs a Gluon kernel's own source in Python: one thread per partition, in random
order.

Asynchronous operations, copies by TMA and products by wgmma or tcgen05, happen at a random time
between their issue and the wait for them, and read their operands then. So a missing barrier gives
wrong sums in some order; a barrier at which no thread arrives is reported. Products that one
partition issues happen in that order, as PTX specifies for wgmma and tcgen05. Other programs see
stores by pointers at a random time, or after a barrier of all threads and a release; a load that
may hit L1 returns what was there before the kernel. Shared and tensor memory begin as NaN. All
floats are float64 or numpy's result type: neither rounding nor fences between proxies are
simulated.
"""

from __future__ import annotations

import functools
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime.interpreter import InterpretedFunction

import anyflex_triton.kernel_records
from anyflex_cuda import kernel_records, mask_select_ptx, mod_operations
from anyflex_triton import operations
from anyflex_triton.records import record

__all__ = [
    "Box",
    "NotInSource",
    "Pointer",
    "Stuck",
    "in_numpy",
    "mod_in_python",
    "run_kernel",
    "runs_of",
]

_LIMIT = 20_000
"""Maximum number of consecutive steps without progress of any thread."""


class NotInSource(Exception):
    """Raised where a piece to change is no longer in the kernel."""


class Stuck(AssertionError):
    """Raised where every partition waits, or one raised."""


class Tile(np.ndarray):  # type: ignore[type-arg]
    """A tensor of the kernel."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: object, bitcast: bool = False) -> Tile:
        """Convert without rounding. Two 16-bit values in a word are a complex number, whose lower
        one is the int16."""
        return self.real if dtype == "i16" else self

    def __rshift__(self, count: object) -> Tile:
        """Shift integers, or return the higher of two 16-bit values in a word."""
        if np.iscomplexobj(self):
            assert count == 16
            return self.imag
        return tile(np.right_shift(self, count))

    def permute(self, order: Sequence[int]) -> Tile:
        return self.transpose(order).view(Tile)


def tile(x: object) -> Any:
    return np.asarray(x).view(Tile)


class Box:
    """A descriptor of an array, loaded and stored a box at a time."""

    def __init__(self, array: np.ndarray, shape: Sequence[int], itemsize: int = 2) -> None:
        self.array, self.shape, self.itemsize = array, tuple(shape), itemsize
        self.layout, self.dtype, self.block_shape = None, "of the box", list(shape)

    def bytes(self) -> int:
        return int(np.prod(self.shape)) * self.itemsize

    def _places(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        ends = [min(a + s, n) for a, s, n in zip(at, self.shape, self.array.shape, strict=True)]
        there = tuple(slice(a, max(a, e)) for a, e in zip(at, ends, strict=True))
        here = tuple(slice(0, max(0, e - a)) for a, e in zip(at, ends, strict=True))
        return there, here

    def load(self, at: Sequence[int], memory: np.ndarray) -> None:
        there, here = self._places(at)
        found = np.zeros(self.shape)
        found[here] = self.array[there]
        memory[...] = found

    def store(self, at: Sequence[int], memory: np.ndarray) -> None:
        there, here = self._places(at)
        self.array[there] = memory[here]

    def add(self, at: Sequence[int], memory: np.ndarray) -> None:
        assert min(at) >= 0, "an illegal instruction"
        there, here = self._places(at)
        self.array[there] += memory[here]


class FarBox(Box):
    """A descriptor of any strides, of which only the elements that are loaded or stored must be in
    the memory; and its beginning and each box's first place: an H200 faults at others."""

    def __init__(
        self, memory: np.ndarray, first: int, sizes: Sequence[int], strides: Sequence[int],
        shape: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(memory, shape, memory.itemsize)
        self.first, self.sizes, self.strides = first, sizes, strides
        assert 0 <= first < memory.size, "outside of the memory"

    def _elements(self, at: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the places in memory of a box's elements, and which of them are there."""
        steps = [a + np.arange(length) for a, length in zip(at, self.shape, strict=True)]
        axes = np.meshgrid(*steps, indexing="ij", sparse=True)
        there, places = np.True_, self.first
        for axis, size, stride in zip(axes, self.sizes, self.strides, strict=True):
            there = there & (axis >= 0) & (axis < size)
            places = places + axis * stride
        there, places = np.broadcast_to(there, self.shape), np.broadcast_to(places, self.shape)
        inside = [a * (0 <= a < size) for a, size in zip(at, self.sizes, strict=True)]
        place = self.first + sum(np.multiply(inside, self.strides))
        assert 0 <= place < self.array.size, "outside of the memory"
        assert np.all((places >= 0) & (places < self.array.size) | ~there), "outside of the memory"
        return places, there

    def load(self, at: Sequence[int], memory: np.ndarray) -> None:
        places, there = self._elements(at)
        memory[...] = np.where(there, self.array[np.where(there, places, 0)], 0.0)

    def store(self, at: Sequence[int], memory: np.ndarray) -> None:
        places, there = self._elements(at)
        self.array[places[there]] = memory[there]


class Pointer:
    """Pointers to elements of an array."""

    dtype = SimpleNamespace(element_ty=None)

    def __init__(self, array: np.ndarray, at: Any = 0) -> None:
        # The array keeps its identity: see `Device.stored`.
        self.array, self.at = array if array.ndim == 1 else array.reshape(-1), at

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.at)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.at + offset)


class Shared:
    """Shared memory, or a view of it. Values stored as one type read as NaN in another, unless TMA
    loaded them. Sizes aren't compared."""

    def __init__(
        self,
        array: np.ndarray,
        dtype: object,
        others: dict[int, np.ndarray] | None = None,
        first: np.ndarray | None = None,
    ) -> None:
        self.array, self.dtype = array, dtype
        # others: views as another type, by where they begin. first: the original of such a view.
        self.others: dict[int, np.ndarray] = {} if others is None else others
        self.first = first

    def _view(self, array: np.ndarray) -> Shared:
        return Shared(array, self.dtype, self.others, self.first)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def index(self, i: int) -> Shared:
        return self._view(self.array[i])

    def reshape(self, shape: Sequence[int]) -> Shared:
        view = self.array.view()
        view.shape = tuple(shape)  # never a copy
        return self._view(view)

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(self.array.transpose(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        places = [slice(None)] * self.array.ndim
        places[dim] = slice(start, start + length)
        return self._view(self.array[tuple(places)])

    def _reinterpret(self, dtype: object, shape: Sequence[int], layout: object) -> Any:
        if dtype == "i32":
            return Words(self.array)
        if len(shape) > 4:
            return Pieces(self, shape)
        other = self.others.setdefault(_begins(self.array), np.full(shape, np.nan))
        assert other.shape == tuple(shape), "one other type a place"
        return Shared(other, dtype, self.others, self.array)

    def load(self, layout: object) -> Any:
        return tile(self.array.copy())

    def store(self, x: Any) -> None:
        assert x.shape == self.array.shape
        self.array[...] = x
        same = self.others.get(_begins(self.array)) if self.first is None else self.first
        if same is not None:
            same[...] = np.nan


class Pieces:
    """Shared memory of rows, seen as pieces of fewer columns and rows: those of a slot's first
    columns come first."""

    def __init__(self, whole: Shared, shape: Sequence[int]) -> None:
        count, *_, self.rows, self.columns = shape
        self.whole = whole
        slots, _, _, rows, columns = whole.shape
        self.down, self.beside = rows // self.rows, columns // self.columns
        assert count == slots * self.down * self.beside

    def index(self, i: int) -> Shared:
        beside, down = divmod(int(i), self.down)
        slot, beside = divmod(beside, self.beside)
        rows = slice(down * self.rows, (down + 1) * self.rows)
        columns = slice(beside * self.columns, (beside + 1) * self.columns)
        return Shared(self.whole.array[slot : slot + 1, :, :, rows, columns], self.whole.dtype)


class Words:
    """Shared memory of numbers in 8 bits, seen as words of four: an object each, a tuple."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def index(self, i: int) -> Words:
        return Words(self.array[i])

    def reshape(self, shape: Sequence[int]) -> Words:
        return Words(self.array.reshape(*shape, 4))

    def load(self, layout: object) -> Any:
        found = np.empty(self.array.shape[:-1], object)
        for at in np.ndindex(found.shape):
            found[at] = tuple(self.array[at])
        return tile(found)


def _begins(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class TensorMemory:
    """Tensor memory of sm_100, or a view of it: columns of 32 bits, or of 16, two to one of those.
    Values written as one kind read as NaN in the other."""

    def __init__(
        self, words: np.ndarray, halves: np.ndarray, begin: int, length: int, *, narrow: bool
    ) -> None:
        self.words, self.halves = words, halves
        self.begin, self.length, self.narrow = begin, length, narrow

    def index(self, i: int) -> TensorMemory:
        return TensorMemory(self.words[i], self.halves[i], 0, self.length, narrow=False)

    def _reinterpret(self, dtype: object, shape: Sequence[int], layout: object) -> TensorMemory:
        assert not self.narrow and shape[-1] == 2 * self.length
        return TensorMemory(self.words, self.halves, 2 * self.begin, shape[-1], narrow=True)

    def slice(self, start: int, length: int) -> TensorMemory:
        assert start + length <= self.length
        return TensorMemory(
            self.words, self.halves, self.begin + start, length, narrow=self.narrow
        )

    def load(self, layout: object = None) -> Any:
        columns = slice(self.begin, self.begin + self.length)
        return tile((self.halves if self.narrow else self.words)[:, columns].copy())

    def store(self, x: Any) -> None:
        assert x.shape == (self.words.shape[0], self.length)
        end = self.begin + self.length
        if self.narrow:
            self.halves[:, self.begin : end] = x
            self.words[:, self.begin // 2 : -(-end // 2)] = np.nan
        else:
            self.words[:, self.begin : end] = x
            self.halves[:, 2 * self.begin : 2 * end] = np.nan


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def check(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.count and self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class Bars:
    def __init__(self, count: int) -> None:
        self.bars = [Barrier() for _ in range(count)]
        self.shape = (count, 1)

    def index(self, i: int) -> Barrier:
        return self.bars[i]


class Product:
    """An accumulator that a product in flight will fill."""

    value: Any = None


class Threads:
    """Scheduler that lets one thread run at a time, drawn at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turns: dict[threading.Thread, threading.Semaphore] = {}
        self.idle = 0
        self.failed: BaseException | None = None
        self.lock = threading.Lock()

    def spawn(self, work: Callable[[], None]) -> threading.Thread:
        def whole() -> None:
            turn = self.turns[threading.current_thread()]
            turn.acquire()
            try:
                if self.failed is None:
                    work()
            # The error is raised where the kernel was started.
            except BaseException as error:  # noqa: BLE001
                self.failed = self.failed or error
            finally:
                self.idle = 0
                del self.turns[threading.current_thread()]
                self._pass_on()

        thread = threading.Thread(target=whole, daemon=True)
        self.turns[thread] = threading.Semaphore(0)
        thread.start()
        return thread

    def _pass_on(self) -> None:
        if self.turns:
            self.random.choice(list(self.turns.values())).release()

    def step(self, got_on: bool) -> None:
        """Let another thread run, with some probability."""
        self.idle = 0 if got_on else self.idle + 1
        if self.idle > _LIMIT:
            self.failed = self.failed or Stuck("every partition waits")
        if self.failed is not None:
            raise Stuck("another partition failed, or all wait") from self.failed
        mine = self.turns[threading.current_thread()]
        # Switching threads is slow, so it is rare, but certain for a thread that waits.
        if not got_on or self.random.random() < 0.3:
            self._pass_on()
            mine.acquire()


class Device:
    """Simulated device: implementations of the names that a kernel uses."""

    def __init__(self, seed: int, programs: int) -> None:
        self.threads = Threads(seed)
        self.programs = programs
        self.own = threading.local()
        self.named: dict[tuple[int, int], list[Any]] = {}
        # Map from the id of an array to its previous contents and the program that has written
        # each element.
        self.stored: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        kinds = ("loads", "stores", "products", "tensor products")
        # Probability that an operation in flight happens now. Some devices are slow.
        self.chances = {kind: self.threads.random.choice((0.3, 0.3, 0.02)) for kind in kinds}

    # Asynchronous work

    def _queue(self, kind: str) -> list[Callable[[], None]]:
        queues = self.own.__dict__.setdefault("queues", {})
        found: list[Callable[[], None]] = queues.setdefault(kind, [])
        return found

    def _issue(self, kind: str, work: Callable[[], None]) -> None:
        self._queue(kind).append(work)
        self._some()

    def _some(self, got_on: bool = True) -> None:
        """Let some of the operations in flight happen."""
        for kind, chance in self.chances.items():
            queue = self._queue(kind)
            while queue and self.threads.random.random() < chance:
                # Copies overtake each other.
                copies = not kind.endswith("products")
                queue.pop(self.threads.random.randrange(len(queue)) if copies else 0)()
                got_on = True
        self.threads.step(got_on)

    def _drain(self, kind: str, left: int) -> None:
        queue = self._queue(kind)
        while len(queue) > left:
            queue.pop(0)()
        self._some()

    # Global memory, by pointers

    def _stores(self, kind: str) -> list[tuple[np.ndarray, Any, Any]]:
        """Return this partition's stores: "own" since its last barrier of all threads, "met"
        before it."""
        found: list[Any] = self.own.__dict__.setdefault("stores", {}).setdefault(kind, [])
        return found

    def thread_barrier(self) -> None:
        self._stores("met").extend(self._stores("own"))
        self._stores("own").clear()

    def debug_barrier(self) -> None:
        """Barrier of a kernel without partitions, whose threads read what others have stored."""
        self.thread_barrier()
        self._show_stores()

    def _show_stores(self, kind: str = "met") -> None:
        """Make this partition's stores visible to other programs."""
        for array, at, x in self._stores(kind):
            if id(array) not in self.stored:
                self.stored[id(array)] = array.copy(), np.full(array.shape, -1)
            array[at] = x
            self.stored[id(array)][1][at] = self.own.program
        self._stores(kind).clear()

    def store(self, pointer: Pointer, x: Any, mask: Any = True) -> None:
        at, x, mask = np.broadcast_arrays(pointer.at, x, mask)
        self._stores("own").append((pointer.array, at[mask], x[mask]))
        if self.threads.random.random() < 0.5:
            self.thread_barrier()
            self._show_stores()

    def load(
        self, pointer: Pointer, mask: Any = True, other: Any = 0, cache_modifier: str = "",
        volatile: bool = False,
    ) -> Any:  # fmt: skip
        for kind in ("met", "own"):
            if any(array is pointer.array for array, _, _ in self._stores(kind)):
                self._show_stores(kind)
        at = np.where(mask, pointer.at, 0)
        assert np.min(at) >= 0, "a load before its tensor"
        found = pointer.array[at]
        if id(pointer.array) in self.stored and not (cache_modifier == ".cg" or volatile):
            before, writers = self.stored[id(pointer.array)]
            others = (writers[at] >= 0) & (writers[at] != self.own.program)
            found = np.where(others, before[at], found)
        found = np.where(mask, found, other)
        return tile(found) if found.ndim else found.item()

    def _atomic(self, pointer: Pointer, sem: str) -> int:
        """Return the word's value, which doesn't change until another thread runs."""
        if sem == "acq_rel":
            self._show_stores()
        self._some()
        return int(pointer.array[pointer.at])

    def atomic_add(self, pointer: Pointer, x: int, sem: str) -> int:
        before = self._atomic(pointer, sem)
        pointer.array[pointer.at] = before + x
        return before

    def atomic_cas(self, pointer: Pointer, compared: int, x: int, sem: str) -> int:
        before = self._atomic(pointer, sem)
        if before == compared:
            pointer.array[pointer.at] = x
        return before

    # mbarrier

    def wait(self, barrier: Barrier, parity: int, pred: bool = True) -> None:
        self._some()
        while pred and barrier.phase & 1 == parity:
            self._some(False)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        barrier.pending -= count
        barrier.check()
        self._some()

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.bytes += size
        barrier.pending -= 1
        barrier.check()
        self._some()

    # Copies by pointers to shared memory

    def async_copy(self, memory: Shared, pointer: Pointer, mask: Any) -> None:
        at = np.where(mask, pointer.at, 0)
        assert np.min(at) >= 0 and np.max(at) < pointer.array.size, "outside of the memory"

        def work() -> None:
            memory.store(np.where(mask, pointer.array[at], 0.0))

        self.own.__dict__.setdefault("copies", []).append(work)

    def arrive_after_copies(self, barrier: Barrier, increment_count: bool) -> None:
        """Let a warp's threads arrive when its earlier copies are done."""
        assert not increment_count
        copies = self.own.__dict__.pop("copies")

        def work() -> None:
            for copy in copies:
                copy()
            barrier.pending -= 32
            barrier.check()

        self._issue("loads", work)

    # TMA

    def async_load(self, box: Box, at: Sequence[int], barrier: Barrier, memory: Shared) -> None:
        at = [int(a) for a in at]

        def work() -> None:
            box.load(at, memory.array)
            barrier.bytes -= box.bytes()
            barrier.check()

        self._issue("loads", work)

    def async_store(self, box: Box, at: Sequence[int], memory: Shared) -> None:
        at = [int(a) for a in at]
        self._issue("stores", lambda: box.store(at, memory.array))

    def async_atomic_add(self, box: Box, at: Sequence[int], memory: Shared) -> None:
        at = [int(a) for a in at]
        self._issue("stores", lambda: box.add(at, memory.array))

    # wgmma

    def mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        product = Product()

        def work() -> None:
            left = a.array if isinstance(a, Shared) else a
            found = np.asarray(left) @ b.array
            before = acc.value if isinstance(acc, Product) else acc
            product.value = tile(found + np.asarray(before) if use_acc else found)

        self._issue("products", work)
        assert is_async
        return product

    def mma_wait(self, num_outstanding: int, deps: tuple[Any, ...]) -> Any:
        self._drain("products", num_outstanding)
        values = tuple(dep.value if isinstance(dep, Product) else dep for dep in deps)
        assert all(x is not None for x in values), "a product is used that nobody waited for"
        return values if len(values) > 1 else values[0]

    # tcgen05

    def tensor_mma(self, a: Any, b: Shared, acc: TensorMemory, *, use_acc: bool = True) -> None:
        def work() -> None:
            left = a.array if isinstance(a, Shared) else a.load()
            found = np.asarray(left) @ b.array
            acc.store(acc.load() + found if use_acc else found)

        self._issue("tensor products", work)

    def tensor_memory(self, dtype: object, shape: Sequence[int], layout: object) -> TensorMemory:
        words, halves = np.full(shape, np.nan), np.full((*shape[:-1], 2 * shape[-1]), np.nan)
        return TensorMemory(words, halves, 0, shape[-1], narrow=False)

    def tensor_commit(self, barrier: Barrier) -> None:
        """Arrive at a barrier when everything issued before is done."""

        def work() -> None:
            barrier.pending -= 1
            barrier.check()

        self._issue("tensor products", work)

    # Barriers of the hardware

    def assembly(self, text: str, constraints: str, operands: Sequence[Any], **_: Any) -> Any:
        """Return the result of inline PTX. A barrier of several partitions returns its first
        operand after the wait; a vote whether to multiply, the product of both; rounding to 16
        bits, both in one word, here a complex number; predicates, what `chosen` returns;
        conversion of words of four numbers, these; a counter's increment, its value before."""
        if "atom." in text:
            pointer, takes = operands
            found = np.zeros(len(takes), int)
            for lane in np.flatnonzero(takes):
                found[lane] = self.atomic_add(Pointer(pointer.array, pointer.at[lane]), 1, "")
            return tile(found)
        if constraints == "=r,=r,=r,=r,r,r":
            (words,) = operands
            zero = (0.0,) * 4
            numbers = np.array([word or zero for word in words.ravel()], float)
            if "0x5140" not in text:
                # Registers have two numbers of one word: `stored_operands.converted`.
                numbers = numbers.reshape(-1, 4, 2).transpose(0, 2, 1)
            return tuple(tile(x.reshape(words.shape)) for x in numbers.reshape(-1, 4).T)
        if "selp.f32 $0" in text:
            return chosen(text, operands)
        if text.startswith("cvt.rn."):
            words = np.empty(operands[0].shape, complex)
            words.real, words.imag = operands
            return tile(words)
        found = re.match(r"bar\.(sync|arrive) \$1, (\d+);", text)
        assert found or "bar" not in text
        if found:
            (threads,), (number, *rest) = operands[0].shape, set(operands[0].tolist())
            assert not rest and 8 <= number < 16, "one of those that Triton leaves free"
            self._named_barrier(found[1] == "sync", number, threads, int(found[2]))
        return operands[0] * operands[1] if "vote" in text else operands[0]

    def _named_barrier(self, waits: bool, number: int, threads: int, wanted: int) -> None:
        # state: number of threads by partition that has arrived, and number of completed phases.
        state = self.named.setdefault((self.own.program, number), [{}, 0])
        here, generation = state
        assert threading.current_thread() not in here, "a partition arrives twice"
        here[threading.current_thread()] = threads
        assert sum(here.values()) <= wanted, "more arrive than are waited for"
        if sum(here.values()) == wanted:
            state[:] = {}, generation + 1
        self._some()
        while waits and state[1] == generation:
            self._some(False)

    # Programs

    def end(self) -> None:
        """End a program: its stores become visible some time later."""
        while self.threads.random.random() < 0.9:
            self._some()
        self.thread_barrier()
        self._show_stores()

    def warp_specialize(self, partitions: Sequence[Any], *_: object) -> None:
        program = self.own.program

        def start(function: Any, arguments: tuple[Any, ...]) -> None:
            self.own.program = program
            function(*arguments)
            self.end()
            for kind in ("loads", "stores", "products"):
                # A kernel must not end before its stores and products are complete; loads may be
                # in flight.
                assert kind == "loads" or not self._queue(kind), f"{kind} in flight at the end"
                self._drain(kind, 0)
            # Another partition may wait for these products.
            self._drain("tensor products", 0)

        workers = [self.threads.spawn(lambda f=f, a=a: start(f, a)) for f, a in partitions]
        while any(worker in self.threads.turns for worker in workers):
            # Earlier loads may complete meanwhile.
            self._some(False)
        if self.threads.failed is None:
            left = [key for key, (here, _) in self.named.items() if here and key[0] == program]
            assert not left, "barriers half full at the end"

    def language(self) -> SimpleNamespace:
        """Return a stand-in for `triton.experimental.gluon.language`."""

        def shared(dtype: object, shape: Sequence[int], layout: object) -> Any:
            if layout == "barrier":
                return Bars(shape[0]) if len(shape) == 2 else Barrier()
            return Shared(np.full(shape, np.nan), dtype)

        def plain(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*arguments: Any) -> Any:
                found = function(*arguments)
                return tile(found) if np.ndim(found) else found.item()

            return called

        def larger(x: Any, y: Any, propagate_nan: str | None = None) -> Any:
            return plain(np.maximum if propagate_nan == "all" else np.fmax)(x, y)

        # Like the device's maximum, this ignores NaN.
        def maximum(x: Any, axis: int) -> Any:
            found = np.fmax.reduce(x, axis=axis)
            if np.ndim(found):
                return tile(found)
            # Shared memory has integers as floats.
            return int(found) if float(found).is_integer() else found.item()

        def total(x: Any, axis: int) -> Any:
            found = np.sum(x, axis=axis)
            return tile(found) if np.ndim(found) else found.item()

        def scan(x: Any, axis: int, combine: Callable[..., Any]) -> Any:
            assert axis == 0
            found = x.copy()
            for i in range(1, len(x)):
                found[i] = combine(found[i - 1], x[i])
            return found

        nothing = lambda *_, **__: None  # noqa: E731
        shared_layout = SimpleNamespace(get_default_for=nothing)
        return SimpleNamespace(
            constexpr=lambda x: x, float16="f16", bfloat16="bf16", float32="f32", int1="i1",
            uint8="u8", int8="i8", int16="i16", int32="i32", int64="i64", float64="f64",
            static_assert=nothing,
            multiple_of=lambda x, values: x,
            split=lambda x: (x[..., 0], x[..., 1]), join=lambda x, y: tile(np.stack([x, y], -1)),
            static_range=range, to_tensor=lambda x: x, cdiv=lambda x, y: -(-x // y),
            program_id=lambda _: self.own.program, num_programs=lambda _: self.programs,
            arange=lambda a, b, layout=None: tile(np.arange(a, b)),
            full=lambda shape, x, dtype, layout=None: tile(np.full(shape, x)),
            expand_dims=lambda x, axis: tile(np.expand_dims(x, axis)),
            gather=lambda x, at, axis: tile(np.take_along_axis(x, at, axis)),
            broadcast_to=plain(np.broadcast_to),
            convert_layout=lambda x, layout, **_: x, cast=lambda x, dtype: x,
            max=maximum, sum=total, PropagateNan=SimpleNamespace(ALL="all"),
            associative_scan=scan, cumsum=plain(np.cumsum),
            reduce=lambda x, axis, combine: functools.reduce(combine, np.moveaxis(x, axis, 0)),
            minimum=plain(np.fmin), maximum=larger, where=plain(np.where),
            exp2=plain(np.exp2), log2=plain(np.log2), abs=plain(np.abs), floor=plain(np.floor),
            fma=plain(lambda x, y, z: x * y + z),
            load=self.load, store=self.store, atomic_add=self.atomic_add,
            atomic_cas=self.atomic_cas, allocate_shared_memory=shared,
            inline_asm_elementwise=self.assembly,
            thread_barrier=self.thread_barrier, debug_barrier=self.debug_barrier,
            warp_specialize=self.warp_specialize,
            NVMMASharedLayout=shared_layout,
            **dict.fromkeys(
                ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout",
                 "SwizzledSharedLayout", "DistributedLinearLayout"),
                nothing,
            ),
        )  # fmt: skip


def chosen(text: str, operands: Sequence[Any]) -> Any:
    """Return the result of PTX that sets predicates and selects by one of them."""
    values: dict[str, Any] = {f"${i}": x for i, x in enumerate(np.broadcast_arrays(*operands), 1)}
    values["0fFF800000"] = -np.inf
    compare = {
        "eq": np.equal, "neu": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal,
        # False where one is NaN.
        "ne": lambda x, y: (x != y) & (x == x) & (y == y),
    }  # fmt: skip
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    declared, *lines = re.sub(r"[{}]", "", text).strip().rstrip(";").split(";")
    assert re.fullmatch(r"\s*\.reg \.pred [p\dful, ]+", declared), declared
    for line in lines:
        operation, *names = line.replace(",", " ").split()
        kind, *rest = operation.split(".")
        given = [values[name] if name in values else int(name) for name in names[1:]]
        if kind == "setp":
            kinds = {"s32": np.int32, "s64": np.int64, "f32": np.float32, "f64": np.float64}
            typed = [np.asarray(x).astype(kinds[rest[1]]) for x in given]
            for x, y in zip(given, typed, strict=True):
                np.testing.assert_array_equal(np.asarray(x), y, "a register is too small")
            values[names[0]] = compare[rest[0]](*typed)
        elif kind == "not":
            values[names[0]] = np.logical_not(*given)
        elif kind == "selp":
            assert names[0] == "$0"
            return tile(np.where(given[2], given[0], given[1]))
        else:
            values[names[0]] = join[kind](*given)
    raise AssertionError(f"nothing is chosen: {text}")


def in_numpy(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch's values as `run_kernel` takes them: boxes for descriptors, and for tensors
    pointers into their memory, in any order of dimensions."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "block_shape") and max(value.shape) >= 1 << 30:
            tensor = value.base
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            memory = tensor.as_strided((count,), (1,), 0).numpy()
            given[name] = FarBox(
                memory, tensor.storage_offset(), value.shape, value.strides, value.block_shape
            )
        elif hasattr(value, "block_shape"):
            array = _known(value.base).numpy()
            strides = [stride * array.itemsize for stride in value.strides]
            view = np.lib.stride_tricks.as_strided(array, value.shape, strides)
            given[name] = Box(view, value.block_shape, value.base.element_size())
        elif isinstance(value, Tensor):
            given[name] = _pointer_to(value)
        elif isinstance(value, tuple):
            given[name] = tuple(_pointer_to(x) if isinstance(x, Tensor) else x for x in value)
        else:
            given[name] = value
    return given


def _pointer_to(tensor: Tensor) -> Pointer:
    memory = tensor.untyped_storage().nbytes() // tensor.element_size()
    count = memory - tensor.storage_offset()
    return Pointer(_known(tensor.detach().as_strided((count,), (1,))).numpy())


def _known(tensor: Tensor) -> Tensor:
    """Return a tensor in a type that numpy knows, with its strides: a copy where it doesn't."""
    return tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor


_HELD = {
    "i1": np.bool_, "i8": np.int8, "u8": np.uint8, "i16": np.int16, "i32": np.int32,
    "i64": np.int64, "f32": np.float32, "f64": np.float64,
}  # fmt: skip


def mod_in_python(function: Any, held: bool = False) -> Callable[..., Any]:
    """Return a function of a module of mods for Gluon, as `run_kernel` takes it.

    Args:
        held: whether values are rounded to the types that they are cast to.
    """
    # No shared device is needed: no kernel writes what mods read, or reads what they add to.
    language = Device(0, 1).language()
    if held:
        language.cast = lambda x, dtype: tile(np.atleast_2d(x).astype(_HELD[dtype]))
    ours = {"tl": language, "bound": lambda size, index: size}
    ops = _in_python(vars(operations), ours)
    of_gluon = _in_python(vars(mod_operations), {"tl": language, "gl": language, "ROWS": 64})
    ours_of_gluon = {
        **of_gluon,
        "full": lambda shape, x, dtype: x,
        "spread": lambda x, score: tile(np.broadcast_to(x, score.shape)),
        "load_once": lambda pointers, inside: language.load(pointers, inside),
        "along": _along,
        "accumulate": _accumulate,
        "add_dense": _add_dense,
    }
    names = {
        "tl": language,
        "ops": SimpleNamespace(**ops),
        "mod_operations": SimpleNamespace(**ours_of_gluon),
        "mask_select_ptx": SimpleNamespace(**_in_python(vars(mask_select_ptx), {"gl": language})),
    }
    found: Callable[..., Any] = _in_python(function.fn.__globals__, names)[function.fn.__name__]
    return found


def mask_scores_of(mask_mod: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a mask mod in numpy in the form of `anyflex_triton.mods.mask_scores_source`."""
    if mask_mod is None:
        return None

    def mask_scores(scores: Any, full: Any, first: Any, columns: Any, *indices: Any) -> Any:
        live = mask_mod(*indices[:4])
        return tile(np.where(live if full is None else live | bool(full), scores, -np.inf))

    return mask_scores


def _in_python(module: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's names, with Python functions in place of Triton's.

    Args:
        names: replacements by name.
    """
    found = {**module, **names}
    for name, value in found.items():
        if isinstance(value, JITFunction | InterpretedFunction):
            found[name] = FunctionType(value.fn.__code__, found, name)
        elif hasattr(value, "__triton_aggregate__"):
            found[name] = value.plain
    return found


def _along(x: Any, index: Any) -> Any:
    if np.ndim(x) != 1:
        return x
    return tile(np.expand_dims(x, 0 if index.shape[0] == 1 else 1))


def _accumulate(
    totals: Sequence[Pointer], learned: int, offset: Any, inside: Any, value: Any, live: Any,
    sums: str,
) -> None:  # fmt: skip
    assert sums == "floats"
    total = totals[learned]
    at = np.broadcast_to(total.at + offset, value.shape)
    np.add.at(total.array, at, np.where(live & inside, value, 0))


def _add_dense(
    rows: Pointer, first_kv: int, length: int, value: Any, live: Any, count: int
) -> None:  # fmt: skip
    keys = np.arange(count)[:, None]
    at = rows.at + first_kv + keys
    there = np.broadcast_to(keys < length - first_kv, value.shape)
    np.add.at(rows.array, at[there], np.where(live, value, 0)[there])


def run_kernel(
    module: ModuleType,
    name: str,
    programs: int,
    arguments: dict[str, Any],
    seed: int,
    changed: tuple[str, str] = ("", ""),
    more: Sequence[ModuleType] = (),
    given: Mapping[str, Any] | None = None,
) -> None:
    """Run `programs` programs of a kernel.

    Args:
        module: module whose source is run, with replacements for what it imports.
        name: name of the kernel.
        arguments: arguments by name: a `Box` for a descriptor, a `Pointer`, numbers, functions of
            `Tile`.
        seed: seed of the order of events.
        changed: a piece of the source, and its replacement.
        more: modules of functions that the kernel calls, each before the modules that call it.
        given: other imported objects by name.

    Raises:
        NotInSource: the piece isn't in the source.
        Stuck: the partitions wait for each other, or one raised, which is the cause.
    """
    device = Device(seed, programs)
    records = (anyflex_triton.kernel_records, kernel_records)
    bodies = [(source, _body_of(source)) for source in (*records, *more, module)]
    if not any(changed[0] in body for _, body in bodies):
        raise NotInSource(changed[0])

    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    names: dict[str, Any] = {
        "gl": device.language(),
        "gluon": SimpleNamespace(jit=lambda function: function),
        "triton": SimpleNamespace(jit=lambda function: function, constexpr_function=lambda f: f),
        "record": lambda cls: record(cls).plain, "Any": Any,
        "mbarrier": SimpleNamespace(
            wait=device.wait, arrive=device.arrive, expect=device.expect, init=init,
            MBarrierLayout=lambda: "barrier",
        ),
        "tma": SimpleNamespace(
            async_load=device.async_load, async_store=device.async_store,
            async_atomic_add=device.async_atomic_add,
            store_wait=lambda pendings: device._drain("stores", pendings),
        ),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=device.async_copy,
            mbarrier_arrive=device.arrive_after_copies,
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": device.mma, "warpgroup_mma_wait": device.mma_wait,
        "mma_v2": lambda a, b, acc: tile(np.asarray(a, float) @ np.asarray(b, float) + acc),
        "TensorMemoryLayout": lambda *_, **__: None,
        "allocate_tensor_memory": device.tensor_memory,
        "shared_memory_descriptor": Shared,
        "tcgen05_mma": device.tensor_mma, "tcgen05_commit": device.tensor_commit,
        **(given or {}),
    }  # fmt: skip
    names["tl"] = names["gl"]
    for source, body in bodies:
        text = body.replace(*changed) if changed[0] else body
        exec(compile(text, source.__file__ or "", "exec", flags=_ANNOTATIONS), names)

    def start(program: int) -> None:
        device.own.program = program
        names[name](**arguments)
        device.end()

    # Threads start only when all exist.
    with np.errstate(all="ignore"):
        for program in range(programs):
            device.threads.spawn(lambda program=program: start(program))
        workers = list(device.threads.turns)
        device.threads._pass_on()
        for worker in workers:
            worker.join()
    if device.threads.failed is not None:
        raise Stuck(f"with seed {seed}") from device.threads.failed


def runs_of(blocks: np.ndarray, generator: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Return (offsets [B', H', rows + 1], runs [n, 3]) of kinds of blocks [B', H', rows, columns],
    0 for unlisted."""
    offsets, runs = [], []
    for row in blocks.reshape(-1, blocks.shape[-1]):
        offsets.append(len(runs))
        begin = 0
        while begin < len(row):
            end = begin + 1
            # A run may also end before the kind changes.
            while end < len(row) and row[end] == row[begin] and generator.random() < 0.9:
                end += 1
            if row[begin]:
                runs.append((begin, end, row[begin]))
            begin = end
    rows = blocks.shape[2]
    starts = np.array([*offsets, len(runs)])
    # Each head has one offset more than rows, because a row ends where the next begins, also a
    # head's last.
    found = [starts[i * rows : (i + 1) * rows + 1] for i in range(len(offsets) // rows)]
    edges = np.array(found).reshape(*blocks.shape[:2], rows + 1)
    return edges, np.array(runs or [(0, 0, 1)])


def _body_of(module: ModuleType) -> str:
    """Return a module's source after its imports."""
    text = Path(module.__file__ or "").read_text()
    return text[text.index("\n__all__") :]


def _annotations() -> int:
    import __future__

    return __future__.annotations.compiler_flag


_ANNOTATIONS = _annotations()
