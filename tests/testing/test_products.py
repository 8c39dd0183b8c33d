"""Float32 products may be rounded while something runs; then torch's settings are as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from anyflex.tensors.tensor_facts import fp32_precision
from anyflex.testing.float32_precision import products_in
from tests.float32_settings import OWNERS, forget, high_but_for_cuda, of_all, of_cuda


def nothing() -> None:
    """A new process."""


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    forget()


def allowed() -> tuple[str, ...]:
    """Precision of CUDA's products, and of others."""
    return tuple(fp32_precision(torch.float32, device_type) for device_type in ("cuda", "cpu"))


def told() -> tuple[str, ...]:
    """Settings by torch's function, "" where it raises, and of the backends."""
    try:
        word = torch.get_float32_matmul_precision()
    except RuntimeError:
        word = ""
    return (word, *(owner.fp32_precision for owner in OWNERS))


@pytest.mark.parametrize("tell", [nothing, of_cuda, of_all, high_but_for_cuda])
@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("highest", ("highest", "highest")),
        ("high", ("high", "high")),
        ("medium", ("high", "medium")),
    ],
)
def test_products_are_so_within_and_as_before_afterwards(
    tell: Callable[[], None], precision: str, wanted: tuple[str, ...]
) -> None:
    tell()
    before = told()
    with pytest.raises(ValueError, match="of the body"), products_in(precision):
        assert allowed() == wanted
        raise ValueError("of the body")
    assert told() == before


def test_what_is_so_already_is_not_told_again() -> None:
    before = told()
    with products_in("highest"):
        assert told() == before


def test_what_the_body_changes_is_undone() -> None:
    before = told()
    with products_in("highest"):
        torch.set_float32_matmul_precision("medium")
    assert told() == before
