"""Wrong uses of PagedKVCache: each names the argument, what is required and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflex.errors import AnyflexError, ArgumentError, ArgumentTypeError
from anyflex.packed.packed import Step
from anyflex.paging.cache import PagedKVCache

__all__: list[str] = []

SIZES: dict[str, Any] = {
    "layers": 2,
    "pages": 8,
    "page_size": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "value_head_dim": 6,
    "slots": 4,
    "width": 4,
    "dtype": torch.float32,
}

WRONG_CACHES: dict[str, tuple[dict[str, Any], type[AnyflexError], str]] = {
    "no page size": ({"page_size": 0}, ArgumentError, "page_size must be at least 1, got 0"),
    "negative page size": ({"page_size": -4}, ArgumentError, "page_size must be at least 1"),
    "page size as text": ({"page_size": "16"}, ArgumentTypeError, "page_size must be an int"),
    "no slots": ({"slots": 0}, ArgumentError, "slots must be at least 1, got 0"),
    "no layers": ({"layers": 0}, ArgumentError, "layers must be at least 1"),
    "no pages": ({"pages": 0, "width": None}, ArgumentError, "pages must be at least 1"),
    "no width": ({"width": 0}, ArgumentError, "width must be at least 1"),
    "no value dim": ({"value_head_dim": 0}, ArgumentError, "value_head_dim must be at least 1"),
    "float as dim": ({"head_dim": 8.0}, ArgumentTypeError, "head_dim must be an int, got float"),
    "long sequences": ({"width": 2**29}, ArgumentError, "width . page_size must be at most"),
    "large table": ({"width": 2**28, "slots": 8}, ArgumentError, "slots . width less than"),
    "unknown storage": (
        {"storage": "fp4"},
        ArgumentError,
        "storage must be one of plain, int8.*got 'fp4'",
    ),
    "stored dtype": ({"dtype": torch.int8}, ArgumentTypeError, "dtype must be that of the keys"),
    "no numbers": ({"device": "meta"}, ArgumentError, "device must hold numbers, got meta"),
}


@pytest.mark.parametrize("name", WRONG_CACHES)
def test_a_cache_that_cant_be_made_is_refused(name: str) -> None:
    changed, error, match = WRONG_CACHES[name]
    with pytest.raises(error, match=match):
        PagedKVCache(**{**SIZES, **changed})


def stepped(cache: PagedKVCache, tokens: int = 3) -> tuple[int, Step]:
    slot = cache.open()
    step = cache.step([(slot, tokens)])
    assert step is not None
    return slot, step


def rows(tokens: int = 3, heads: int = 2, dim: int = 8, **options: Any) -> Tensor:
    return torch.zeros(tokens, heads, dim, **options)


VALUE = rows(dim=6)
Append = Callable[[PagedKVCache, Step], Any]

WRONG_ROWS: dict[str, tuple[Append, type[AnyflexError], str]] = {
    "few tokens": (
        lambda c, s: c.append(s, 0, rows(2), rows(2, dim=6)),
        ArgumentError,
        "key must have a row for each of the step's 3 tokens, got 2",
    ),
    "fewer values": (
        lambda c, s: c.append(s, 0, rows(), rows(2, dim=6)),
        ArgumentError,
        "value must have the 3 rows of key, got 2",
    ),
    "more values": (
        lambda c, s: c.append(s, 0, rows(), rows(4, dim=6)),
        ArgumentError,
        "value must have the 3 rows of key, got 4",
    ),
    "dtype of key": (
        lambda c, s: c.append(s, 0, rows(dtype=torch.float16), VALUE),
        ArgumentTypeError,
        "key must have the cache's dtype torch.float32, got torch.float16",
    ),
    "dtype of value": (
        lambda c, s: c.append(s, 0, rows(), VALUE.double()),
        ArgumentTypeError,
        "value must have the cache's dtype torch.float32, got torch.float64",
    ),
    "device of key": (
        lambda c, s: c.append(s, 0, rows(device="meta"), VALUE),
        ArgumentError,
        "key must be on cpu, got meta",
    ),
    "heads first": (
        lambda c, s: c.append(s, 0, rows().transpose(0, 1), VALUE),
        ArgumentError,
        r"key must have shape \[T, 2, 8\], got \[2, 3, 8\]",
    ),
    "dim of value": (
        lambda c, s: c.append(s, 0, rows(), rows()),
        ArgumentError,
        r"value must have shape \[T, 2, 6\]",
    ),
    "batch dimension": (
        lambda c, s: c.append(s, 0, rows()[None], VALUE),
        ArgumentError,
        r"key must have shape \[T, 2, 8\], got \[1, 3, 2, 8\]",
    ),
    "no tensor": (
        lambda c, s: c.append(s, 0, None, VALUE),  # type: ignore[arg-type]
        ArgumentTypeError,
        "key must be a Tensor, got NoneType",
    ),
    "grad": (
        lambda c, s: c.append(s, 0, rows(requires_grad=True), VALUE),
        ArgumentError,
        "key requires grad.*torch.no_grad",
    ),
    "layer": (
        lambda c, s: c.append(s, 2, rows(), VALUE),
        ArgumentError,
        "layer must be from 0 to 1, got 2",
    ),
    "layer from the end": (
        lambda c, s: c.attend(s, -1, rows()),
        ArgumentError,
        "layer must be from 0 to 1, got -1",
    ),
    "layer as text": (
        lambda c, s: c.append(s, "0", rows(), VALUE),  # type: ignore[arg-type]
        ArgumentTypeError,
        "layer must be an int, got str",
    ),
    "no step": (
        lambda c, s: c.append(None, 0, rows(), VALUE),  # type: ignore[arg-type]
        ArgumentTypeError,
        "step must be a Step, got NoneType",
    ),
    "batch for step": (
        lambda c, s: c.attend(s.packed, 0, rows()),  # type: ignore[arg-type]
        ArgumentTypeError,
        "step must be a Step, got Packed",
    ),
    "step of another cache": (
        lambda c, s: c.append(stepped(PagedKVCache(**SIZES))[1], 0, rows(), VALUE),
        ArgumentError,
        "step is of another cache",
    ),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_what_doesnt_fit_the_cache_or_its_step_is_refused(name: str) -> None:
    call, error, match = WRONG_ROWS[name]
    cache = PagedKVCache(**SIZES)
    _, step = stepped(cache)
    cache.key.fill_(1.5)
    with pytest.raises(error, match=match):
        call(cache, step)
    assert (cache.key == 1.5).all()


def test_rows_that_require_grad_are_taken_where_none_is_recorded() -> None:
    cache = PagedKVCache(**SIZES)
    _, step = stepped(cache)
    with torch.no_grad():
        cache.append(step, 0, rows(requires_grad=True), VALUE)


ENDS: dict[str, Callable[[PagedKVCache, int], Any]] = {
    "the next step": lambda cache, slot: cache.step([(slot, 3)]),
    "trimming its sequence": lambda cache, slot: cache.trim(slot, 1),
    "closing its sequence": lambda cache, slot: cache.close(slot),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_step_is_over_once_its_pages_may_have_other_owners(name: str) -> None:
    cache = PagedKVCache(**SIZES)
    slot, step = stepped(cache)
    ENDS[name](cache, slot)
    for call in (
        lambda: cache.append(step, 0, rows(), VALUE),
        lambda: cache.attend(step, 0, rows()),
        lambda: cache.positions(step, 3),
    ):
        with pytest.raises(ArgumentError, match="step is over: `step` was called since, or one"):
            call()
    if name != "the next step":
        with pytest.raises(ArgumentError, match="begin: there is no step, or a sequence of it"):
            cache.begin()


KEEPS: dict[str, Callable[[PagedKVCache, int, int], Any]] = {
    "trimming nothing": lambda cache, slot, other: cache.trim(slot, 3),
    "closing another sequence": lambda cache, slot, other: cache.close(other),
    "a fork": lambda cache, slot, other: cache.open(slot),
    "a step without pages": lambda cache, slot, other: cache.step([(slot, 13), (other, 16)]),
    "another pass": lambda cache, slot, other: cache.begin(),
}


@pytest.mark.parametrize("name", KEEPS)
def test_a_step_goes_on_where_its_pages_stay_its_own(name: str) -> None:
    cache = PagedKVCache(**{**SIZES, "pages": 7})
    other = cache.open()
    slot, step = stepped(cache)
    if name == "a step without pages":
        assert KEEPS[name](cache, slot, other) is None
    else:
        KEEPS[name](cache, slot, other)
    cache.append(step, 0, rows(), VALUE)


def test_a_pass_needs_a_step() -> None:
    with pytest.raises(ArgumentError, match="begin: there is no step"):
        PagedKVCache(**SIZES).begin()


def test_a_step_inside_of_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyflex.errors import GraphCaptureError
    from anyflex.paging import cache as module

    cache = PagedKVCache(**SIZES)
    slot = cache.open()
    monkeypatch.setattr(module, "is_capturing", lambda device_type: True)
    with pytest.raises(GraphCaptureError, match="call it before the capture, and `begin` inside"):
        cache.step([(slot, 1)])
    assert cache.length(slot) == 0
