"""Finer runs of a mask equal those of create_block_mask, and give the same attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.plugin import MaskViews, isolated, register
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from anyflex_triton import mask_refinement
from anyflex_triton.backend import TritonBackend
from anyflex_triton.program import Program

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Found = dict[str, tuple[Tensor, Tensor]]
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
OPTIONS = {
    "finer_mask": True, "block_m": 32, "block_n": 32, "dkv_block_m": 16, "dkv_block_n": 32,
    "dq_block_m": 64, "dq_block_n": 32,
}  # fmt: skip
TILES = {"forward": (32, 32), "keys": (16, 32), "queries": (64, 32)}


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with isolated(), posing("cuda"):
        register("cuda.mine", TritonBackend)
        yield


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Record edges and runs by the kernel that reads them."""
    seen: Found = {}
    decided: list[Mapping[str, object]] = []
    launched = Program.launch

    def noting(
        program: Program, grid: int, device: torch.device, values: Mapping[str, object]
    ) -> None:
        edges, runs = values.get("new_edges"), values.get("new_runs")
        if "new_edges" not in program.types:
            launched(program, grid, device, values)
            if "TRANSPOSED" in program.constants:
                decided.append(program.constants)
            return
        assert isinstance(edges, Tensor) and isinstance(runs, Tensor)
        # Unwritten runs are never read: they are -1 here.
        launched(program, grid, device, {**values, "new_runs": runs.fill_(-1)})
        # Runs come from the kinds that were decided just before.
        constants = decided.pop()
        if constants["TRANSPOSED"]:
            name = "keys"
        else:
            name = "forward" if constants["ROWS"] == 32 else "queries"
        seen[name] = edges, runs

    monkeypatch.setattr(Program, "launch", noting)
    return seen


def views_of(offsets: Tensor, runs: Tensor) -> MaskViews:
    return MaskViews(offsets, runs, 128, 128, (64, 64))


def test_rows_are_kept_with_the_mask_that_they_are_of() -> None:
    offsets = torch.tensor([[[0, 1, 2]]], dtype=torch.int32)
    runs = torch.tensor([[0, 1, 1], [0, 2, 1]], dtype=torch.int32)
    views, other = views_of(offsets, runs), views_of(offsets + 1, runs.clone())
    rows = mask_refinement.mask_rows(views)
    assert mask_refinement.mask_rows(views) is rows and rows.ends.tolist() == [[[1, 2]]]
    assert mask_refinement.mask_rows(other).ends.tolist() == [[[2, 3]]]
    assert mask_refinement.mask_rows(other).runs is other.runs
    assert mask_refinement.mask_rows(views.transposed()) is not rows
    # The rows are the mask's own memory, which may be written again.
    offsets += 5
    assert rows.offsets is offsets and rows.ends.tolist() == [[[6, 7]]]


def test_of_a_mask_that_must_be_copied_no_copy_is_kept() -> None:
    offsets = torch.tensor([[[0, 9, 1, 9, 2, 9]]], dtype=torch.int32)[..., ::2]
    views = views_of(offsets, torch.zeros(2, 3, dtype=torch.int32))
    assert mask_refinement.mask_rows(views).ends.tolist() == [[[1, 2]]]
    offsets += 5
    assert mask_refinement.mask_rows(views).ends.tolist() == [[[6, 7]]]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


IDS = (torch.arange(512) // 61 % 7).to(torch.int32)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (IDS[q] == IDS[k]) & (q >= k)


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k < 100) & (k - q < 30)


def dilated(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k) % 3 == 0


def nothing_at_first(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q > 200) & (k > 130)


@pytest.mark.parametrize(
    ("mask_mod", "rows", "keys"),
    [
        (causal, 256, 256),
        (documents, 300, 211),
        (window, 65, 400),
        (dilated, 140, 211),
        (nothing_at_first, 300, 150),
    ],
)
def test_runs_and_attention_are_those_of_finer_blocks(
    mask_mod: Mask, rows: int, keys: int, found: Found
) -> None:
    query, key, value = (
        randn(1, heads, length, 16).requires_grad_()
        for heads, length in ((2, rows), (1, keys), (1, keys))
    )
    mask = anyflex.create_block_mask(mask_mod, None, None, rows, keys)
    out = anyflex.flex_attention(
        query, key, value, None, mask, enable_gqa=True, backend="cuda.mine",
        kernel_options={"cuda.mine": OPTIONS},
    )  # fmt: skip
    assert isinstance(out, Tensor)
    dout = randn(1, 2, rows, 16)
    gradients = torch.autograd.grad(out, (query, key, value), dout)

    assert set(found) == set(TILES)
    for name, (edges, runs) in found.items():
        wanted = anyflex.create_block_mask(
            mask_mod, None, None, rows, keys, BLOCK_SIZE=TILES[name], exact=True
        ).views()
        if name == "keys":
            wanted = wanted.transposed()
        assert edges.shape[1] == wanted.q_blocks
        for row in range(wanted.q_blocks):
            begin, end = wanted.offsets[0, 0, row : row + 2].tolist()
            mine = runs.view(-1, 3)[edges[0, row] : edges[1, row]]
            assert mine.tolist() == wanted.runs[begin:end].tolist(), (name, row)

    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (query, key, value))
    zero = torch.tensor(0)
    live = mask_mod(zero, zero, torch.arange(rows)[:, None], torch.arange(keys))
    scores = (q @ k.mT / 4).masked_fill(~live, -torch.inf)
    weights = torch.where(live.any(1)[:, None], scores, 0.0).softmax(-1) * live
    right = weights @ v
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    wanted_gradients = torch.autograd.grad(right, (q, k, v), dout.double())
    for gradient, oracle in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), oracle, rtol=1e-5, atol=1e-5)


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k + 16 * h


@pytest.mark.parametrize("case", ["by head", "full", "blocks are tiles"])
def test_masks_that_stay_as_they_are(case: str, found: Found) -> None:
    query = randn(1, 2, 256, 16)
    if case == "full":
        mask = anyflex.BlockMask.from_runs(
            torch.tensor([[[0, 1, 2]]], dtype=torch.int32),
            torch.tensor([[0, 1, 1], [0, 2, 1]], dtype=torch.int32),
            seq_lengths=(256, 256),
        )
    else:
        mask_mod = by_head if case == "by head" else causal
        size = 32 if case == "blocks are tiles" else 128
        mask = anyflex.create_block_mask(mask_mod, None, 2, 256, 256, BLOCK_SIZE=size)
    options = {"cuda.mine": OPTIONS}
    out = anyflex.flex_attention(
        query, query, query, None, mask, backend="cuda.mine", kernel_options=options
    )
    other = anyflex.flex_attention(query, query, query, None, mask, backend="reference")
    assert isinstance(out, Tensor)
    assert isinstance(other, Tensor)
    torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-5)
    assert not found


@pytest.mark.parametrize(
    ("mask_mod", "least", "options", "decides"),
    [
        (documents, 1, {}, True),
        (documents, 1 << 28, {}, False),
        (documents, 1, {"finer_mask": False}, False),
        (causal, 1, {}, False),
        (causal, 1 << 28, {"finer_mask": True}, True),
    ],
)
def test_left_out_the_option_holds_for_large_calls_whose_mask_reads_tensors(
    mask_mod: Mask,
    least: int,
    options: Mapping[str, bool],
    decides: bool,
    found: Found,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_refinement, "_LEAST_PAIRS", least)
    query = randn(1, 2, 256, 16)
    mask = anyflex.create_block_mask(mask_mod, None, None, 256, 256)
    out = anyflex.flex_attention(
        query, query, query, None, mask, backend="cuda.mine",
        kernel_options={"cuda.mine": {"block_m": 32, "block_n": 32, **options}},
    )  # fmt: skip
    other = anyflex.flex_attention(query, query, query, None, mask, backend="reference")
    assert isinstance(out, Tensor)
    assert isinstance(other, Tensor)
    torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-5)
    assert set(found) == ({"forward"} if decides else set())


def test_a_mask_of_many_runs_stays_as_it_is_unless_asked(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_refinement, "_LEAST_PAIRS", 1)
    ids = (torch.arange(576) // 16 % 2).to(torch.int32)
    query = randn(1, 1, 576, 16)
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: ids[k] == 1, None, None, 576, 576, BLOCK_SIZE=(64, 16)
    )
    given = {"block_m": 32, "block_n": 16}
    for options, decided in (({}, set()), ({"finer_mask": True}, {"forward"})):
        anyflex.flex_attention(
            query, query, query, None, mask, backend="cuda.mine",
            kernel_options={"cuda.mine": {**given, **options}},
        )  # fmt: skip
        assert set(found) == decided
