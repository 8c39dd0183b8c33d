"""The table covers every operation that is declared, and its text computes what it should.

For another target `computed` runs that target's code; nothing else here changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from anyflex_example.backend import ExampleBackend
from anyflex_example.mods import TORCH, Pairs, load_source, write_function

from anyflex.plugin import Node
from anyflex.testing import check_lowering

DECLARED = ExampleBackend.capabilities


def computed(nodes: Sequence[Node], wanted: Sequence[int], **given: Any) -> list[torch.Tensor]:
    """The nodes' values by the backend's own source."""
    (position,) = wanted
    call: Any = SimpleNamespace(query=torch.empty(0), **given)
    source = f"import torch\nfrom math import inf, nan\n{write_function('f', nodes, position)}"
    return [load_source(source)["f"](Pairs(call, given["inputs"], check=False))]


def test_the_table_has_what_is_declared_and_no_key_that_is_no_operation() -> None:
    assert DECLARED.operations <= TORCH.operations()
    assert len(TORCH.problems()) == len(TORCH.missing()), TORCH.problems()


def test_every_declared_operation_of_every_declared_type_computes_what_torch_does() -> None:
    check_lowering(computed, operations=DECLARED.operations, dtypes=DECLARED.node_dtypes)
