"""Mods that can't be traced: run through vmap, differentiated by torch's autograd.

The user's function is called each time, in backward too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyflex.errors import AnyflexError, BlockMaskError, ModIndexError, ModTraceError
from anyflex.process.user_frames import error_location, user_location
from anyflex.tensors.torch_versions import batch_level, functorch_level, is_batched
from anyflex.tracing.eager_tracing import refuse_recursion, refuse_transform
from anyflex.tracing.trace_errors import (
    REFUSED,
    TRANSFORM,
    change_in_place,
    function_name,
    refuse,
    torch_function,
)

__all__ = ["apply_mask", "apply_score", "read_tensors", "run_mask_once", "score_gradients"]

Function = Callable[..., Any]

# The last dimension is mapped first, so that it ends up innermost.
_AXES = (4, 3, 2, 1)


def apply_score(function: Function, score: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Run a score mod on scores.

    Args:
        score: [B, H, R, C].
        indices: b [B], h [H], q_idx [R], kv_idx [C], int64.

    Returns:
        The modified scores, of the shape and type of `score`.

    Raises:
        ModTraceError: torch can't do what the function asks for, under vmap, or it returns
            something else than one real number.
        ModIndexError: a read outside of a captured tensor, dead pairs included: only a traced mod
            can be clamped.
    """
    return _watched_score(function, score, indices, ModWatch())


def apply_mask(function: Function, indices: Sequence[Tensor]) -> Tensor:
    """Run a mask mod on indices as `apply_score`; return bool [B, H, R, C].

    Raises:
        BlockMaskError: it returns something else than one bool.
        Otherwise as `apply_score`.
    """
    watch = ModWatch()
    mapped = _mask_of(function, watch)
    for axis in _AXES:
        mapped = torch.vmap(mapped, in_dims=tuple(0 if axis == i else None for i in range(1, 5)))
    return _watched(mapped, watch, *indices)


def read_tensors(
    function: Function, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Run a score mod once, for pair (0, 0, 0, 0), and return the tensors that it reads, in the
    order of its reads.

    Args:
        device: where the indices are.
        dtype: the score's.

    Raises:
        ModTraceError: as `apply_score`, and where something hides from torch what it reads.
        ModIndexError: that pair reads outside of a captured tensor, an empty one for example.
    """
    watch = ModWatch()
    score = torch.zeros((1, 1, 1, 1), dtype=dtype, device=device)
    _watched_score(function, score, _first_pair(device), watch)
    return watch.read


def run_mask_once(function: Function, device: torch.device | None) -> None:
    """Run a mask mod for pair (0, 0, 0, 0). Raises as `apply_mask`."""
    apply_mask(function, _first_pair(torch.device("cpu") if device is None else device))


def _first_pair(device: torch.device) -> list[Tensor]:
    return [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]


def _watched_score(
    function: Function, score: Tensor, indices: Sequence[Tensor], watch: ModWatch
) -> Tensor:
    mapped = _score_of(function, watch)
    for axis in _AXES:
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if axis == i else None for i in range(1, 5))))
    modified = _watched(mapped, watch, score, *indices).to(score.dtype)
    if modified.numel() == 1 or 0 in modified.stride():
        # One number for many pairs, perhaps a captured one; the caller may write into scores.
        modified = modified.clone(memory_format=torch.contiguous_format)
    return modified


def _watched(mapped: Function, watch: ModWatch, *arguments: Tensor) -> Tensor:
    try:
        with watch:
            return mapped(*arguments)  # type: ignore[no-any-return]
    except RecursionError as error:
        refuse_recursion("a mod that can't be traced", error)
    except RuntimeError as error:
        # torch reads some values without asking a mode, as the length of torch.range(0, q_idx).
        if isinstance(error, AnyflexError) or not str(error).startswith("vmap: "):
            raise
        _refuse_step("a function", error, *error_location(error))
    except ValueError as error:
        if not isinstance(error, AnyflexError):
            refuse_transform(error)
        raise


def score_gradients(
    function: Function,
    score: Tensor,
    indices: Sequence[Tensor],
    grad: Tensor,
    tensors: Sequence[Tensor],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Differentiate a score mod.

    Args:
        grad: gradient of the modified scores, [B, H, R, C].
        tensors: what the function reads and needs a gradient.

    Returns:
        (gradient of `score`, gradients of `tensors`); None where nothing depends on it.
    """
    with torch.enable_grad():
        # The mod reads leaves: one tensor may be computed from another, as a view is, and passes
        # its gradient on by itself.
        leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in tensors}
        leaf = score.detach().requires_grad_()
        modified = _watched_score(function, leaf, indices, ModWatch(leaves))
        if not modified.requires_grad:
            return None, [None] * len(tensors)
        wanted = [leaf, *(leaves[id(tensor)] for tensor in tensors)]
        first, *others = torch.autograd.grad(modified, wanted, grad, allow_unused=True)
    return first, list(others)


class ModWatch(TorchFunctionMode):
    """Watches what a mod does, step by step: refuses changes of what it captured, and names the
    mod's line where torch can't do what it asks for.

    Args:
        leaves: by the id of a tensor that the mod reads, the tensor that it gets instead.

    Attributes:
        read: the tensors that the mod read and didn't make, in the order of its reads.
    """

    def __init__(self, leaves: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self._leaves = leaves or {}
        self.read: list[Tensor] = []
        # Tensors by id. One that is gone leaves: another may get its id.
        self._made: dict[int, ref[Tensor]] = {}
        self._inside = False
        self._outer_level = self._level = 0

    def __enter__(self) -> Any:
        self._outer_level = functorch_level() or 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def call(self, function: Function, arguments: tuple[Tensor, ...]) -> Any:
        """Call the mod; the rest of what is watched is vmap's own work."""
        self._keep(arguments)
        self._level = functorch_level() or 0
        self._inside = True
        result = self._replaced(function(*arguments))
        self._inside = False
        self._note(result)
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._replaced(args), self._replaced(kwargs or {})
        if self._inside and (functorch_level() or 0) != self._level:
            refuse(*TRANSFORM)
        refused = change_in_place(func)
        if refused is not None and args and id(args[0]) not in self._made:
            refuse(*refused)  # the trace ended before it came to this
        try:
            result = func(*args, **kwargs)
        except (AnyflexError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except IndexError as error:
            file, line = user_location()
            raise ModIndexError(
                f"a mod that runs through vmap reads outside of a captured tensor: {error}",
                operation="captured[...]",
                hint="An index lies in -N..N-1, also for pairs that the mask kills: clamp it.",
                file=file,
                line=line,
            ) from error
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            _refuse_function(func, error)
        made = list(_tensors(result))
        if self._inside and made:  # else it told a fact, as a shape
            self._note((args, kwargs))
        read = set(map(id, self.read))
        self._keep(tensor for tensor in made if id(tensor) not in read)
        return result

    def _replaced(self, value: Any) -> Any:
        """Put leaves in the place of the tensors that they stand for."""
        if isinstance(value, Tensor):
            return self._leaves.get(id(value), value)
        if not self._leaves or not any(id(tensor) in self._leaves for tensor in _tensors(value)):
            return value
        if isinstance(value, slice):
            return slice(*map(self._replaced, (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {name: self._replaced(item) for name, item in value.items()}
        return type(value)(map(self._replaced, value))

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors as made by the mod, as long as they live."""
        for tensor in tensors:
            key = id(tensor)
            self._made[key] = ref(tensor, lambda _, key=key: self._made.pop(key, None))  # type: ignore[misc]

    def _note(self, values: Any) -> None:
        """Note the tensors among `values` that the mod didn't make."""
        for tensor in _tensors(values):
            if id(tensor) in self._made or id(tensor) in map(id, self.read):
                continue
            if is_batched(tensor) and batch_level(tensor) > self._outer_level:
                refuse(
                    "a mod that can't be traced calls something that hides from torch what it "
                    "does, as a torch.jit.script function",
                    "torch.jit",
                    "Call the Python function itself.",
                )
            self.read.append(tensor)


def _refuse_function(func: Any, error: Exception) -> NoReturn:
    """Raise ModTraceError for what torch could not do for a mod."""
    known = REFUSED.get(torch_function(func))
    if known is not None:
        refuse(*known)
    _refuse_step(function_name(func), error, *user_location())


def _refuse_step(name: str, error: Exception, file: str | None, line: int | None) -> NoReturn:
    lines = str(error).strip().splitlines() or [""]
    raise ModTraceError(
        f"torch operation {name} can be neither held by a mod graph nor run through torch.vmap: "
        f"{type(error).__name__}: {lines[0]}",
        operation=name,
        hint="Write it with the operations of the table in the documentation, or compute it "
        "outside of the mod and read a captured tensor.",
        file=file,
        line=line,
    ) from error


def _score_of(function: Function, watch: ModWatch) -> Function:
    """Check, inside of the transforms, that a score mod returns one real number."""

    def call(*arguments: Tensor) -> Tensor:
        result = watch.call(function, arguments)
        if isinstance(result, (int, float)) and not isinstance(result, bool):
            return torch.tensor(float(result), device=arguments[0].device)
        if not isinstance(result, Tensor):
            what = f"a {type(result).__name__}"
        elif result.dim() != 0:
            what = f"a tensor of shape {list(result.shape)}"
        elif result.dtype is torch.bool or result.is_complex():
            what = f"{result.dtype}"
        else:
            return result
        refuse(f"a score mod that returns {what}", "return", "It returns one real score.")

    return call


def _mask_of(function: Function, watch: ModWatch) -> Function:
    """Check, inside of the transforms, that a mask mod returns one bool."""

    def call(*arguments: Tensor) -> Tensor:
        result = watch.call(function, arguments)
        if isinstance(result, bool):
            return torch.tensor(result, device=arguments[0].device)
        if not isinstance(result, Tensor):
            what = f"a {type(result).__name__}"
        elif result.dim() != 0 or result.dtype is not torch.bool:
            what = f"dtype {result.dtype} and shape {list(result.shape)}"
        else:
            return result
        raise BlockMaskError(f"mask_mod returned {what}; it must return one bool scalar")

    return call


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists, dicts and slices, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, slice):
        yield from _tensors((value.start, value.stop, value.step))
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
