"""The portable Triton backend of anyflex: kernels for every device that Triton serves.

Other backends build on three modules: this one, which needs no Triton, for an entry point;
`anyflex_triton.building` for a kernel class; `anyflex_triton.device_functions` for kernels' device
code. All other modules are private to this package.
"""

from __future__ import annotations

from anyflex_triton.absent_gpu import AbsentGpu, compiling_for
from anyflex_triton.backend import TritonBackend, checksum_of, untried_triton
from anyflex_triton.ready_kernels import ReadyKernels, write_ready_kernels

__all__ = [
    "AbsentGpu",
    "ReadyKernels",
    "TritonBackend",
    "checksum_of",
    "compiling_for",
    "untried_triton",
    "write_ready_kernels",
]
