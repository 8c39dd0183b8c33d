"""RecordedMod: a mod that can't be traced, as what it did when it was called once.

A user's function would read its closure, globals and attributes again each time: those of a loop's
last turn in backward, and other numbers in a mask's calls than in its blocks. A mod is pure and
can't branch on values, so what it did for one pair it does for all. This is recorded, torch
function by torch function, with the tensors and the numbers that were read, and is what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from anyflex.errors import ArgumentError, ModIndexError
from anyflex.mod_graph.calling import functorch_level
from anyflex.mod_graph.refusal import refuse, user_location
from anyflex.mod_graph.trace import captured_name
from anyflex.reference.opaque import Watch, index_error, leaves, watched_mask, watched_score

__all__ = ["RecordedMod", "read_tensors", "recorded"]

_functorch = torch._C._functorch


class _Place(NamedTuple):
    """Stands for a tensor: of the arguments and of what was made, by number; below 0 of those
    that the mod read, ~number."""

    number: int


class _Here:
    """Stands for the device of the arguments."""


class _Step(NamedTuple):
    """A torch function that was called.

    Args:
        args, kwargs: with `_Place` for tensors.
        quiet: no gradient was recorded, where the mod switched that off.
        file, line: of the user's source.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    quiet: bool
    file: str | None
    line: int | None


class RecordedMod:
    """Does what a mod did when it was recorded, whatever has become of its surroundings.

    Equal where the same function did the same with the same tensors.

    Attributes:
        function: the user's.
        tensors: those that the mod read, in the order of its reads: not copies, so changes in
            place are seen.
        names: theirs in the user's function, "" where unknown.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        kind: Literal["score", "mask"],
        recorder: _Recorder,
    ) -> None:
        self.function = function
        self.tensors = recorder.tensors
        self.names = [captured_name(function, tensor) for tensor in self.tensors]
        self._made_again_by = (function, kind, recorder.device)
        self._steps = recorder.steps
        self._output = recorder.output
        self._unused_after = _unused_after(recorder)
        self._default_dtype = torch.get_default_dtype()

    def __call__(self, *arguments: Any) -> Any:
        if not isinstance(arguments[0], Tensor):  # symbols: the function is traced once more
            return self.function(*arguments)
        if torch.get_default_dtype() is not self._default_dtype:
            raise ArgumentError(
                f"torch's default dtype was {self._default_dtype} when a mod that can't be traced "
                f"ran, and is {torch.get_default_dtype()} now: call backward under the default "
                "dtype of the call, and use a block mask under that of its making."
            )
        values: list[Any] = list(arguments)

        def filled(value: Any) -> Any:
            if type(value) is _Place:
                number = value.number
                return values[number] if number >= 0 else self.tensors[~number]
            return arguments[0].device if value is _Here else value

        for step, unused in zip(self._steps, self._unused_after, strict=True):
            args, kwargs = _mapped((step.args, step.kwargs), filled)
            try:
                with torch.no_grad() if step.quiet else nullcontext():
                    result = step.func(*args, **kwargs)
            except ModIndexError as error:
                cause = error.__cause__ or error
                raise index_error(cause, step.file, step.line) from cause
            values += _tensors((result,))
            del args, kwargs, result
            for number in unused:
                values[number] = None
        return _mapped(self._output, filled)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RecordedMod)
            and self.function == other.function
            and len(self.tensors) == len(other.tensors)
            and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
            and (self._steps, self._output) == (other._steps, other._output)
        )

    def __hash__(self) -> int:
        return hash(self.function)

    def __deepcopy__(self, memo: object) -> RecordedMod:
        return self  # nothing of it changes, and functions aren't copied either

    def __reduce__(self) -> Any:
        return recorded, self._made_again_by


def recorded(
    function: Callable[..., Any],
    kind: Literal["score", "mask"],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> RecordedMod:
    """Run a mod that can't be traced once, through vmap, for pair (0, 0, 0, 0), and return what it
    did. Gradients count as recorded where they are at this moment.

    Args:
        device: of the indices.
        dtype: of the score.

    Raises:
        ModTraceError: vmap can't run it, or it returns something else than one real number, or
            it does what can't be recorded.
        BlockMaskError: a mask mod returns something else than one bool.
        ModIndexError: that pair reads outside of a captured tensor, an empty one for example.
    """
    place = torch.device("cpu") if device is None else device
    indices = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(4)]
    recorder = _Recorder(indices[0].device)
    if kind == "score":
        score = torch.zeros((1, 1, 1, 1), dtype=dtype, device=place)
        watched_score(function, score, indices, recorder)
    else:
        watched_mask(function, indices, recorder)
    return RecordedMod(function, kind, recorder)


def read_tensors(
    function: Callable[..., Any],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the tensors requiring grad that a score mod reads, in the order of its reads. Errors
    as for `recorded`."""
    if not isinstance(function, RecordedMod):
        function = recorded(function, "score", device, dtype)
    return [tensor for tensor in function.tensors if tensor.requires_grad]


class _Recorder(Watch):
    """Notes what a mod does. What it makes is held, so that no other object gets its id."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.steps: list[_Step] = []
        self.tensors: list[Tensor] = []
        self.made_by: list[int] = []
        self.output: Any = None
        self._places: dict[int, _Place] = {}
        self._count = 0
        self._held: list[Any] = []
        self._outside = self._level = 0
        self._records = self._gradients = False

    def __enter__(self) -> Any:
        self._outside = functorch_level() or 0
        self._gradients = torch.is_grad_enabled()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def begin(self, arguments: tuple[Tensor, ...]) -> None:
        self._level = functorch_level() or 0
        self._keep(arguments)
        self._records = True

    def end(self, result: Any) -> None:
        self._records = False
        self.output = _mapped(result, self._place)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._records:  # vmap's own work
            return super().__torch_function__(func, types, args, kwargs)
        if (functorch_level() or 0) != self._level:
            refuse(
                "a transform (vmap, grad, jvp) inside a mod",
                "torch.func",
                "A mod computes one score from scalars: transform tensors outside of it.",
            )
        taken = _mapped((args, kwargs or {}), self._place)
        result = super().__torch_function__(func, types, args, kwargs)
        made = self._keep((result,))
        if made or _places(taken):  # else it tells a fact, or switches gradients
            quiet = self._gradients and not torch.is_grad_enabled()
            file, line = user_location()
            self.steps.append(_Step(func, taken[0], taken[1], quiet, file, line))
            self.made_by.append(made)
        return result

    def _keep(self, values: tuple[Any, ...]) -> int:
        """Give the tensors in `values` the next numbers, and return how many there are."""
        before = self._count
        for tensor in _tensors(values):
            self._places[id(tensor)] = _Place(self._count)
            self._held.append(tensor)
            self._count += 1
        return self._count - before

    def _place(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _Here if value == self.device and type(value) is torch.device else value
        place = self._places.get(id(value))
        if place is None:
            if _functorch.is_batchedtensor(value) and (
                _functorch.maybe_get_level(value) > self._outside
            ):
                refuse(
                    "a mod that can't be traced calls something that hides from torch what it "
                    "does, as a torch.jit.script function",
                    "torch.jit",
                    "Call the Python function itself.",
                )
            place = self._places[id(value)] = _Place(~len(self.tensors))
            self.tensors.append(value)
        return place


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    return [value for value in leaves(values) if isinstance(value, Tensor)]


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists, dicts and slices, of changed contents."""
    kind = type(value)
    if kind is list or (isinstance(value, tuple) and kind not in (_Place, torch.Size)):
        items = [_mapped(item, change) for item in value]
        return items if kind is list else tuple(items)
    if kind is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    if kind is slice:
        return slice(*[_mapped(end, change) for end in (value.start, value.stop, value.step)])
    return change(value)


def _places(value: Any) -> list[int]:
    """The numbers of the tensors that stand in what `_mapped` has made."""
    found: list[int] = []

    def look(item: Any) -> Any:
        if type(item) is _Place:
            found.append(item.number)
        return item

    _mapped(value, look)
    return found


def _unused_after(recorder: _Recorder) -> list[tuple[int, ...]]:
    """For each step the numbers of what no later one needs: chunks of scores, to be let go."""
    needed = set(_places(recorder.output))
    count = recorder._count
    unused: list[tuple[int, ...]] = []
    for step, made in zip(reversed(recorder.steps), reversed(recorder.made_by), strict=True):
        count -= made
        here = {n for n in _places((step.args, step.kwargs)) if n >= 0}
        here.update(range(count, count + made))
        unused.append(tuple(here - needed))
        needed |= here
    return unused[::-1]
