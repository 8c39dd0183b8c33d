"""Block masks put together again by a map over a pytree, which may have left anything of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch._subclasses import FakeTensorMode

import anyflex
from anyflex.block_mask.block_mask import BlockMask
from anyflex.errors import BlockMaskError
from tests.core.given_masks import runs_mask

LENGTH = 40
RANKS = torch.tensor([(7 * i) % LENGTH for i in range(LENGTH)]) / LENGTH
"""float32: a converted copy has other bits."""


def by_rank(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (RANKS[q] < RANKS[k]) | (q == k)


def rank_mask() -> BlockMask:
    return anyflex.create_block_mask(by_rank, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)


def given(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, 1, 2, length, 8).unbind(0)
    return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    out = anyflex.flex_attention(query, key, value, block_mask=mask, backend="reference")
    assert isinstance(out, Tensor)
    return out


def check_out(out: Tensor, query: Tensor, key: Tensor, value: Tensor, live: Tensor) -> None:
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~live, -torch.inf).softmax(-1)
    torch.testing.assert_close(out.double(), weights @ value.double(), rtol=1e-5, atol=1e-6)


@pytest.fixture(params=["eager", "compiled"])
def call(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tensor]]:
    torch._dynamo.reset()
    if request.param == "eager":
        yield attend
    else:
        yield torch.compile(attend, backend="aot_eager", fullgraph=True)


def structure(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A change of offsets and runs alone."""
    return lambda leaf: change(leaf) if leaf.dtype is torch.int32 else leaf


def offsets(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda leaf: change(leaf) if leaf.dim() == 3 else leaf


def runs(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda leaf: change(leaf) if leaf.dim() == 2 else leaf


def ranks(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda leaf: change(leaf) if leaf.is_floating_point() else leaf


def with_gaps(leaf: Tensor) -> Tensor:
    """The same values, other numbers between them in memory."""
    return torch.stack([leaf, leaf + 5], -1)[..., 0]


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "long": (structure(Tensor.long), "offsets.* must have dtype int32, got torch.int64"),
    "long runs": (runs(Tensor.long), "runs.* must have dtype int32, got torch.int64"),
    "offsets of a rank more": (offsets(lambda t: t[None]), r"offsets.* must have shape \[B', H'"),
    "offsets of a rank less": (offsets(lambda t: t[0]), r"offsets.* must have shape \[B', H'"),
    "flat offsets": (offsets(lambda t: t.view(-1)), r"offsets.* must have shape \[B', H'"),
    "offsets of fewer rows": (offsets(lambda t: t[..., :-1]), r"must have shape \[B', H', 4\]"),
    "flat runs": (runs(lambda t: t.view(-1)), r"runs.* must have shape \[n, 3\]"),
    "narrow runs": (runs(lambda t: t[:, :2]), r"runs.* must have shape \[n, 3\]"),
    "fewer runs": (runs(lambda t: t[:1]), "must end with the number of runs"),
    "offsets far away": (offsets(lambda t: t + 1000), "offsets decrease or leave a gap"),
    "runs far away": (runs(lambda t: t + 1000), "run 0 in row .* there are 3 columns of blocks"),
    "other kinds": (runs(lambda t: t + torch.tensor([0, 0, 5]).int()), "run 0 has kind"),
    "float64": (ranks(Tensor.double), "tensor 0 .* must have dtype torch.float32 and 1 dim"),
    "bfloat16": (ranks(Tensor.bfloat16), "captured tensor 0 .*got dtype torch.bfloat16"),
    "an index more": (ranks(lambda t: t[None]), "captured tensor 0 .*and 2 dimensions: build"),
    "a number": (ranks(lambda t: t[0]), "captured tensor 0 .*and 0 dimensions: build"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mask_of_other_tensors_is_refused(name: str, call: Callable[..., Tensor]) -> None:
    change, message = WRONG[name]
    mask = torch_pytree.tree_map_only(Tensor, change, rank_mask())
    with pytest.raises(BlockMaskError, match=message):
        call(*given(), mask)


def test_sparse_tensors_are_refused() -> None:  # which Dynamo takes none of
    mask = torch_pytree.tree_map_only(Tensor, runs(Tensor.to_sparse), rank_mask())
    with pytest.raises(BlockMaskError, match="runs of block_mask must be dense"):
        attend(*given(), mask)


def test_what_is_asked_of_such_a_mask_is_refused() -> None:
    mask = torch_pytree.tree_map_only(Tensor, Tensor.long, rank_mask())
    for ask in (BlockMask.to_dense, BlockMask.sparsity, hash, lambda m: m.row_slice(0, 1)):
        with pytest.raises(BlockMaskError, match=r"int32.* map over a mask's tensors"):
            ask(mask)


@pytest.mark.parametrize("change", [Tensor.clone, with_gaps], ids=["copies", "copies with gaps"])
def test_a_mask_of_equal_tensors_is_the_mask(
    change: Callable[[Tensor], Tensor], call: Callable[..., Tensor]
) -> None:
    mask = torch_pytree.tree_map_only(Tensor, change, rank_mask())
    inputs = given()
    live = (RANKS[:, None] < RANKS) | torch.eye(LENGTH, dtype=torch.bool)
    check_out(call(*inputs, mask), *inputs, live)


def test_lengths_that_are_no_ints_are_refused() -> None:
    mask = torch_pytree.tree_map_only(int, float, rank_mask())
    with pytest.raises(BlockMaskError, match="Q_LEN must be an int, got 40.0"):
        attend(*given(), mask)


def test_a_mask_of_mere_objects_is_one_until_it_is_used() -> None:
    for leaf in (object(), None):
        mask = torch_pytree.tree_map(lambda _, leaf=leaf: leaf, rank_mask())
        assert isinstance(mask, BlockMask)
        with pytest.raises(BlockMaskError, match="offsets of block_mask must be a Tensor"):
            attend(*given(), mask)
    mask = torch_pytree.tree_map_only(Tensor, ranks(lambda _: object()), rank_mask())
    with pytest.raises(BlockMaskError, match="captured tensor 0 of .* got a object"):
        attend(*given(), mask)


def test_slices_and_masks_with_room_come_back_whole() -> None:
    """Masks with spare runs and slices pass the checks of rebuilt masks."""
    whole = anyflex.create_block_mask(
        lambda b, h, q, k: (q + 7 * b >= k + 3 * h) & (k % 50 < 40), 3, 2, 150, 130, BLOCK_SIZE=16
    )
    masks = [whole, whole.extend(170, 180), anyflex.BlockMask.from_torch(whole.to_torch())]
    masks += [whole[1:], whole[:, [1, 0]], whole[2, :, 3:], whole[:, :, [4, 1]], whole[:0]]
    masks += [whole.row_slice(n, n + size) for n in range(0, 140, 9) for size in (0, 1, 10)]
    masks += [runs_mask([0, 0, 1], [(1, 3, 1)], mask_mod=None, capacity=9)]
    for mask in masks:
        twin = torch_pytree.tree_map_only(Tensor, torch.clone, mask)
        assert twin == mask


def test_fake_tensors_are_looked_at_as_far_as_they_tell() -> None:
    mask = rank_mask()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in given()]
        fake = torch_pytree.tree_map_only(Tensor, mode.from_tensor, mask)
        assert attend(*fakes, fake).shape == (1, 2, LENGTH, 8)
        fake = torch_pytree.tree_map_only(Tensor, lambda t: mode.from_tensor(t).long(), mask)
        with pytest.raises(BlockMaskError, match="offsets of block_mask must have dtype int32"):
            attend(*fakes, fake)


class Attends(torch.nn.Module):
    """Takes a mask, as a program does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        """All [B, H, L, E]."""
        slopes = self.slopes
        out = anyflex.flex_attention(
            query, key, value, lambda s, b, h, i, j: s * slopes[h], mask, backend="reference"
        )
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_copies_and_refuses_other_tensors(strict: bool) -> None:
    inputs, mask = given(), rank_mask()
    program = torch.export.export(Attends(), (*inputs, mask), strict=strict).module()
    twin = torch_pytree.tree_map_only(Tensor, torch.clone, mask)
    torch.testing.assert_close(program(*inputs, twin), Attends()(*inputs, mask))
    shifted = torch_pytree.tree_map_only(Tensor, runs(lambda t: t + 1000), mask)
    with pytest.raises(BlockMaskError, match="block_mask holds other tensors .* run 0 in row"):
        program(*inputs, shifted)


def test_a_converted_program_that_reads_other_types_is_refused() -> None:
    inputs, mask = given(), rank_mask()
    program = torch.export.export(Attends(), (*inputs, mask)).module()
    program.slopes = program.slopes.double()
    with pytest.raises(
        anyflex.errors.ArgumentTypeError, match="captured tensor 0 must have dtype"
    ):
        program(*inputs, mask)


@pytest.mark.parametrize("backend", ["reference", None])
def test_parameters_hold_numbers_too(backend: str | None) -> None:
    query, key, value = given(64)
    mask = anyflex.create_block_mask(by_order, None, None, 64, 64, BLOCK_SIZE=16)
    moved = torch.tensor([5, 5, 0], dtype=torch.int32)

    def mapped(change: Callable[[Tensor], Tensor]) -> BlockMask:
        def one(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.nn.Parameter(change(leaf), requires_grad=False)

        made = torch_pytree.tree_map(one, mask)
        assert isinstance(made, BlockMask)
        return made

    wanted = anyflex.flex_attention(query, key, value, block_mask=mask, backend=backend)
    turned = mapped(lambda leaf: with_gaps(leaf))
    out = anyflex.flex_attention(query, key, value, block_mask=turned, backend=backend)
    torch.testing.assert_close(out, wanted)
    shifted = mapped(lambda leaf: leaf + moved if leaf.dim() == 2 else leaf)
    with pytest.raises(BlockMaskError, match="other tensors than it was built with"):
        anyflex.flex_attention(query, key, value, block_mask=shifted, backend=backend)


def by_order(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def test_what_is_known_of_batch_entries_is_kept() -> None:
    query, key, value = (torch.randn(3, 1, 64, 8) for _ in range(3))
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k + b, None, None, 64, 64)
    mapped = torch_pytree.tree_map_only(Tensor, Tensor.clone, mask)
    text = torch_pytree.treespec_dumps(torch_pytree.tree_structure(mask))
    leaves = torch_pytree.tree_leaves(mask)
    loaded = torch_pytree.tree_unflatten(leaves, torch_pytree.treespec_loads(text))
    for other in (mapped, loaded):
        with pytest.raises(BlockMaskError, match="mask mod reads b"):
            anyflex.flex_attention(query, key, value, block_mask=other)
