"""Export, save, load in a fresh process, run at a new length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyflex
from anyflex.errors import ArgumentError, BackendRefused, BlockMaskError

__all__: list[str] = []


class Attention(nn.Module):
    """A captured parameter, a captured table and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.slope = nn.Parameter(torch.randn(2) * 0.1)
        self.register_buffer("table", torch.randn(300))
        self.weight = 0.25

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any = None) -> Tensor:
        """query: [1, 2, L, 8]."""
        slope, table, weight = self.slope, self.table, self.weight
        return anyflex.flex_attention(
            query,
            key,
            value,
            lambda s, b, h, q, k: s + slope[h] * (k - q) + weight * table[k],
            block_mask,
        )


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn((1, 2, length, 8), generator=generator) for _ in "qkv"]


def causal_mask(length: int) -> Any:
    return anyflex.create_block_mask(
        lambda b, h, q, k: q >= k, 1, 1, length, length, BLOCK_SIZE=32
    )


class Packed(nn.Module):
    """Builds its mask itself."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        length = query.shape[2]
        ids = torch.arange(length) // 40
        mask = anyflex.create_block_mask(
            lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), 1, 1, length, length, BLOCK_SIZE=32
        )
        return anyflex.flex_attention(query, key, value, block_mask=mask)


LENGTHS = ({2: torch.export.Dim("length", min=2, max=300)},) * 3


def at_a_new_length() -> tuple[Any, list[Any], Tensor]:
    model, arguments = Attention(), inputs(131)
    program = torch.export.export(model, tuple(inputs(90)), dynamic_shapes=LENGTHS)
    return program, arguments, model(*arguments).detach()


def with_a_block_mask() -> tuple[Any, list[Any], Tensor]:
    model, arguments = Attention(), [*inputs(96), causal_mask(96)]
    program = torch.export.export(model, (*inputs(96), causal_mask(96)))
    return program, arguments, model(*arguments).detach()


def with_a_mask_of_its_own() -> tuple[Any, list[Any], Tensor]:
    model, arguments = Packed(), inputs(131)
    program = torch.export.export(model, tuple(inputs(90)), dynamic_shapes=LENGTHS)
    return program, arguments, model(*arguments)


MODELS = (at_a_new_length, with_a_block_mask, with_a_mask_of_its_own)
LOAD = """
import sys
import torch
import anyflex
from torch.export import load
for name in sys.argv[1:]:
    arguments, wanted = torch.load(f"{name}.pt", weights_only=False)
    found = load(f"{name}.pt2").module()(*arguments)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    print(name)
"""


def test_exported_models_give_the_same_in_a_fresh_process(tmp_path: Path) -> None:
    names = []
    for make in MODELS:
        program, arguments, wanted = make()
        names.append(make.__name__)
        torch.export.save(program, tmp_path / f"{names[-1]}.pt2")
        torch.save((arguments, wanted), tmp_path / f"{names[-1]}.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == names, done.stderr


class Grouped(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Buffer(bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Any:
        return anyflex.flex_attention(
            query, key, value, lambda s, b, h, q, k: s + self.bias[h], mask, enable_gqa=True
        )


def shifted_mask(batch: int) -> Any:
    return anyflex.create_block_mask(
        lambda b, h, q, k: q >= k - b * h, batch, 4, 32, 32, BLOCK_SIZE=16
    )


def other_offsets(given: dict[str, Tensor]) -> None:
    mask = shifted_mask(3)
    given["offsets"], given["runs"] = mask.offsets, mask.runs


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": (2, 8, 32, 8), "value": (2, 8, 32, 8)}, ArgumentError, "query has 4 heads and"),
        ({"key": (2, 3, 32, 8), "value": (2, 3, 32, 8)}, ArgumentError, "must be a multiple of"),
        ({"key": (2, 0, 32, 8), "value": (2, 0, 32, 8)}, ArgumentError, "at least one head"),
        ({"key": (3, 2, 32, 8), "value": (3, 2, 32, 8)}, ArgumentError, "must be 1 or B"),
        ({"key": (2, 2, 32, 4)}, ArgumentError, "must have one head dim E, got 8 and 4"),
        ({"value": (2, 4, 32, 8)}, ArgumentError, "must have one number of heads H, got 2 and 4"),
        ({"value": (2, 2, 31, 8)}, ArgumentError, "must have one length S, got 32 and 31"),
        (other_offsets, BlockMaskError, "block_mask has batch B' = 3, the call has B = 2"),
        ({"bias": (4, 4)}, ArgumentError, "captured tensor 0 must have 1 dimensions, got shape"),
    ],
)
def test_the_graph_of_an_exported_model_refuses_shapes_that_fit_no_call(
    change: Any, error: type[Exception], message: str
) -> None:
    """Only `ExportedProgram.module` checks what a program is given, and not its graph."""
    generator = torch.Generator().manual_seed(0)
    mask = shifted_mask(2)
    given = {
        "bias": torch.zeros(4),
        "query": torch.randn(2, 4, 32, 8, generator=generator),
        "key": torch.randn(2, 2, 32, 8, generator=generator),
        "value": torch.randn(2, 2, 32, 8, generator=generator),
        "offsets": mask.offsets,
        "runs": mask.runs,
    }
    model = Grouped(given["bias"])
    arguments = (given["query"], given["key"], given["value"], mask)
    graph = torch.export.export(model, arguments).graph_module
    # The graph takes the mask's lengths too, and doesn't read them.
    rest = [32] * (len(graph.graph.find_nodes(op="placeholder")) - len(given))
    torch.testing.assert_close(graph(*given.values(), *rest)[0], model(*arguments))
    if callable(change):
        change(given)
    else:
        for name, new in change.items():
            given[name] = torch.randn(new)
    with pytest.raises(error, match=message):
        graph(*given.values(), *rest)


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning"
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_trace_by_torch_jit_is_refused_and_leaves_eager_calls_as_they_are(masked: bool) -> None:
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40)

    def attend(*tensors: Tensor) -> Tensor:
        found = anyflex.flex_attention(*tensors, block_mask=mask if masked else None)
        assert isinstance(found, Tensor)
        return found

    tensors = inputs(40)
    before = attend(*tensors)
    with pytest.raises(BackendRefused, match="torch.jit.trace is not supported: use torch.export"):
        torch.jit.trace(attend, tuple(tensors))
    assert torch.equal(attend(*tensors), before)
