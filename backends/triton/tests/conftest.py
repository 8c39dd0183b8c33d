"""Test setup: kernels run in Triton's interpreter, whose variable is read when it is imported."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("triton") is not None:
    from interpreting import hasten

    hasten()
