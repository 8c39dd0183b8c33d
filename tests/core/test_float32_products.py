"""Precision that torch allows for products of float32, whichever way it was set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import anyflex
from anyflex.tensors.tensor_facts import fp32_precision
from tests.float32_settings import forget, high_but_for_cuda, of_all, of_cuda, of_onednn


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    forget()


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
        (high_but_for_cuda, "ieee", "highest", "high"),
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
    of_cuda()
    with pytest.raises(RuntimeError, match="legacy and new APIs"):
        torch.get_float32_matmul_precision()
    query = torch.randn(1, 2, 17, 16, requires_grad=True)
    anyflex.flex_attention(query, query, query).sum().backward()
    assert query.grad is not None
    assert anyflex.explain(query, query, query).backend is not None
