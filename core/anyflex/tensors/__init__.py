"""What torch tells of tensors, its settings and its compiler."""

from __future__ import annotations
