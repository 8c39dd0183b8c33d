"""Runs of blocks as tensors: no mods."""

from __future__ import annotations
