"""First calls of torch's elementary functions on the CPU, made by one thread alone.

Torch hands exp, log, sqrt and others to MKL's vector library, which picks a function's kernel at
the function's first call in the process. Where that call runs on several threads, one of them can
take a kernel of 11 exact bits for its share, once: errors of 1e-4 in float32 that the next call
doesn't show (https://github.com/pytorch/pytorch/issues/188792, MKL before 2025.0).
"""

from __future__ import annotations

import sys
import threading

import torch

from anyflex.mod_graph.operations.functions import FUNCTIONS
from anyflex.process.fork_safe_locks import free_in_child

__all__ = ["make_first_calls"]

_lock = threading.Lock()
free_in_child(sys.modules[__name__])
_made = False


def make_first_calls() -> None:
    """Call each elementary function that graphs and the softmax use, once in a process.

    To be called before any of them runs on a tensor that threads share. Does nothing under fake
    tensors, which reach no kernel.
    """
    global _made
    if _made:
        return
    with _lock, torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            one = torch.ones(1, dtype=dtype, device="cpu")
            if type(one) is not torch.Tensor:
                return
            for record in FUNCTIONS:
                getattr(torch, record.name)(one)
        _made = True
