"""State that lives as long as the process: locks and forks, progress, version, frames."""

from __future__ import annotations
