"""Cost that anyflex's entry point adds to `import torch`, with ANYFLEX_TORCH unset and set.

    python bench/torch_import.py [--limit 5] [--processes 9]

Each figure comes from a fresh process that imports torch without its entry points, then times what
torch would do for anyflex's: look for installed entry points, import the module and call it. The
look is torch's own, which happens without anyflex too; it is printed apart. The median of the CPU
time is judged. Exits 1 above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

PROGRAM = """
import json, time
import torch
from importlib.metadata import entry_points
began = time.process_time()
entry_points(group="torch.backends")
looked = time.process_time()
import anyflex_autoload
anyflex_autoload.autoload()
print(json.dumps([(looked - began) * 1e3, (time.process_time() - looked) * 1e3]))
"""


def measure(variable: str) -> tuple[float, float]:
    """Return the milliseconds of CPU of torch's look and of anyflex's part, in a fresh process."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "ANYFLEX_TORCH": variable}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, env=environment
    )
    look, own = json.loads(done.stdout)
    return look, own


def main() -> int:
    parser = argparse.ArgumentParser(description="time anyflex's part of `import torch`")
    parser.add_argument("--limit", type=float, default=5.0, help="milliseconds, median")
    parser.add_argument("--processes", type=int, default=9)
    arguments = parser.parse_args()
    measure("")  # fills the bytecode cache
    slow = False
    for variable in ("", "cpu"):
        runs = [measure(variable) for _ in range(arguments.processes)]
        look, own = (statistics.median(column) for column in zip(*runs, strict=True))
        print(
            f"ANYFLEX_TORCH={variable or '(unset)'}: anyflex's entry point {own:.2f} ms of CPU, "
            f"torch's look for entry points {look:.1f} ms (median of {len(runs)} processes)"
        )
        slow = slow or own > arguments.limit
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
