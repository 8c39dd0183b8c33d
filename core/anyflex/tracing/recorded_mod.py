"""RecordedMod: a mod that can't be traced, as what it did when it was called once.

A user's function would read its closure, globals and attributes again each time: those of a loop's
last turn in backward, and other numbers in a mask's calls than in its blocks. A mod is pure and
can't branch on values, so what it did for one pair it does for all. This is recorded, torch
function by torch function, with the tensors and the numbers that were read, and is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from numbers import Integral, Number
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from anyflex.errors import ArgumentError, ModIndexError, ModTraceError
from anyflex.process.user_frames import user_location
from anyflex.tensors.torch_versions import batch_level, functorch_level, is_batched
from anyflex.tracing.trace import captured_name
from anyflex.tracing.trace_errors import TRANSFORM, change_in_place, function_name, refuse
from anyflex.tracing.vmapped_mods import (
    ModWatch,
    index_error,
    leaves,
    watched_mask,
    watched_score,
)

__all__ = ["RecordedMod", "read_tensors", "recorded"]


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
        made: the dtypes of the tensors that it made.
        default: torch's default dtype, where the function may compute in it; else None.
        quiet: no gradient was recorded, where the mod switched that off.
        file, line: of the user's source.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[torch.dtype, ...]
    default: torch.dtype | None
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

    def __call__(self, *arguments: Any) -> Any:
        if not isinstance(arguments[0], Tensor):  # symbols: the function is traced once more
            return self.function(*arguments)
        values: list[Any] = list(arguments)

        def filled(value: Any) -> Any:
            if type(value) is _Place:
                number = value.number
                return values[number] if number >= 0 else self.tensors[~number]
            return arguments[0].device if value is _Here else value

        for step, unused in zip(self._steps, self._unused_after, strict=True):
            args, kwargs = _mapped((step.args, step.kwargs), filled)
            other_default = step.default not in (None, torch.get_default_dtype())
            if other_default:
                args, kwargs = _promoted((args, kwargs), step.default)
            try:
                with torch.no_grad() if step.quiet else nullcontext():
                    result = step.func(*args, **kwargs)
            except ModIndexError as error:
                cause = error.__cause__ or error
                raise index_error(cause, step.file, step.line) from cause
            made = _tensors((result,))
            if len(made) != len(step.made):
                _refuse_other_count(step, len(made))
            if other_default and tuple(tensor.dtype for tensor in made) != step.made:
                _refuse_other_default(step)
            values += made
            del args, kwargs, result, made
            for number in unused:
                values[number] = None
        return _mapped(self._output, filled)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RecordedMod)
            and self.function == other.function
            and len(self.tensors) == len(other.tensors)
            and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
            and _same((self._steps, self._output), (other._steps, other._output))
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


class _Recorder(ModWatch):
    """Notes what a mod does. What it makes is held, so that no other object gets its id."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.steps: list[_Step] = []
        self.tensors: list[Tensor] = []
        self.output: Any = None
        self._places: dict[int, _Place] = {}
        self.count = 0
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
            refuse(*TRANSFORM)
        taken = _mapped((args, kwargs or {}), self._place)
        result = super().__torch_function__(func, types, args, kwargs)
        made = _tensors((result,))
        if not _places(taken):
            self._keep_constants(made, any(leaf is _Here for leaf in _leaves(taken)))
        elif made or change_in_place(func) is not None:  # else it told a fact, which is in use
            dtypes = tuple(tensor.dtype for tensor in made)
            default = _default_dtype((args, kwargs or {}), dtypes)
            self._add(func, taken[0], taken[1], dtypes, default)
        self._keep(made)
        return result

    def _keep_constants(self, made: list[Tensor], here: bool) -> None:
        """Record what a function made of no tensor as a copy of it: it is the same for all pairs,
        and an array that it was read from, or torch's defaults, may be others by then."""
        for tensor in made:
            self._refuse_hidden(tensor)
            constant = tensor.detach().clone()
            device = _Here if here else constant.device
            # A copy for each replay, as later steps may write into it.
            self._add(Tensor.to, (constant, device), {"copy": True}, (constant.dtype,), None)

    def _add(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: tuple[torch.dtype, ...],
        default: torch.dtype | None,
    ) -> None:
        quiet = self._gradients and not torch.is_grad_enabled()
        self.steps.append(_Step(func, args, kwargs, made, default, quiet, *user_location()))

    def _keep(self, made: Sequence[Tensor]) -> None:
        """Give tensors the next numbers."""
        for tensor in made:
            self._places[id(tensor)] = _Place(self.count)
            self._held.append(tensor)
            self.count += 1

    def _place(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if type(value) is torch.device and value == self.device:
                return _Here
            # An array, which the user may write into.
            return copy(value) if hasattr(type(value), "__array__") else value
        place = self._places.get(id(value))
        if place is None:
            self._refuse_hidden(value)
            place = self._places[id(value)] = _Place(~len(self.tensors))
            self.tensors.append(value)
        return place

    def _refuse_hidden(self, tensor: Tensor) -> None:
        """Raise for a tensor of pairs that is of no step."""
        if is_batched(tensor) and (batch_level(tensor) > self._outside):
            refuse(
                "a mod that can't be traced calls something that hides from torch what it does, "
                "as a torch.jit.script function",
                "torch.jit",
                "Call the Python function itself.",
            )


def _default_dtype(taken: Any, made: tuple[torch.dtype, ...]) -> torch.dtype | None:
    """Torch's default dtype where a function may compute in it: it takes no real tensor, and makes
    one or takes a real number."""
    default = torch.get_default_dtype()
    real = default in made
    for value in _leaves(taken):
        if isinstance(value, Tensor):
            if value.dtype.is_floating_point or value.dtype.is_complex:
                return None
        elif isinstance(value, Number) and not isinstance(value, Integral):
            real = True
    return default if real else None


def _promoted(taken: Any, dtype: torch.dtype | None) -> Any:
    """The same with integer tensors in `dtype`: what torch itself does where that is the default
    dtype and no real tensor is there."""

    def promoted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and _is_integer(value.dtype) else value

    return _mapped(taken, promoted)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _refuse_other_count(step: _Step, count: int) -> NoReturn:
    name = function_name(step.func)
    raise ModTraceError(
        f"{name} gave a mod that can't be traced {len(step.made)} tensor(s) when it was "
        f"recorded, and gives {count} now: what it reads has changed since then",
        operation=name,
        hint="Change what a mod reads after backward, or read a copy that was made outside of it.",
        file=step.file,
        line=step.line,
    )


def _refuse_other_default(step: _Step) -> NoReturn:
    raise ArgumentError(
        f"torch's default dtype was {step.default} when a mod that can't be traced was recorded, "
        f"and is {torch.get_default_dtype()} now, in which its {function_name(step.func)} "
        f"({step.file}:{step.line}) would compute: call backward under the default dtype of the "
        "call, use a block mask under that of its making, or name a dtype in the mod."
    )


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
    return [item.number for item in _leaves(value) if type(item) is _Place]


def _leaves(value: Any) -> list[Any]:
    """All that `_mapped` would change."""
    found: list[Any] = []
    _mapped(value, found.append)
    return found


def _same(a: Any, b: Any) -> bool:
    """Are two results of `_mapped` equal? Tensors and arrays in them where their elements are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, slice):
        return _same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, Tensor):
        return a.dtype is b.dtype and a.device == b.device and torch.equal(a, b)
    if hasattr(a, "__array__"):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


def _unused_after(recorder: _Recorder) -> list[tuple[int, ...]]:
    """For each step the numbers of what no later one needs: chunks of scores, to be let go."""
    needed = set(_places(recorder.output))
    count = recorder.count
    unused: list[tuple[int, ...]] = []
    for step in reversed(recorder.steps):
        made = len(step.made)
        count -= made
        here = {n for n in _places((step.args, step.kwargs)) if n >= 0}
        here.update(range(count, count + made))
        unused.append(tuple(here - needed))
        needed |= here
    return unused[::-1]
