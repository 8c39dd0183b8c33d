"""Transforms and modes that a call may be in: which of them flex_attention refuses, and how."""

from __future__ import annotations

from typing import NoReturn

import torch

from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.torch_versions import (
    dynamo_constant,
    in_dual_level,
    transform_stack,
)

__all__ = ["refuse_forward_mode", "refuse_transform", "refuse_transforms"]


def _transform() -> str:
    """The innermost functorch transform, or ""."""
    innermost = transform_stack()
    return "" if innermost is None else str(innermost.key()).rpartition(".")[2]


def refuse_transform() -> NoReturn:
    """Raise BackendRefused for the innermost functorch transform."""
    _refuse_transform(_transform())


def _refuse_transform(transform: str) -> NoReturn:
    fail(
        "BackendRefused",
        f"flex_attention inside of the functorch transform {transform.lower()} is not "
        "supported: use torch.autograd.grad for gradients, and the batch dimension for vmap.",
        reasons={"reference": f"functorch transform {transform}"},
    )


def refuse_transforms() -> None:
    """Raise BackendRefused where the static op might lose a tangent without a word, or be refused
    by torch in words of its own."""
    found = _unfit_transform(torch.compiler.is_dynamo_compiling())
    if found == "dual level":
        refuse_forward_mode()
    if found:
        _refuse_transform(found)


@dynamo_constant
def _unfit_transform(compiling: bool) -> str:
    """The transform, or "dual level", that the static op can't be in, or "". Dynamo runs this, as
    it traces inside of the transforms."""
    transform = _transform()
    if transform == "Jvp" or (compiling and transform in ("Grad", "Vmap")):
        return transform
    return "dual level" if in_dual_level() else ""


def refuse_forward_mode() -> NoReturn:
    """Raise BackendRefused: a kernel would compute the value and lose the tangent."""
    fail(
        "BackendRefused",
        "flex_attention has no forward-mode derivative: use torch.autograd.grad",
        reasons={"reference": "forward-mode derivatives are not implemented"},
    )
