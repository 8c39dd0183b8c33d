"""Masks and score mods by name, as ``anyflex explain`` and ``anyflex bench`` take them.

Functions of `anyflex.masks` and `anyflex.mods`: a name, and after a colon arguments as Python
writes them: ``causal``, ``causal_window:128``, ``dilated:3,window=5``, ``neighbourhood:(4,6),3``.
A list is a tensor: ``document_offsets:[0,100,256]``. There are more names for those whose tensors
are drawn: `anyflex.bench.drawn_patterns`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from anyflex import and_masks, masks, mods
from anyflex.bench.drawn_patterns import DRAWN_MASKS, DRAWN_MODS, DrawnPattern, PatternCall
from anyflex.bench.usage_errors import WrongUsage

__all__ = ["make_mask_mod", "make_score_mod"]

_MODS = tuple(
    # These functions return tables, or take functions.
    name
    for name in mods.__all__
    if name not in ("alibi_slopes", "t5_buckets", "compose")
)


def make_mask_mod(texts: Sequence[str], call: PatternCall) -> Callable[..., Any] | None:
    """Return the mask mod that is live where all masks that `texts` name are, None for none.
    `causal_bottom_right` has the call's lengths unless it is given others.

    Raises:
        WrongUsage: an unknown name, or arguments that the function doesn't take.
        ArgumentError, ArgumentTypeError: as the functions.
    """
    of_the_call = {"causal_bottom_right": call.shape[2:]}
    known = masks.__all__
    made = [_made("--mask", text, masks, known, DRAWN_MASKS, of_the_call, call) for text in texts]
    return _joined(made, and_masks)


def make_score_mod(texts: Sequence[str], call: PatternCall) -> Callable[..., Any] | None:
    """Return the score mod that applies those that `texts` name, in order; None for none. `alibi`
    has the published slopes of the call's heads unless it is given others. Raises as
    `make_mask_mod`."""
    of_the_call = {"alibi": call.shape[1:2]}
    made = [_made("--mod", text, mods, _MODS, DRAWN_MODS, of_the_call, call) for text in texts]
    return _joined(made, mods.compose)


def _joined(
    made: list[Callable[..., Any]], join: Callable[..., Callable[..., Any]]
) -> Callable[..., Any] | None:
    if len(made) < 2:
        return made[0] if made else None
    return join(*made)


def _made(
    option: str,
    text: str,
    module: ModuleType,
    known: Sequence[str],
    drawn: Mapping[str, DrawnPattern],
    of_the_call: Mapping[str, tuple[int, ...]],
    call: PatternCall,
) -> Callable[..., Any]:
    name, colon, written = text.partition(":")
    if name in drawn:
        return drawn[name].made(option, text, call)
    if name not in known:
        raise WrongUsage(
            f"{option} {text}: there is no {name!r} in {module.__name__}; known: "
            f"{', '.join((*known, *drawn))}"
        )
    function = getattr(module, name)
    signature = inspect.signature(function)
    parameters = (
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    )
    wrong = f"{option} {text}: {name}({', '.join(map(str, parameters))})"
    try:
        positional, keywords = _arguments(written, call.device)
    except WrongUsage as error:
        raise WrongUsage(f"{option} {text}: {error}") from error
    except (SyntaxError, ValueError, TypeError, RuntimeError) as error:
        raise WrongUsage(f"{wrong} takes numbers as Python writes them, and lists") from error
    if not colon:
        positional = list(of_the_call.get(name, ()))
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise WrongUsage(f"{wrong}: {error}") from error
    # Tensors that a function makes from numbers, for example slopes, are made on the call's
    # device.
    with call.device:
        made: Callable[..., Any] = function(*positional, **keywords)
    return made


def _arguments(written: str, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    call = ast.parse(f"_({written})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise SyntaxError(written)

    def value(node: ast.expr) -> Any:
        read = ast.literal_eval(node)
        if not isinstance(read, list):
            return read
        made = torch.tensor(read, device=device)
        if not made.numel():
            # An empty tensor would have a type that nobody gave, and errors would name that type.
            raise WrongUsage(f"{ast.unparse(node)}: a list must hold numbers")
        return made

    keywords = {str(keyword.arg): value(keyword.value) for keyword in call.keywords}
    return [value(node) for node in call.args], keywords
