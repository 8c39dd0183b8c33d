"""A PNG file of the loss: with matplotlib, which extra ``demo`` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["plot_loss", "plotting_available"]


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
