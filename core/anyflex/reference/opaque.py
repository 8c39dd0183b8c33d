"""Mods that can't be traced: run through vmap, differentiated by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyflex.errors import AnyflexError, BlockMaskError, ModIndexError, ModTraceError
from anyflex.mod_graph.calling import error_location, refuse_recursion
from anyflex.mod_graph.refusal import (
    REFUSED,
    change_in_place,
    refuse,
    torch_function,
    user_location,
)

__all__ = ["apply_mask", "apply_score", "every_read", "read_tensors", "score_gradients"]

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
    return _score(function, score, indices, _Watch())


def apply_mask(function: Function, indices: Sequence[Tensor]) -> Tensor:
    """Run a mask mod on indices as `apply_score`; return bool [B, H, R, C].

    Raises:
        BlockMaskError: it returns something else than one bool.
        Otherwise as `apply_score`.
    """
    return _mask(function, indices, _Watch())


def _score(function: Function, score: Tensor, indices: Sequence[Tensor], watch: _Watch) -> Tensor:
    mapped = _score_of(function, watch)
    for axis in _AXES:
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if axis == i else None for i in range(1, 5))))
    modified = _watched(mapped, watch, score, *indices).to(score.dtype)
    if modified.numel() == 1 or 0 in modified.stride():
        # One number for many pairs, perhaps a captured one; the caller may write into scores.
        modified = modified.clone(memory_format=torch.contiguous_format)
    return modified


def _mask(function: Function, indices: Sequence[Tensor], watch: _Watch) -> Tensor:
    mapped = _mask_of(function, watch)
    for axis in _AXES:
        mapped = torch.vmap(mapped, in_dims=tuple(0 if axis == i else None for i in range(1, 5)))
    return _watched(mapped, watch, *indices)


def _watched(mapped: Function, watch: _Watch, *arguments: Tensor) -> Tensor:
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


class _Watch(TorchFunctionMode):
    """Watches what a mod does, step by step: refuses changes of what it captured, and names the
    mod's line where torch can't do what it asks for.

    Args:
        hold: note every tensor that is given to a torch function and wasn't made by one. What was
            made is then held, so that no other object gets its id.
    """

    def __init__(self, *, hold: bool = False) -> None:
        super().__init__()
        self.hold = hold
        self.found: dict[int, Tensor] = {}
        self.made: dict[int, Any] = {}
        self.given: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refused = change_in_place(func)
        if refused is not None and args and id(args[0]) not in self.made:
            refuse(*refused)  # the trace ended before it came to this
        if self.hold:
            for value in _flat((*args, *kwargs.values())):
                if isinstance(value, Tensor) and id(value) not in self.made:
                    self.found.setdefault(id(value), value)
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
        for value in _flat((result,)):
            self.made[id(value)] = value if self.hold else None
        return result


def _refuse_function(func: Any, error: Exception) -> NoReturn:
    """Raise ModTraceError for what torch could not do for a mod."""
    known = REFUSED.get(torch_function(func))
    if known is not None:
        refuse(*known)
    name = getattr(func, "__name__", None) or "a function"
    if name == "__get__":
        name = "." + func.__self__.__name__
    _refuse_step(name, error, *user_location())


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


def _score_of(function: Function, watch: _Watch) -> Function:
    """Check, inside of the transforms, that a score mod returns one real number."""

    def call(*arguments: Tensor) -> Tensor:
        watch.given += arguments
        result = function(*arguments)
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


def _mask_of(function: Function, watch: _Watch) -> Function:
    """Check, inside of the transforms, that a mask mod returns one bool."""

    def call(*arguments: Tensor) -> Tensor:
        watch.given += arguments
        result = function(*arguments)
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


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def read_tensors(
    function: Function, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the tensors requiring grad that a score mod reads, in the order of its reads.

    The function runs once, through vmap, for pair (0, 0, 0, 0).

    Raises:
        ModTraceError: vmap can't run it, or it returns something else than one real number.
        ModIndexError: that pair reads outside of a captured tensor, an empty one for example.
    """
    return [t for t in every_read(function, 1, device, dtype) if t.requires_grad]


def every_read(
    function: Function, scores: int, device: torch.device | None, dtype: torch.dtype
) -> list[Tensor]:
    """Return every tensor that a mod reads, in the order of its reads: a score mod's with
    `scores` 1, a mask mod's with 0. Errors as for `read_tensors`."""
    watch = _Watch(hold=True)
    indices = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    with torch.no_grad():
        if scores:
            score = torch.zeros((1, 1, 1, 1), dtype=dtype, device=device)
            _score(function, score, indices, watch)
        else:
            _mask(function, indices, watch)
    own = {id(t) for t in watch.given}
    return [t for t in watch.found.values() if id(t) not in own]
