"""Mods that can't be traced: run through vmap, differentiated by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyflex.errors import ModIndexError
from anyflex.mod_graph.refusal import change_in_place, refuse

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
        ModIndexError: a read outside of a captured tensor, dead pairs included: only a traced mod
            can be clamped.
    """
    mapped = function
    for axis in _AXES:
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if axis == i else None for i in range(1, 5))))
    return _run(mapped, score, *indices).to(score.dtype)


def apply_mask(function: Function, indices: Sequence[Tensor]) -> Tensor:
    """Run a mask mod on indices as `apply_score`; return bool [B, H, R, C]."""
    mapped = function
    for axis in _AXES:
        mapped = torch.vmap(mapped, in_dims=tuple(0 if axis == i else None for i in range(1, 5)))
    return _run(mapped, *indices)


def _run(mapped: Function, *arguments: Tensor) -> Tensor:
    try:
        result: Tensor = mapped(*arguments)
    except IndexError as error:
        raise ModIndexError(
            f"a mod that runs through vmap reads outside of a captured tensor: {error}",
            operation="captured[...]",
            hint="An index lies in -N..N-1, also for pairs that the mask kills: clamp it.",
        ) from error
    return result


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


class _Reads(TorchFunctionMode):
    """Notes every tensor that is given to a torch function and wasn't made by one. What was made
    is held, so that no other object gets its id."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self.made: dict[int, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refused = change_in_place(func)
        if refused is not None and args and id(args[0]) not in self.made:
            refuse(*refused)  # the trace ended before it came to this
        for value in _flat((*args, *kwargs.values())):
            if isinstance(value, Tensor) and id(value) not in self.made:
                self.found.setdefault(id(value), value)
        result = func(*args, **kwargs)
        for value in _flat((result,)):
            self.made[id(value)] = value
        return result


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

    The function runs once, for pair (0, 0, 0, 0).

    Raises:
        ModIndexError: that pair reads outside of a captured tensor, an empty one for example.
    """
    return [t for t in every_read(function, 1, device, dtype) if t.requires_grad]


def every_read(
    function: Function, scores: int, device: torch.device | None, dtype: torch.dtype
) -> list[Tensor]:
    """Return every tensor that a mod reads, in the order of its reads: a score mod's with
    `scores` 1, a mask mod's with 0. Errors as for `read_tensors`."""
    reads = _Reads()
    given = [torch.zeros((), dtype=dtype, device=device) for _ in range(scores)]
    given += [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
    with torch.no_grad(), reads:
        _run(function, *given)
    own = {id(t) for t in given}
    return [t for t in reads.found.values() if id(t) not in own]
