"""`on_nvidia.py` registers its backend where anyflex looks for plugins; the rest needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "on_nvidia.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the script")
def test_without_a_gpu_the_script_says_what_is_missing() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"], env=environment, capture_output=True, text=True
    )
    assert "'cuda.intel_tiles' can't be used here: torch sees no CUDA device" in done.stderr
    assert done.returncode == 3
