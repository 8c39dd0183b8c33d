"""BlockMask as a pytree, under torch.compile and in exported programs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn

import anyflex
from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.combine import and_masks, noop_mask, or_masks
from anyflex.block_mask.create import create_block_mask, create_mask
from anyflex.block_mask.mask_function import RebuiltMaskMod, sliced_mask_mod
from anyflex.errors import ArgumentTypeError
from anyflex.tracing.trace import trace_mod


def documents_mask(length: int, window: int = 9, scale: float = 0.5) -> BlockMask:
    documents = torch.arange(length) // 20

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q - k < window) & (k * scale <= q)

    return create_block_mask(mod, 1, 1, length, length, BLOCK_SIZE=16)


def read_everything(mask: BlockMask, x: Tensor) -> Tensor:
    """Everything that the traced half of a call reads."""
    traced = mask.traced
    assert traced is not None and mask.opaque is None and not mask.needs_mask_mod
    q_length, kv_length = mask.seq_lengths
    x = x + mask.offsets.sum() + mask.runs.sum() + q_length * kv_length
    x = x + mask.BLOCK_SIZE[0] * len(traced.text) + mask.shape[0] * traced.captured[0].sum()
    return x + sum(traced.ints) + sum(traced.floats)


def test_a_mask_flattens_to_data_and_comes_back_equal() -> None:
    mask = documents_mask(70)
    leaves, spec = torch_pytree.tree_flatten(mask)
    assert [type(leaf) for leaf in leaves] == [Tensor, Tensor, int, int, Tensor, int, float]
    back = torch_pytree.tree_unflatten(leaves, spec)
    assert back == mask and isinstance(back.mask_mod, RebuiltMaskMod)
    keys, _ = torch_pytree.tree_flatten_with_path(mask)
    names = [torch_pytree.keystr(path) for path, _ in keys]
    assert names[:4] == [".offsets", ".runs", ".q_length", ".kv_length"]
    saved = torch_pytree.treespec_dumps(spec)
    assert torch_pytree.treespec_loads(saved) == spec


def test_masks_of_other_lengths_and_numbers_have_one_structure() -> None:
    structures = [
        torch_pytree.tree_structure(mask)
        for mask in (documents_mask(70), documents_mask(131, window=4, scale=0.25))
    ]
    assert structures[0] == structures[1]
    assert (
        torch_pytree.tree_structure(create_block_mask(noop_mask, 1, 1, 70, 70, BLOCK_SIZE=16))
        not in structures
    )


def test_a_tree_map_reaches_the_captured_tensors() -> None:
    mask = documents_mask(70)
    twin = torch_pytree.tree_map_only(Tensor, torch.clone, mask)
    assert twin == mask
    assert twin.traced.captured[0] is not mask.traced.captured[0]
    placeholders = torch_pytree.tree_map(lambda leaf: object(), mask)
    assert isinstance(placeholders, BlockMask)


def test_a_slice_without_a_mask_mod_stays_one() -> None:
    counts, indices = torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 1).int()
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, mask_mod=sliced_mask_mod)
    leaves, spec = torch_pytree.tree_flatten(mask)
    assert torch_pytree.tree_unflatten(leaves, spec).needs_mask_mod


def test_a_mask_that_cannot_be_traced_cannot_be_saved_with_a_program() -> None:
    mask = create_block_mask(
        lambda b, h, q, k: torch.special.bessel_j0((q - k).float()) > 0, 1, 1, 8, 8
    )
    leaves, spec = torch_pytree.tree_flatten(mask)
    assert torch_pytree.tree_unflatten(leaves, spec).opaque is mask.opaque
    with pytest.raises(ValueError, match="could not be traced"):
        torch_pytree.treespec_dumps(spec)


def test_dynamo_reads_a_mask_without_breaking_the_graph() -> None:
    mask = documents_mask(70)
    compiled = torch.compile(read_everything, backend="eager", fullgraph=True)
    assert torch.equal(compiled(mask, torch.zeros(())), read_everything(mask, torch.zeros(())))


def test_masks_that_differ_in_data_share_two_graphs() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(read_everything, backend=count, fullgraph=True)
    # 10: a mask of one run, with room for two so that it needs no graph of its own.
    for length in (70, 131, 260, 10, 300, 77):
        mask = documents_mask(length)
        assert torch.equal(compiled(mask, torch.zeros(())), read_everything(mask, torch.zeros(())))
    assert len(graphs) <= 2


def test_create_block_mask_in_a_graph_gives_the_same_mask() -> None:
    documents = torch.arange(70) // 20
    mod = lambda b, h, q, k: documents[q] == documents[k]  # noqa: E731

    @torch.compile(backend="eager")
    def make(x: Tensor) -> Any:
        return x + 1, create_block_mask(mod, 1, 1, 70, 70, BLOCK_SIZE=16)

    assert make(torch.zeros(()))[1] == create_block_mask(mod, 1, 1, 70, 70, BLOCK_SIZE=16)
    compiled = torch.compile(create_block_mask, backend="eager")
    assert compiled(mod, 1, 1, 70, 70).views().q_blocks == 1


def test_combined_masks_are_inlined() -> None:
    table = torch.arange(30) % 3 == 0

    @torch.compile(backend="eager", fullgraph=True)
    def trace(x: Tensor) -> Any:
        both = and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: table[k])
        mod = or_masks(both, noop_mask)
        return x + len(trace_mod(mod, "mask").captured)

    assert trace(torch.zeros(())) == 1

    @torch.compile(backend="eager", fullgraph=True)
    def wrong(x: Tensor) -> Any:
        and_masks(noop_mask, 3)  # type: ignore[arg-type]
        return x

    with pytest.raises(ArgumentTypeError, match="and_masks: argument 1"):
        wrong(torch.zeros(()))


class Reads(nn.Module):
    """A model that uses a mask's data."""

    def forward(self, mask: BlockMask, x: Tensor) -> Tensor:
        """x: [length]."""
        traced = mask.traced
        assert traced is not None
        return x * mask.runs.sum() + mask.offsets.sum() + traced.captured[0] + mask.seq_lengths[0]


def test_an_exported_program_takes_masks_of_new_lengths(tmp_path: Path) -> None:
    mask, length = documents_mask(70), torch.export.Dim.AUTO
    leaves, _ = torch_pytree.tree_flatten(mask)
    dynamic = [
        dict.fromkeys(range(leaf.dim()), length)
        if isinstance(leaf, Tensor)
        else length
        if isinstance(leaf, int)
        else None
        for leaf in leaves
    ]
    program = torch.export.export(
        Reads(), (mask, torch.ones(70)), dynamic_shapes=(dynamic, {0: length})
    )
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    new = documents_mask(131)
    assert torch.equal(loaded(new, torch.ones(131)), Reads()(new, torch.ones(131)))


def test_a_dense_mask_is_made_inside_of_a_model_that_is_not_compiled() -> None:
    assert bool(create_mask(noop_mask, 1, 1, 3, 3).all())


def attend(mask: BlockMask, query: Tensor, key: Tensor) -> Any:
    return anyflex.flex_attention(query, key, key, block_mask=mask, backend="reference")


def test_decoding_steps_share_two_graphs() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    mask = documents_mask(70)
    query, key = (torch.randn(1, 2, 70, 8, dtype=torch.float64) for _ in "qk")
    whole = attend(mask, query, key)
    compiled = torch.compile(attend, backend=count, fullgraph=True)
    for step in range(0, 70, 3):
        row = slice(step, step + 1)
        out = compiled(mask.row_slice(step, step + 1), query[:, :, row], key)
        torch.testing.assert_close(out, whole[:, :, row], rtol=1e-12, atol=1e-12)
    assert len(graphs) <= 2


def test_work_on_the_host_breaks_the_graph_and_gives_the_same() -> None:
    query, key = (torch.randn(1, 2, 90, 8, dtype=torch.float64) for _ in "qk")
    mask = create_block_mask(lambda b, h, q, k: q + 3 >= k, 1, 1, 70, 70, BLOCK_SIZE=16)
    longer = mask.extend(90, 90)
    whole = attend(longer, query, key)

    @torch.compile(backend="eager")
    def work(mask: BlockMask, query: Tensor, key: Tensor) -> Any:
        grown = mask.extend(90, 90)
        parts = [
            attend(grown.row_slice(0, 21), query[:, :, :21], key),
            attend(grown.row_slice(21, 48), query[:, :, 21:48], key),
            attend(grown[:, :, 3:], query[:, :, 48:], key),
        ]
        return torch.cat(parts, 2), grown == mask, hash(mask)

    out, equal, number = work(mask, query, key)
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    assert equal is False and number == hash(mask)
    step = torch.compile(lambda m: m.extend(80).runs, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(mask)


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "pytree"])
def test_slices_and_grown_masks_are_data_like_any_other(how: str) -> None:
    mask = documents_mask(70)
    for made in (mask[:, :, 1:], mask[:, :, [3, 1]], mask.row_slice(5, 50), mask.row_slice(8, 9)):
        if how == "pickle":
            twin = pickle.loads(pickle.dumps(made))
        elif how == "deepcopy":
            twin = copy.deepcopy(made)
        else:
            twin = torch_pytree.tree_map_only(Tensor, torch.clone, made)
        assert twin == made and hash(twin) == hash(made)
        q_length, kv_length = made.seq_lengths
        rows, columns = torch.arange(q_length)[:, None], torch.arange(kv_length)
        zero = torch.zeros((), dtype=torch.int64)
        assert torch.equal(
            twin.mask_mod(zero, zero, rows, columns), made.mask_mod(zero, zero, rows, columns)
        )
