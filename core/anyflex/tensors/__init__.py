"""Facts about tensors, torch's settings and its compiler."""

from __future__ import annotations
