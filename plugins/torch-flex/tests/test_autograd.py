"""Autograd inside of an operator."""

from __future__ import annotations

import pytest
import torch
from anyflex_torch_flex.kernel import autograd_records, in_another_thread
from torch import Tensor

CPU = torch.device("cpu")


def test_an_operator_is_noticed_and_another_thread_records() -> None:
    seen = []

    @torch.library.custom_op("anyflex_torch_flex_tests::look", mutates_args=())
    def look(tensor: Tensor) -> Tensor:
        seen.append(autograd_records())
        in_another_thread(CPU, lambda: seen.append(autograd_records()))
        return tensor.clone()

    look(torch.ones(2, requires_grad=True))
    assert seen == [False, True]
    assert autograd_records()
    with torch.no_grad():
        assert autograd_records()


def test_what_is_raised_there_is_raised_here() -> None:
    def fail() -> None:
        raise ZeroDivisionError("there")

    with pytest.raises(ZeroDivisionError, match="there"):
        in_another_thread(CPU, fail)
