"""Mods that can't be traced: run through vmap, differentiated by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyflex.errors import AnyflexError, BlockMaskError, ModIndexError, ModTraceError
from anyflex.process.user_frames import error_location, user_location
from anyflex.tracing.eager_tracing import refuse_recursion, refuse_transform
from anyflex.tracing.trace_errors import (
    REFUSED,
    change_in_place,
    function_name,
    refuse,
    torch_function,
)

__all__ = [
    "ModWatch",
    "apply_mask",
    "apply_score",
    "index_error",
    "leaves",
    "score_gradients",
    "watched_mask",
    "watched_score",
]

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
    return watched_score(function, score, indices, ModWatch())


def apply_mask(function: Function, indices: Sequence[Tensor]) -> Tensor:
    """Run a mask mod on indices as `apply_score`; return bool [B, H, R, C].

    Raises:
        BlockMaskError: it returns something else than one bool.
        Otherwise as `apply_score`.
    """
    return watched_mask(function, indices, ModWatch())


def watched_score(
    function: Function, score: Tensor, indices: Sequence[Tensor], watch: ModWatch
) -> Tensor:
    """As `apply_score`, in the given watch."""
    mapped = _score_of(function, watch)
    for axis in _AXES:
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if axis == i else None for i in range(1, 5))))
    modified = _watched(mapped, watch, score, *indices).to(score.dtype)
    if modified.numel() == 1 or 0 in modified.stride():
        # One number for many pairs, perhaps a captured one; the caller may write into scores.
        modified = modified.clone(memory_format=torch.contiguous_format)
    return modified


def watched_mask(function: Function, indices: Sequence[Tensor], watch: ModWatch) -> Tensor:
    """As `apply_mask`, in the given watch."""
    mapped = _mask_of(function, watch)
    for axis in _AXES:
        mapped = torch.vmap(mapped, in_dims=tuple(0 if axis == i else None for i in range(1, 5)))
    return _watched(mapped, watch, *indices)


def _watched(mapped: Function, watch: ModWatch, *arguments: Tensor) -> Tensor:
    try:
        with watch:
            return mapped(*arguments)  # type: ignore[no-any-return]
    except RecursionError as error:
        refuse_recursion("a mod that can't be traced", error)
    except RuntimeError as error:
        # What torch reads without asking a mode, as the length of torch.range(0, q_idx).
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
        leaf = score.detach().requires_grad_()
        modified = apply_score(function, leaf, indices)
        if not modified.requires_grad:
            return None, [None] * len(tensors)
        first, *others = torch.autograd.grad(modified, [leaf, *tensors], grad, allow_unused=True)
    return first, list(others)


class ModWatch(TorchFunctionMode):
    """Watches what a mod does, step by step: refuses changes of what it captured, and names the
    mod's line where torch can't do what it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()

    def begin(self, arguments: tuple[Tensor, ...]) -> None:
        """Called with what the mod is called with, inside of vmap."""

    def end(self, result: Any) -> None:
        """Called with what the mod returned."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refused = change_in_place(func)
        if refused is not None and args and id(args[0]) not in self.made:
            refuse(*refused)  # the trace ended before it came to this
        try:
            result = func(*args, **kwargs)
        except (AnyflexError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except IndexError as error:
            raise index_error(error, *user_location()) from error
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            _refuse_function(func, error)
        self.made.update(map(id, leaves((result,))))
        return result


def index_error(error: BaseException, file: str | None, line: int | None) -> ModIndexError:
    """What is raised for torch's IndexError at a line of a mod."""
    return ModIndexError(
        f"a mod that runs through vmap reads outside of a captured tensor: {error}",
        operation="captured[...]",
        hint="An index lies in -N..N-1, also for pairs that the mask kills: clamp it.",
        file=file,
        line=line,
    )


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
        watch.begin(arguments)
        result = function(*arguments)
        watch.end(result)
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
        watch.begin(arguments)
        result = function(*arguments)
        watch.end(result)
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


def leaves(values: Sequence[Any]) -> Iterator[Any]:
    """What is in tuples and lists, however deep."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from leaves(value)
        else:
            yield value
