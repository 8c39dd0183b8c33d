"""AOTInductor: a package of an exported model, loaded in a fresh process, gives the results of
eager calls.

Compiling a package takes half a minute whatever its content, so one model makes all calls.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyflex
from tests.soak import SOAK

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler, g++"
)

LENGTH = 96
"""Length of queries and keys in every call with a block mask, in elements."""
SLOPE, SHIFT = 0.25, 3

Inputs = list[list[Tensor]]
"""Query, key and value of the calls without a mask, [B, 2, L, 8], and of those with one."""
SIZES = ("static", "dynamic length without and batch with")
MASKS = (
    "no mask",
    "a mask as an argument",
    "a mask as an argument with a captured tensor",
    "a mask of the module",
    "a mask of the module with a captured tensor",
)
# The length is a symbol where it is dynamic.
SCORES: dict[str, Callable[[Tensor, Any], Callable[..., Any] | None]] = {
    "none": lambda table, length: None,
    "plain": lambda table, length: lambda s, b, h, q, k: s - (q - k).abs(),
    "captured": lambda table, length: lambda s, b, h, q, k: s + table[h, (q - k).abs()],
    "ints": lambda table, length: lambda s, b, h, q, k: s + (q + SHIFT) % length,
    "captured and numbers": lambda table, length: (
        lambda s, b, h, q, k: s + SLOPE * table[h, (q + SHIFT) % length]
    ),
}
GRADIENTS = [f"gradient of {name}" for name in ("query", "key", "value", "the captured tensor")]
CASES = [
    f"{size} {mask}, score {score}"
    for i, size in enumerate(SIZES)
    for j, mask in enumerate(MASKS)
    for k, score in enumerate(SCORES)
    if SOAK or (i + j + k) % 3 == 0  # each size with each mask and with each score
]
BUILT = [f"{size} {mask}" for size in SIZES for mask in ("a mask built inside", "rows of it")]


class Attention(nn.Module):
    """Every mask with every score mod, and gradients."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.register_buffer("table", torch.randn((2, 300), generator=generator))
        self.masks = [causal(), documents(30)]

    def forward(
        self, static: Inputs, dynamic: Inputs, masks: list[anyflex.BlockMask], learned: Tensor
    ) -> dict[str, Tensor]:
        """learned: [2, 300]."""
        found = {}
        for size, (free, masked) in zip(SIZES, (static, dynamic), strict=True):
            for name, mask in zip(MASKS, [None, *masks, *self.masks], strict=True):
                query, key, value = free if mask is None else masked
                for score, make in SCORES.items():
                    if (case := f"{size} {name}, score {score}") in CASES:
                        mod = make(self.table, query.shape[2])
                        found[case] = anyflex.flex_attention(query, key, value, mod, mask)
            built = packed(free[0].shape[2])
            found[f"{size} a mask built inside"] = anyflex.flex_attention(*free, None, built)
            rows = [free[0][:, :, 40:60], *free[1:]]
            sliced = built.row_slice(40, 60)
            found[f"{size} rows of it"] = anyflex.flex_attention(*rows, None, sliced)
        mod = SCORES["captured"](learned, None)
        out, lse = anyflex.flex_attention(*static[0], mod, return_lse=True)
        given = anyflex.flex_attention_backward(
            out.sign() / 16, *static[0], out, lse, score_mod=mod
        )
        ((_, captured),) = given.captured
        gradients = given.query, given.key, given.value, captured
        return {**found, **dict(zip(GRADIENTS, gradients, strict=True))}


def causal() -> anyflex.BlockMask:
    return block_mask(lambda b, h, q, k: q >= k)


def documents(length: int) -> anyflex.BlockMask:
    """Documents of this length."""
    ids = torch.arange(LENGTH) // length
    return block_mask(lambda b, h, q, k: ids[q] == ids[k])


def packed(length: int) -> anyflex.BlockMask:
    """Two causal documents, for any length."""
    # Not arange // 30: Inductor of torch 2.13 leaves the end of that unwritten on a CPU.
    ids = (torch.arange(length) >= 47).long()
    return anyflex.create_block_mask(
        lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, length, length, BLOCK_SIZE=16
    )


def block_mask(mask_mod: Callable[..., Any]) -> anyflex.BlockMask:
    return anyflex.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)


def inputs(length: int, batch: int) -> Inputs:
    """Return inputs of calls without a mask, with this length, and of calls with one, with this
    batch."""
    generator = torch.Generator().manual_seed(length)
    sizes = (2, length), (batch, LENGTH)
    return [[torch.randn((b, 2, n, 8), generator=generator) for _ in "qkv"] for b, n in sizes]


LOAD = """
import sys
import torch
import anyflex
program = torch._inductor.aoti_load_package(sys.argv[1] + "/model.pt2")
arguments = torch.load(sys.argv[1] + "/arguments", weights_only=False)
torch.save(program(*arguments), sys.argv[1] + "/found")
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], ...]:
    """Return each case's results in a fresh process, and in an eager call here."""
    folder = tmp_path_factory.mktemp("aoti")
    model = Attention()
    learned = torch.randn((2, 300), requires_grad=True)
    traced = inputs(70, 2), inputs(70, 2), [causal(), documents(30)], learned
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=60, max=290)
    runs = torch.export.Dim("runs", max=100)
    dynamic = (
        [[None] * 3] * 2,
        [[{2: length}] * 3, [{0: batch}] * 3],
        # torch wants a list for a mask: its tensors and numbers.
        [[None] * 4, [None, {0: runs}, None, None, None]],
        None,
    )
    program = torch.export.export(model, traced, dynamic_shapes=dynamic)
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(folder / "model.pt2"),
        # Without optimizing and a precompiled header, which one package has no use for.
        inductor_configs={
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.precompile_headers": False,
        },
    )
    arguments = inputs(70, 2), inputs(131, 3), [causal(), documents(40)], learned
    torch.save(arguments, folder / "arguments")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found"), model(*arguments)


@pytest.mark.parametrize("case", [*CASES, *BUILT, *GRADIENTS])
def test_a_package_gives_in_a_fresh_process_what_eager_calls_give(
    case: str, results: tuple[dict[str, Tensor], ...]
) -> None:
    found, wanted = results
    torch.testing.assert_close(found[case], wanted[case], rtol=0, atol=1e-6)
