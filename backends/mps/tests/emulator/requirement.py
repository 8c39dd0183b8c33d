"""Requirement of tests: a missing compiler fails them in CI and skips them elsewhere."""

from __future__ import annotations

import os

import pytest

from .compiling import missing_compiler

__all__ = ["require_emulator"]


def require_emulator() -> None:
    """Fail where CI is set in the environment and no kernel can be compiled; else skip."""
    reason = missing_compiler()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI tests every kernel")
    pytest.skip(reason)
