"""The picture of the loss, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from packed_training.plots import plot_loss


def test_a_png_file_of_the_loss_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra demo is not installed")
    plot_loss([5.0, 4.0, 3.5], (5.5, 3.4), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
