"""Registers the backend where it isn't installed."""

from __future__ import annotations

from importlib.metadata import entry_points

from anyflex.plugin import register
from anyflex_cuda.backend import CudaBackend


def pytest_configure() -> None:
    if not any(point.name == "cuda" for point in entry_points(group="anyflex.backends.v1")):
        register("cuda", CudaBackend)
