"""Structure of block masks: runs of blocks as tensors, without mods."""

from __future__ import annotations
