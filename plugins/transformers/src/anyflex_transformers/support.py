"""Whether a model asks transformers' interface for its attention."""

from __future__ import annotations

import inspect
import re
import sys

from torch import nn
from transformers import PreTrainedModel

__all__ = ["supports"]


def supports(model: nn.Module) -> bool:
    """Tell whether every part of a model that computes attention does it by the interface.

    transformers accepts any registered name for any model. One that computes attention itself,
    such as BLOOM or MPT, then fails in its first forward, or never calls anyflex.
    """
    parts = {type(part) for part in model.modules() if isinstance(part, PreTrainedModel)}
    return bool(parts) and all(map(_uses_interface, parts))


def _uses_interface(part: type) -> bool:
    module = sys.modules.get(part.__module__)
    if module is None:
        return False
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return False
    computes = re.search(r"^class \w*Attention\w*\(.*\):", source, re.MULTILINE)
    return computes is None or "ALL_ATTENTION_FUNCTIONS" in source
