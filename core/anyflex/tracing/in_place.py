"""`Tensor.set_`, the one method that changes a tensor without a word to a TorchFunctionMode."""

from __future__ import annotations

from typing import Any

import torch

from anyflex.tensors.torch_versions import TorchDispatchMode
from anyflex.tracing.trace_errors import change_in_place, refuse

__all__ = ["SetWatch"]


class SetWatch(TorchDispatchMode):  # type: ignore[misc]
    """Refuses ``table.set_(other)`` while a mod is traced outside of Dynamo.

    torch's Python binding of ``set_`` asks neither a mode nor a subclass; its dispatcher does. A
    storage that is filled comes by here too.
    """

    def __init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.set_:
            refused = change_in_place(torch.Tensor.set_)
            assert refused is not None
            refuse(*refused)
        return func(*args, **(kwargs or {}))
