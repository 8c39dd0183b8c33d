"""anyflex as an attention backend of vLLM.

    vllm serve MODEL --attention-backend ANYFLEX

vLLM finds the package by its entry point and calls `register` in each of its processes.
"""

from __future__ import annotations

from anyflex_vllm.registration import NAME, register

__all__ = ["NAME", "register"]
