"""Errors of emulated kernels."""

from __future__ import annotations

__all__ = ["KernelFault"]


class KernelFault(RuntimeError):
    """Undefined behaviour of a kernel, with the kernel's name and source lines.

    Attributes:
        kernel: name of the kernel.
        lines: numbers of the source lines that the message names, from 1.
    """

    def __init__(self, kernel: str, message: str, lines: tuple[int, ...] = ()) -> None:
        super().__init__(f"{kernel}: {message}")
        self.kernel = kernel
        self.lines = lines
