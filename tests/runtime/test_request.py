"""The request: one printable line, whatever it tells of a call, read back as it was written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import anyflex
from anyflex.runtime.op_request import Request, read_request, write_request
from anyflex.runtime.saved_for_backward import NOTHING
from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Sizes

__all__: list[str] = []

# All at which str.splitlines ends a line, a tab, quotes, a backslash and letters beyond ASCII.
ODD = [
    "a\n",
    "\r",
    "\r\n",
    "\x0b",
    "\x0c",
    "\x1c\x1d\x1e",
    "\x85",
    "\u2028\u2029",
    "\t",
    "'\"",
    "\\n",
]
ODD += ["é", "|", ";", "=", ", ", "anyflex-request-5", ""]
OPTIONS: list[Any] = [*ODD, True, False, 0, -3, 10**30, 1.0, 0.1, -0.0, 1e-300]
SIZES = Sizes(2, 4, 2, 21, 37)


def is_one_line(text: str) -> bool:
    return text.splitlines() == [text] and text.isprintable()


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_odd_texts_stay_in_one_line(text: str) -> None:
    wanted = Request(
        "input f32 - score;=0",
        "",
        (1, 2, 3),
        True,
        False,
        True,
        (True, False, True, False),
        text,
        ((text, text), ("cpu", ((text, 1), ("mods", text)))),
        (text, text),
        (3, 4),
        "highest",
    )
    written = write_request(wanted)
    assert is_one_line(written)
    assert read_request(written) == wanted


@pytest.mark.parametrize("value", OPTIONS, ids=ascii)
def test_options_are_read_as_they_were_written(value: Any) -> None:
    options = (("cpu", (("own", value),)), ("option", value))
    flags = (True,) * 3
    written = write_request(
        Request("", "", (0, 0, 0), *flags, flags, None, options, None, NOTHING, "highest")
    )
    assert is_one_line(written)
    assert repr(read_request(written).options) == repr(options)  # 1, 1.0 and True are equal


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="a request of format 'anyflex-request-3', this anyflex"):
        read_request("anyflex-request-3\n\n\n0 0 0\n000\n000\n0 0\nhighest\n")


class Requests(TorchDispatchMode):
    """Sends calls through the operation, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is torch.ops.anyflex.flex_attention.default:
            self.texts.append(arguments[-1])
        return function(*arguments, **(options or {}))


def requests_of(score: Callable[..., Any] | None, mask: Any, options: Any) -> list[str]:
    query, key = torch.ones(2, 4, 21, 8), torch.ones(2, 2, 37, 8)
    with Requests() as seen:
        anyflex.flex_attention(
            query,
            key,
            key,
            score,
            mask,
            enable_gqa=True,
            kernel_options=options,
            backend="reference",
        )
    return seen.texts


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_the_request_of_every_mod_is_one_line() -> None:
    generator = torch.Generator().manual_seed(4)
    options = itertools.cycle([None, {"num_warps": 4}, {"cpu": {"mods": "interpreter"}}])
    for make in SCORE_MODS.values():
        score = make.make(SIZES, generator).function()
        (text,) = requests_of(score, None, next(options))
        assert is_one_line(text), text
    for make in MASK_MODS.values():
        mask = anyflex.create_block_mask(
            make.make(SIZES, generator).function(), 2, 4, 21, 37, BLOCK_SIZE=16
        )
        (text,) = requests_of(None, mask, next(options))
        assert is_one_line(text), text
