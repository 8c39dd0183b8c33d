"""The way of a warm CPU call: which of this repository's Python functions it goes through.

    python bench/warm_call.py [--calls 30] [--files 12]

The call has a causal block mask and a score mod that reads a captured table (ALiBi), float32,
without gradients; the CPU backend computes it, and it was made before. Prints each Python call of
anyflex's packages in order. Exits 1 above either limit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import anyflex

__all__ = ["way"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "backends")


def way() -> list[tuple[str, str]]:
    """Return file and function of each Python call of ours, in order."""
    query, key, value = (torch.randn(1, 4, 128, 32) for _ in range(3))
    slopes = torch.rand(4)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128)

    def attend() -> Any:
        return anyflex.flex_attention(query, key, value, alibi, mask)

    for _ in range(3):
        attend()
    calls = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and any(file.is_relative_to(ROOT / part) for part in PACKAGES):
            calls.append((str(file.relative_to(ROOT)), frame.f_code.co_name))

    sys.setprofile(profile)
    try:
        attend()
    finally:
        sys.setprofile(None)
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=30, help="most calls")
    parser.add_argument("--files", type=int, default=12, help="most files")
    arguments = parser.parse_args()
    calls = way()
    for file, function in calls:
        print(f"{file}: {function}")
    files = {file for file, _ in calls}
    print(f"{len(calls)} calls of {arguments.calls}, {len(files)} files of {arguments.files}")
    return 0 if len(calls) <= arguments.calls and len(files) <= arguments.files else 1


if __name__ == "__main__":
    sys.exit(main())
