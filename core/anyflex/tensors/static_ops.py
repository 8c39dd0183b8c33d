"""Registration of anyflex's static ops.

torch looks for the file of each frame that registers a fake implementation, among all modules that
are imported. It remembers files: one that registers all ops is looked for once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["implement"]


def implement(
    library: Any, name: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Give an op that `library` defines its implementation and the one on fake tensors."""
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anyflex::{name}", fake, lib=library)
