"""Calls with tensors whose class answers for every operation: fake, distributed, wrapping ones.

The static op goes to their ``__torch_dispatch__``, which may well take it. One that doesn't raises
what torch or the class thinks fit, from AssertionError to NotImplementedError, and never tells
which argument it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from anyflex.errors import AnyflexError, ArgumentError, ArgumentTypeError

__all__ = ["naming_subclasses"]


@contextmanager
def naming_subclasses(**tensors: Tensor | None) -> Iterator[None]:
    """Run an op on `tensors`, which are named as the user knows them, in the body.

    Raises:
        ArgumentError: some tensors of the call are fake and others aren't, or their mode isn't on.
        ArgumentTypeError: a tensor's class doesn't take the op.
    """
    try:
        yield
    except (AnyflexError, torch.OutOfMemoryError):
        raise
    except AssertionError as error:
        if "fake" not in str(error).lower():
            raise
        raise ArgumentError(_mixed(tensors)) from error
    except (NotImplementedError, RuntimeError, TypeError) as error:
        names = [name for name, tensor in tensors.items() if _answers_itself(tensor)]
        if not names:
            raise
        if hasattr(tensors[names[0]], "fake_mode"):  # fake tensors take the op: a mod raised it
            raise
        kind = type(tensors[names[0]])
        first = (str(error).strip().splitlines() or [""])[0]
        cure = "its .to_local()" if hasattr(kind, "to_local") else "the plain tensor that it wraps"
        raise ArgumentTypeError(
            f"{names[0]} is a {kind.__name__}, whose class doesn't take anyflex's operation: pass "
            f"{cure}. It raised {type(error).__name__}: {first}"
        ) from error


def _answers_itself(tensor: Tensor | None) -> bool:
    return tensor is not None and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _mixed(tensors: dict[str, Tensor | None]) -> str:
    fake = [name for name, tensor in tensors.items() if hasattr(tensor, "fake_mode")]
    real = [name for name, tensor in tensors.items() if tensor is not None and name not in fake]
    return (
        f"fake (FakeTensor): {', '.join(fake) or 'none'}; not fake: {', '.join(real) or 'none'}. "
        "Under one FakeTensorMode, make every tensor of the call fake by mode.from_tensor(...), "
        "also what score_mod and mask_mod capture, and call while it is on; or call with real "
        "tensors outside of it."
    )
