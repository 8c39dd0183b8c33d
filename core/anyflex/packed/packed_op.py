"""The static op of a packed call: how sequences and pages live under torch.compile and export.

It has no gradients, and refuses to be asked for any. `anyflex.tensors.static_ops` has its schema.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.errors import ArgumentError
from anyflex.packed.packed_request import read_packed_request
from anyflex.tensors.tensor_facts import empty_dense

__all__ = ["fake_attend", "packed_op"]


def fake_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    ints: list[int],
    request: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs without numbers."""
    wanted = read_packed_request(request)
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    lse, max_scores = (
        query.new_empty(query.shape[:3] if asked else (0,), dtype=dtype)
        for asked in (wanted.lse, wanted.max_scores)
    )
    return empty_dense(query, value.shape[-1]), lse, max_scores


def _refuse_gradients(ctx: Any, *gradients: Tensor | None) -> NoReturn:
    raise ArgumentError(
        "gradients are asked for of a packed call in a program that was exported or compiled "
        "without: export it with inputs that require grad"
    )


# Without it torch warns, and takes what gradients a backend's operations happen to have.
_library: Any = torch.library.Library("anyflex", "FRAGMENT")  # type: ignore[no-untyped-call]
torch.library.register_autograd("anyflex::flex_attention_packed", _refuse_gradients, lib=_library)
packed_op = torch.ops.anyflex.flex_attention_packed.default
