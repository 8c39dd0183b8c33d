"""The portable Triton backend of anyflex: kernels for every device that Triton serves.

Other backends build on it by three modules: this one, which needs no Triton, has what an entry
point is made of; `anyflex_triton.building` what a kernel class is made of;
`anyflex_triton.device_functions` what kernels call. The other modules are this package's own.
"""

from __future__ import annotations

from anyflex_triton.backend import TritonBackend, checksum_of
from anyflex_triton.supported_versions import untried_triton

__all__ = ["TritonBackend", "checksum_of", "untried_triton"]
