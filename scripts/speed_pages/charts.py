"""Charts of docs/charts, by file name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scripts.speed_pages import results
from scripts.speed_pages.drawing import Heading, bars, dots, lines
from scripts.speed_pages.results import PEERS, GpuRow

__all__ = ["CHARTS", "FOLDER"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "charts"
HOME = {
    "full B4 H16 S8192 D128": "no mask",
    "causal B4 H16 S8192 D128": "causal",
    "window B4 H16 S8192 D128": "sliding window",
    "documents B4 H16 S8192 D128": "packed documents",
    "prefix B4 H16 S8192 D128": "prefix-LM",
    "alibi B4 H16 S8192 D128": "ALiBi, causal",
    "softcap B4 H16 S8192 D128": "soft cap, causal",
}
"""Rows of the home page's chart, and what it calls them."""
HOME_PEERS = ("FA4", "flex FLASH")
DIRECTIONS = ("forward", "backward")


def home() -> str:
    """Draw the calls of one shape as multiples of torch's flex attention on Triton."""
    rows = {(row.case, row.direction): row for row in results.gpu_rows("h200_cuda.md")}
    panels = {
        direction: {name: _beside_flex(rows[case, direction]) for case, name in HOME.items()}
        for direction in DIRECTIONS
    }
    heading = Heading(
        "One NVIDIA H200: speed, torch's compiled flex_attention on Triton = 1",
        "times as fast, B4 H16 S8192 D128, bfloat16",
        [str(results.gpu_origin("h200_cuda.md"))],
    )
    return bars(heading, panels, (0, 1, 2, 3), left=1.3, reference=1)


def _beside_flex(row: GpuRow) -> dict[str, float]:
    # The table says how many times as long the peer takes as `cuda`.
    flex = row.peers["torch.flex"]
    theirs = {PEERS[peer]: flex / row.peers[peer] for peer in HOME_PEERS}
    return {"anyflex, cuda": flex, **theirs}


def gpu_lengths(width: int) -> str:
    """Draw rates by length of one head dim: B x S is the same for each length."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for row in results.gpu_rows("h200_cuda.md"):
        plain = row.plain
        if plain is None or plain.width != width:
            continue
        series = panels.setdefault(f"{row.direction}, {plain.mask}", {})
        series.setdefault("anyflex, cuda", {})[plain.length] = plain.teraflops
        for peer, name in PEERS.items():
            series.setdefault(name, {})[plain.length] = plain.teraflops / row.peers[peer]
    heading = Heading(
        f"One NVIDIA H200: rate by length, head dim {width}, B x S = 32768, bfloat16",
        "TFLOP/s",
        [str(results.gpu_origin("h200_cuda.md"))],
    )
    order = sorted(panels, key=lambda title: title.startswith("backward"))
    return lines(heading, {title: panels[title] for title in order})


def gpu_ratios() -> str:
    """Draw every row's speed by the fastest peer's, on both of Hopper's GPUs."""
    panels: dict[str, dict[str, dict[str, float]]] = {direction: {} for direction in DIRECTIONS}
    for name, page in (("H200", "h200_cuda.md"), ("H100", "h100_cuda.md")):
        for row in results.gpu_rows(page):
            panels[row.direction].setdefault(row.case, {})[name] = row.fastest[1]
    origins = [str(results.gpu_origin(page)) for page in ("h200_cuda.md", "h100_cuda.md")]
    heading = Heading(
        "cuda: speed, the fastest peer of each row = 1, bfloat16",
        "times as fast as the fastest peer",
        origins,
    )
    return dots(heading, panels, (0.4, 0.5, 0.7, 1, 1.4), left=2.65)


def triton_ratios() -> str:
    """Draw the portable kernels' rows beside torch's Triton kernels and the fastest peer."""
    panels: dict[str, dict[str, dict[str, float]]] = {direction: {} for direction in DIRECTIONS}
    for row in results.gpu_rows("h200_triton.md", "cuda.triton"):
        panels[row.direction][row.case] = {
            "beside torch flex on Triton": row.peers["torch.flex"],
            "beside the fastest peer": row.fastest[1],
        }
    heading = Heading(
        "cuda.triton on one NVIDIA H200: speed, the peer = 1, bfloat16",
        "times as fast as the peer",
        [str(results.gpu_origin("h200_triton.md"))],
    )
    return dots(heading, panels, (0.7, 1, 2, 4, 8, 16, 24), left=2.65)


def gpu_first_calls() -> str:
    """Draw a new mod's first forward and the backward after it."""
    panels: dict[str, dict[str, dict[str, float]]] = {
        "forward": {},
        "backward, right after it": {},
    }
    origins = []
    for backend, file in (("cuda", "h200_cuda"), ("cuda.triton", "h200_triton")):
        origin, states = results.gpu_first_calls(f"{file}_first_calls.json")
        origins.append(str(origin))
        for state, both in states.items():
            for panel, seconds in zip(panels.values(), both, strict=True):
                panel.setdefault(state, {})[backend] = seconds
    heading = Heading(
        "One NVIDIA H200: first call of a new soft cap, B2 H8 S2048 D128", "seconds", origins
    )
    return bars(heading, panels, (0, 2, 4, 6), left=1.2)


def serving_ratios() -> str:
    """Draw causal decoding and prefill of packed sequences beside the fastest peer and dense
    decoding."""
    origin, every = results.serving_rows("h200_serving.json")
    rows = [row for row in every if row.group not in ("mods", "quantised")]
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        series = {"beside dense decoding": row.ratios.get("cuda, dense")}
        series["beside the fastest peer"] = None if row.fastest is None else row.fastest[1]
        known = {name: ratio for name, ratio in series.items() if ratio is not None}
        if known:
            panels.setdefault(row.group, {})[f"{row.case}, {row.shape}"] = known
    heading = Heading(
        "cuda: packed sequences and pages, the other's speed = 1, bfloat16",
        "times as fast as the other",
        [str(origin)],
    )
    return dots(heading, panels, (0.5, 0.7, 1, 1.5, 2, 4, 8), left=3.1)


def cpu_lengths() -> str:
    """Draw rates by length on one thread."""
    origin, panels = results.cpu_lengths()
    title = f"CPU: rate of forward by length, 16 heads, head dim {results.LENGTHS_WIDTH}"
    return lines(Heading(title, "GFLOP/s", [str(origin)]), panels)


def cpu_ratios() -> str:
    """Draw each group's speed by the fastest peer's on each processor."""
    panels: dict[str, dict[str, dict[str, float]]] = {
        "forward": {},
        "forward + backward": {},
    }
    groups = {cpu: results.cpu_groups(cpu) for cpu in results.CPUS}
    for group in max(groups.values(), key=len):
        both = group.endswith(" forward + backward")
        panel = panels["forward + backward" if both else "forward"]
        row = group.removesuffix(" + backward").removesuffix(" forward")
        panel[row] = {cpu.name: each[group][0] for cpu, each in groups.items() if group in each}
    heading = Heading(
        "CPU: speed, the fastest of torch's ways = 1, means of head dims 64 and 128",
        "times as fast as the fastest peer",
        [str(results.cpu_origin(cpu)) for cpu in results.CPUS],
    )
    return dots(heading, panels, (1, 2, 4, 8, 16, 24), left=1.8)


def cpu_first_calls() -> str:
    """Draw a new mod's first call on the CPU backend."""
    origin, seconds = results.cpu_first_calls()
    rows = {
        "without gradients": "first call, {}",
        "with gradients": "with gradients, {}",
        "and first backward": "and backward, {}",
    }
    panel = {
        row: {way: seconds[name.format(way)][0] * 1e3 for way in ("compiled", "interpreted")}
        for row, name in rows.items()
    }
    heading = Heading("CPU: first call of a new mod", "milliseconds", [str(origin)])
    return bars(heading, {"B1 H2 S128 D64, float32": panel}, (0, 10, 20, 30), left=1.3)


def block_masks() -> str:
    """Draw the time that building a block mask takes, and torch's where it was taken."""
    origin, rows = results.block_masks()
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        _, heads, queries, keys = row["sizes"]
        if heads > 1 or queries != keys or keys not in (1 << 14, 1 << 20):
            continue
        series = panels.setdefault(f"{keys} tokens", {}).setdefault(row["mask"], {})
        series["anyflex"] = row["ms"]
        if row["torch_ms"] is not None:
            series["torch"] = row["torch_ms"]
    heading = Heading("Building a block mask on a CPU", "milliseconds", [str(origin)])
    return dots(heading, panels, (1, 10, 100, 1000, 10000), left=2.3, reference=None)


def metal_shares() -> str:
    """Draw the cost model's bound by head dim."""
    kernels = {"forward": "forward", "decode": "decoding", "keys": "dK, dV", "queries": "dQ"}
    panels = {
        title: {kernels[kernel]: shares for kernel, shares in each.items()}
        for title, each in results.metal_shares().items()
    }
    heading = Heading(
        "Apple, a model on paper: upper bound of the share of the multiply-add rate",
        "percent, at most",
        ["nothing was run on a Mac; bench/results/mps_cost_model.md"],
    )
    return lines(heading, panels, along="head dim")


CHARTS: dict[str, Callable[[], str]] = {
    "h200.svg": home,
    "h200_lengths_128.svg": lambda: gpu_lengths(128),
    "h200_lengths_64.svg": lambda: gpu_lengths(64),
    "hopper_ratios.svg": gpu_ratios,
    "h200_triton_ratios.svg": triton_ratios,
    "h200_first_calls.svg": gpu_first_calls,
    "h200_serving.svg": serving_ratios,
    "cpu_lengths.svg": cpu_lengths,
    "cpu_ratios.svg": cpu_ratios,
    "cpu_first_calls.svg": cpu_first_calls,
    "block_masks.svg": block_masks,
    "metal_shares.svg": metal_shares,
}
"""Function that draws each file."""
