"""What torch allows products of float32 to be rounded to, whichever of its ways says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import anyflex
from anyflex.runtime.facts import fp32_precision


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Torch's settings, all as in a new process again."""
    yield
    torch.set_float32_matmul_precision("highest")
    for owner in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends):
        owner.fp32_precision = "none"


def of_all(precision: str) -> None:
    torch.backends.fp32_precision = precision


def of_cuda(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision


def of_onednn(precision: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = precision


def high_then_whole(precision: str) -> None:
    torch.set_float32_matmul_precision("high")
    of_cuda(precision)


@pytest.mark.parametrize(
    ("say", "precision", "on_cuda", "elsewhere"),
    [
        (torch.set_float32_matmul_precision, "highest", "highest", "highest"),
        (torch.set_float32_matmul_precision, "high", "high", "high"),
        # CUDA's products are rounded to TF32 at most.
        (torch.set_float32_matmul_precision, "medium", "high", "medium"),
        (of_all, "ieee", "highest", "highest"),
        (of_all, "tf32", "high", "high"),
        (of_cuda, "tf32", "high", "highest"),
        (of_onednn, "bf16", "highest", "medium"),
        (high_then_whole, "ieee", "highest", "high"),
    ],
)
def test_the_setting_of_the_device_counts(
    say: Callable[[str], None], precision: str, on_cuda: str, elsewhere: str
) -> None:
    say(precision)
    assert fp32_precision(torch.float32, "cuda") == on_cuda
    assert fp32_precision(torch.float32, "cpu") == elsewhere
    assert fp32_precision(torch.float32, "xpu") == elsewhere
    assert fp32_precision(torch.bfloat16, "cuda") == fp32_precision(torch.float64, "cpu") == ""


def test_calls_take_settings_that_torchs_own_question_raises_for() -> None:
    of_cuda("tf32")
    with pytest.raises(RuntimeError, match="legacy and new APIs"):
        torch.get_float32_matmul_precision()
    query = torch.randn(1, 2, 17, 16, requires_grad=True)
    anyflex.flex_attention(query, query, query).sum().backward()
    assert query.grad is not None
    assert anyflex.explain(query, query, query).backend is not None
