"""PNG files of the block mask and of the loss: with matplotlib, which extra ``demo`` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anyflex.block_mask.runs import FULL

if TYPE_CHECKING:
    from anyflex import BlockMask

__all__ = ["block_kinds", "plot_block_mask", "plot_loss", "plotting_available"]


def plotting_available() -> bool:
    """Tell whether matplotlib is installed."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def plot_loss(losses: Sequence[float], held_out: tuple[float, float], path: Path) -> None:
    """Draw the training loss by step, and the held-out loss before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training")
    axes.plot([0, len(losses)], held_out, "o", color="black", label="held out, before and after")
    axes.set(xlabel="step", ylabel="loss, nats a byte", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_block_mask(mask: BlockMask, path: Path) -> None:
    """Draw the blocks of the mask's first batch entry and head: not visited, partial, full."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colors = ("#f4f4f4", "#8fb8de", "#1f4e79")
    figure = Figure(figsize=(5.5, 5.5), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        block_kinds(mask), cmap=ListedColormap(colors), vmin=0, vmax=2, interpolation="nearest"
    )
    q_size, kv_size = mask.BLOCK_SIZE
    axes.set(
        title=f"{mask.sparsity():.0f} % of the blocks are not visited",
        xlabel=f"blocks of {kv_size} keys",
        ylabel=f"blocks of {q_size} queries",
    )
    names = ("not visited", "partial: the mask function decides", "full")
    figure.legend(
        handles=[
            Patch(color=color, label=name) for color, name in zip(colors, names, strict=True)
        ],
        loc="outside lower center",
        ncols=3,
        fontsize="small",
    )
    figure.savefig(path, dpi=120)


def block_kinds(mask: BlockMask) -> list[list[int]]:
    """Return 0 (not visited), 1 (partial) or 2 (full) for each block."""
    views = mask.views()
    kinds = views.kind_rows(0, views.q_blocks)[0, 0]
    rows: list[list[int]] = torch.where(kinds == FULL, 2, (kinds != 0).int()).tolist()
    return rows
