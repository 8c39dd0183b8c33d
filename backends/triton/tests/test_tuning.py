"""Autotuning: the fastest config is found once, kept, and found again; what it may not touch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.plugin import Artifacts, Kernel, PerformanceWarning, PluginError, Spec
from anyflex.plugin import isolated, register
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from triton.errors import TritonError

from anyflex_triton import launch, tuning
from anyflex_triton.backend import TritonBackend
from anyflex_triton.configs import KernelName, Target, around, config_for

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TUNED = {"cuda.mine": {"autotune": True}}


class Kept:
    """Artifacts in memory, for every spec."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], bytes] = {}


class Tried:
    """What ran, and what a clock that prefers one tile says of it.

    Args:
        fastest: BLOCK_M and BLOCK_N; also the least shared memory that a config needs.
    """

    def __init__(self) -> None:
        self.fastest = (64, 64)
        self.timed: list[launch.Program] = []
        self.launched: list[launch.Program] = []
        self.broken: set[tuple[int, int]] = set()

    def tiles(self, program: launch.Program) -> tuple[int, int]:
        return program.constants["BLOCK_M"], program.constants["BLOCK_N"]  # type: ignore[return-value]
