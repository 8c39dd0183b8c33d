"""Backend that Triton's interpreter runs. Other processes import this module too."""

from __future__ import annotations

import dataclasses

import torch

from anyflex_triton.backend import TritonBackend

__all__ = ["Interpreted"]


class Interpreted(TritonBackend):
    """Refuses bfloat16, whose bits the interpreter multiplies as integers."""

    capabilities = dataclasses.replace(
        TritonBackend.capabilities, dtypes=frozenset({torch.float32, torch.float16})
    )
