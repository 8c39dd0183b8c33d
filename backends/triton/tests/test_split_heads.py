"""Backward of KV heads that many query heads share: splits of the query heads have programs of
their own, and their sums are added up in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from triton.runtime import interpreter

from anyflex_triton import kernel
from anyflex_triton.backend import TritonBackend
from anyflex_triton.backward_call import key_sums_specs
from anyflex_triton.program import Program

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    with isolated(), posing("cuda"):
        register("cuda.mine", TritonBackend)
        # New tensors then hold NaN.
        torch.use_deterministic_algorithms(True)
        yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mapping[str, Any]]:
    """Record the arguments of the last launch of each kernel."""
    seen: dict[str, Mapping[str, Any]] = {}
    launch = Program.launch

    def note(
        program: Program, grid: int, device: torch.device, values: Mapping[str, object]
    ) -> None:
        seen[program.function.__name__] = values
        launch(program, grid, device, values)

    monkeypatch.setattr(Program, "launch", note)
    return seen


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + 30 >= k) & (k != 3)


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0) + 0.01 * (h - k)


def dense(query: Tensor, key: Tensor, value: Tensor, masked: bool, scored: bool) -> Tensor:
    batch, heads, rows, width = query.shape
    group = heads // key.shape[1]
    key, value = (x.expand(batch, *x.shape[1:]).repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.mT / width**0.5
    h = torch.arange(heads)[:, None, None]
    i, j = torch.arange(rows)[:, None], torch.arange(key.shape[2])
    if scored:
        scores = softcap(scores, 0, h, i, j)
    if masked:
        scores = scores.masked_fill(~causal(0, h, i, j), -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize(
    ("batch", "kv_batch", "kv_heads", "group", "dims", "wanted", "cores", "splits"),
    [
        (1, 1, 1, 32, (16, 16), "qkv", 3, 6),
        (2, 2, 1, 8, (16, 32), "qkv", 4, 4),
        (1, 1, 3, 8, (32, 16), "kv", 4, 2),
        (3, 1, 1, 3, (16, 16), "qkv", 3, 5),
        (1, 1, 1, 7, (16, 16), "v", 4, 7),
        (1, 1, 1, 7, (144, 16), "k", 4, 7),
    ],
)
@pytest.mark.parametrize(("masked", "scored"), [(True, True), *([(False, False)] if SOAK else [])])
def test_splits_give_the_dense_formulas_gradients_in_any_order_of_programs(
    monkeypatch: pytest.MonkeyPatch,
    launched: dict[str, Mapping[str, Any]],
    batch: int,
    kv_batch: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    wanted: str,
    cores: int,
    splits: int,
    masked: bool,
    scored: bool,
) -> None:
    monkeypatch.setattr(kernel, "cores", lambda device: cores)
    q = randn(batch, kv_heads * group, 37, dims[0], seed=0)
    k, v = (randn(kv_batch, kv_heads, 71, width, seed=width) for width in dims)
    leaves = dict(zip("qkv", (q, k, v), strict=True))
    chosen = [leaves[name].requires_grad_() for name in wanted]
    mask = anyflex.create_block_mask(causal, None, None, 37, 71) if masked else None
    dout = randn(batch, kv_heads * group, 37, dims[1], seed=1)

    def gradients() -> tuple[Tensor, ...]:
        out = anyflex.flex_attention(
            q, k, v, softcap if scored else None, mask, enable_gqa=True, backend="cuda.mine",
            kernel_options={"cuda.mine": {"dkv_block_n": 64}},
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, chosen, dout)

    found = gradients()
    assert launched["sum_kernel"]["head_splits"] == splits
    assert launched["key_kernel"]["split_heads"] == -(-(batch * group // kv_batch) // splits)
    wide = [leaf.detach().double().requires_grad_() for leaf in (q, k, v)]
    used = [wide["qkv".index(name)] for name in wanted]
    right = torch.autograd.grad(dense(*wide, masked, scored), used, dout.double())
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)

    builder = interpreter.interpreter_builder
    ordered = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: ordered(builder.grid_dim[0] - 1 - x, y, z)
    )
    assert all(map(torch.equal, gradients(), found))


@pytest.mark.parametrize(
    ("query", "key", "splits"),
    [
        # Long query heads: 8 tiles a multiprocessor.
        ((2, 32, 8192), (2, 1, 8192), 8),
        ((2, 32, 8192), (2, 2, 8192), 4),
        # Short ones: 4.
        ((4, 32, 2048), (4, 1, 2048), 8),
        ((1, 32, 3000), (1, 8, 3000), 2),
        ((1, 32, 512), (1, 1, 512), 32),
        # Splits have equally many heads but for the last one, and none is empty.
        ((1, 9, 512), (1, 1, 8192), 5),
        # Keys of all batch entries.
        ((4, 8, 512), (1, 8, 512), 4),
        # Enough tiles, or one query head.
        ((4, 32, 8192), (4, 8, 8192), None),
        ((1, 32, 4096), (1, 8, 4096), None),
        ((1, 8, 512), (1, 8, 512), None),
        ((0, 8, 512), (0, 1, 512), None),
        ((1, 8, 512), (1, 1, 0), None),
    ],
)
def test_kv_heads_are_split_where_there_are_few_tiles(
    query: tuple[int, ...], key: tuple[int, ...], splits: int | None
) -> None:
    specs = key_sums_specs(query, key, 128, key[2], 256, 132)
    found = [spec.shape for spec in specs]
    assert found == ([] if splits is None else [(key[0] * key[1], splits, key[2], 256)])
