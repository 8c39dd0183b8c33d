"""The tests run kernels in Triton's interpreter, which reads its variable when it is imported."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
