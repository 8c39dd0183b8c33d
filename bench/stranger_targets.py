"""Rows of `anyflex bench --preset h200-strangers`, compared with their targets.

    python bench/stranger_targets.py REPORT.json [...]

Every row shall be as fast as its fastest peer, the two tables of a decomposed relative position
1.2 times as fast forward. Forward with a bias may take LIMITS times as long as the same call
without it. Exits with 1 and names the rows that miss, or that weren't measured. A ratio to
a peer is the median of the rounds'; one to another row is that of the medians.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from gpu_targets import EVERY, SHORT, Rows, ratio, reports_of, rows_of

from anyflex.bench.presets import PRESETS

__all__ = ["LIMITS", "main", "missed"]

PLAIN, CAUSAL = "full B4 H16 S4096 D64 bfloat16", "causal B4 H16 S4096 D64 bfloat16"
IMAGE, LEARNED = "image bias B4 H16 S4096 D64 bfloat16", "T5 B4 H16 S4096 D64 bfloat16"
LIMITS: Mapping[str, tuple[str, float]] = {LEARNED: (CAUSAL, 1.5), IMAGE: (PLAIN, 2.5)}
"""Row -> the row without its bias, and how many times its time forward may take."""
LEAST: Mapping[tuple[str, str], float] = {(IMAGE, "forward"): 1.2}
"""Ratio to the fastest peer, where it isn't 1."""


def missed(rows: Rows) -> list[str]:
    """Return a line for each row that misses its target, or that isn't there."""
    lines = []
    for case in PRESETS["h200-strangers"]:
        for direction in case.directions:
            found = rows.get((case.name, direction), {})
            ratios = {peer: ratio(found, "cuda", [peer]) for peer in EVERY}
            known = {peer: value for peer, value in ratios.items() if value is not None}
            if not known:
                lines.append(f"{case.name}, {direction}: not measured beside a peer")
                continue
            fastest = min(known, key=known.__getitem__)
            least = LEAST.get((case.name, direction), 1.0)
            if known[fastest] < least:
                text = f"{known[fastest]:.2f} of {SHORT.get(fastest, fastest)}'s speed"
                lines.append(f"{case.name}, {direction}: {text}, wanted {least:g}")
    for biased, (plain, most) in LIMITS.items():
        times = [rows.get((name, "forward"), {}).get("cuda") for name in (biased, plain)]
        if times[0] is None or times[1] is None:
            continue  # named above
        share = times[0]["median_ms"] / times[1]["median_ms"]
        if share > most:
            lines.append(f"{biased}, forward: {share:.2f} times without a bias, wanted {most:g}")
    return lines


def main() -> int:
    """Print, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+")
    lines = missed(rows_of(reports_of(parser.parse_args().reports)))
    print("what misses its target:" if lines else "all reached")
    print("\n".join(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
