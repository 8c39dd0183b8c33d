"""``anyflex explain --mask ... --mod ...``: functions of `anyflex.masks` and `anyflex.mods`.

A name, and after a colon arguments as Python writes them: ``causal``, ``causal_window:128``,
``dilated:3,window=5``, ``neighbourhood:(4,6),3``. A list is a tensor:
``document_offsets:[0,100,256]``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from anyflex import masks, mods
from anyflex.bench.usage_errors import WrongUsage

__all__ = ["MASKS", "MODS", "mask_mods", "score_mods"]

MASKS = tuple(masks.__all__)

MODS = tuple(
    # These functions return tables, or take functions.
    name
    for name in mods.__all__
    if name not in ("alibi_slopes", "t5_buckets", "compose")
)


def mask_mods(
    texts: Sequence[str], lengths: tuple[int, int], device: torch.device
) -> list[Callable[..., Any]]:
    """Return the mask mods that `texts` name.

    Args:
        lengths: of query and key. `causal_bottom_right` has them unless it is given others.

    Raises:
        WrongUsage: an unknown name, or arguments that the function doesn't take.
        ArgumentError, ArgumentTypeError: as the function.
    """
    of_the_call = {"causal_bottom_right": lengths}
    return [_made("--mask", text, masks, MASKS, of_the_call, device) for text in texts]


def score_mods(texts: Sequence[str], heads: int, device: torch.device) -> list[Callable[..., Any]]:
    """Return the score mods that `texts` name. Raises as `mask_mods`.

    Args:
        heads: of query. `alibi` has their published slopes unless it is given others.
    """
    of_the_call = {"alibi": (heads,)}
    return [_made("--mod", text, mods, MODS, of_the_call, device) for text in texts]


def _made(
    option: str,
    text: str,
    module: ModuleType,
    known: tuple[str, ...],
    of_the_call: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> Callable[..., Any]:
    name, colon, written = text.partition(":")
    if name not in known:
        raise WrongUsage(
            f"{option} {text}: there is no {name!r} in {module.__name__}; known: "
            f"{', '.join(known)}"
        )
    function = getattr(module, name)
    signature = inspect.signature(function)
    parameters = (
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    )
    wrong = f"{option} {text}: {name}({', '.join(map(str, parameters))})"
    try:
        positional, keywords = _arguments(written, device)
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
    with device:
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
