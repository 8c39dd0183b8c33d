"""The documentation's table holds all spellings of the list; its entries exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from anyflex.tracing.torch_functions import FACTS
from anyflex.tracing.trace import trace_mod
from scripts.generated_tables import spellings
from tests.spellings.accepted import ACCEPTED, Spelling

__all__: list[str] = []

# Python's own, asked of types and of captured tensors, which aren't symbols.
NOT_OF_SYMBOLS = {
    "torch.": {"finfo", "iinfo", "is_tensor", "promote_types"},
    "x.": {"t", "view", "log"},
}
CALLED = re.compile(r"(torch\.special\.|torch\.|F\.|math\.|operator\.|\.)([a-z]\w*)\(")
SPACES = {
    "torch.": "`torch.`",
    "torch.special.": "`torch.special.`",
    "F.": "`torch.nn.functional.`",
    ".": "methods: `x.name()`",
}


def known() -> dict[str, set[str]]:
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", spellings(), flags=re.MULTILINE)
    return {label: set(re.findall(r"`([^`]+)`", names)) for label, names in rows}


@pytest.mark.parametrize("spelling", ACCEPTED, ids=str)
def test_the_table_names_what_a_spelling_calls(spelling: Spelling) -> None:
    table = known()
    for space, name in CALLED.findall(spelling.expression):
        outside = NOT_OF_SYMBOLS.get("x." if space == "." else space, set())
        if space in SPACES and name not in outside:
            assert name in table[SPACES[space]], f"{space}{name}"


def test_the_facts_of_a_symbol() -> None:
    seen: dict[str, Any] = {}

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for fact in FACTS:
            value = getattr(s, fact.removesuffix("()"))
            seen[fact] = value() if fact.endswith("()") else value
        return s

    trace_mod(mod, "score")
    assert seen == {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "shape": torch.Size(()),
        "ndim": 0,
        "requires_grad": False,
        "dim()": 0,
        "size()": torch.Size(()),
        "numel()": 1,
        "is_floating_point()": True,
    }
