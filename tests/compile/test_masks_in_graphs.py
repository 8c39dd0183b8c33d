"""Block masks that a model builds in `forward`, inside of a compiled or exported program."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import anyflex
from anyflex import BlockMask, and_masks, create_block_mask, masks
from anyflex.block_mask import mask_ops, mask_request, op_implementations
from anyflex.errors import (
    ArgumentTypeError,
    BlockMaskError,
    ModIndexError,
    ModTraceError,
    PerformanceWarning,
)
from anyflex.mask_structure import views_registry
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.runs import FULL, PARTIAL, RunList
from tests.compile.graphs import CountingBackend
from tests.soak import SOAK

__all__: list[str] = []

BLOCK = 16
Make = Callable[[Tensor, Tensor, int], Any]
Mod = Callable[..., Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def packed(x: Tensor, ids: Tensor, number: int) -> Mod:
    """Documents, causal; their ids are computed in the graph."""
    return and_masks(masks.causal(), masks.document(ids * 2 + 1))


def padded(x: Tensor, ids: Tensor, number: int) -> Mod:
    """Left padding as a bool tensor [B, S]: rows of padding are dead."""
    live = ids > 0
    return lambda b, h, q, k: (q >= k) & live[b, k] & live[b, q]


def of_heads(x: Tensor, ids: Tensor, number: int) -> Mod:
    """Another window for each head."""
    sizes = torch.arange(x.shape[1], device=x.device) * 20 + 5
    return masks.causal_window(sizes)


def numbered(x: Tensor, ids: Tensor, number: int) -> Mod:
    """No tensor, and numbers that change: an int, a float and a size."""
    half, length = number / 2, x.shape[2]
    return lambda b, h, q, k: ((q - k).abs() < number) | (k * half > length)


MODS: dict[str, Make] = {
    "packed": packed,
    "padded": padded,
    "of heads": of_heads,
    "numbered": numbered,
}


def inputs(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Return x [B, 2, L, 8] and ids [B, L]."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn((batch, 2, length, 8), generator=generator)
    shift = torch.arange(batch)[:, None] * 7
    return x, (torch.arange(length) - shift).clamp(min=0) // 25 + (torch.arange(length) > shift)


def model(make: Make, layers: int = 2) -> Callable[..., Any]:
    def forward(x: Tensor, ids: Tensor, number: int) -> Any:
        batch, heads, length, _ = x.shape
        mask = create_block_mask(
            make(x, ids, number), batch, heads, length, length, BLOCK_SIZE=BLOCK
        )
        for _ in range(layers):
            x = anyflex.flex_attention(x, x, x, block_mask=mask)
        return x, mask

    return forward


def dense(make: Make, x: Tensor, ids: Tensor, number: int, layers: int = 2) -> Tensor:
    """The same in float64, on the whole matrix of scores. A row without a live key is 0."""
    batch, heads, length, _ = x.shape
    x = x.double()
    mod = make(x, ids, number)
    index = [torch.arange(size) for size in (batch, heads, length, length)]
    grid = torch.meshgrid(*index, indexing="ij")
    live = mod(*grid).expand(batch, heads, length, length)
    for _ in range(layers):
        scores = (x @ x.mT * x.shape[3] ** -0.5).masked_fill(~live, -torch.inf)
        x = scores.softmax(-1).nan_to_num(0.0) @ x
    return x


def with_gradient(function: Callable[..., Any], x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return stepped(function, x, *rest)[:2]


def stepped(function: Callable[..., Any], x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the output, the gradient of x, and the mask where the function gives one."""
    x = x.clone().requires_grad_()
    found = function(x, *rest)
    out, mask = found if isinstance(found, tuple) else (found, None)
    (gradient,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.shape[3])).sum(), x)
    return out.detach(), gradient, mask


@pytest.mark.parametrize("name", list(MODS)[:: 1 if SOAK else 3])
def test_a_compiled_model_builds_the_mask_of_an_eager_one_at_any_length(name: str) -> None:
    make = MODS[name]
    counting = CountingBackend()
    forward = model(make)
    # torch makes sizes dynamic when they change: the others begin there, with half of the graphs.
    changes = SOAK or name == "packed"
    compiled = torch.compile(
        forward, fullgraph=True, backend=counting, dynamic=None if changes else True
    )
    # The first lengths of each number of blocks also differ in their number of runs.
    lengths = ((70, 9), (130, 12), (17, 4), (48, 30), (200, 11))
    for length, number in lengths if changes else lengths[:3]:
        x, ids = inputs(length)
        wanted = with_gradient(lambda *given: dense(make, *given), x, ids, number)
        *found, built = stepped(compiled, x, ids, number)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other.to(one.dtype), rtol=2e-5, atol=2e-5)
        eager = forward(x, ids, number)[1]
        assert built == eager and eager == built
        # Inside of the graph there is room for more.
        used = int(eager.offsets[-1, -1, -1])
        assert torch.equal(built.offsets, eager.offsets)
        assert torch.equal(built.runs[:used], eager.runs[:used]) and not built.runs[used:].any()
    assert counting.graphs <= 2


def test_inductor_builds_it_too() -> None:
    x, ids = inputs(70)
    compiled = torch.compile(model(packed), fullgraph=True)
    found = with_gradient(compiled, x, ids, 0)
    wanted = with_gradient(lambda *given: dense(packed, *given), x, ids, 0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("q_length", "kv_length"), [(0, 40), (40, 0), (0, 0)])
def test_lengths_may_be_zero(q_length: int, kv_length: int) -> None:
    def attend(query: Tensor, key: Tensor) -> Any:
        mask = create_block_mask(causal, None, None, query.shape[2], key.shape[2])
        return anyflex.flex_attention(query, key, key, block_mask=mask)

    query, key = torch.full((1, 2, q_length, 8), torch.nan), torch.randn(1, 2, kv_length, 8)
    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(query, key)
    assert torch.equal(found, torch.zeros(1, 2, q_length, 8))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_builds_its_mask_at_a_new_length(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Any:
            return model(packed)(x, ids, 0)[0]

    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(
        Model(), inputs(48), dynamic_shapes=({2: length}, {1: length}), strict=strict
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    x, ids = inputs(131)
    wanted = dense(packed, x, ids, 0).float()
    torch.testing.assert_close(loaded(x, ids), wanted, rtol=2e-5, atol=2e-5)


def test_layers_and_steps_share_what_is_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[str] = []

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given: (derived.append(name), original(*given))[1]
        )

    counted(MaskViews, "_transpose")
    counted(op_implementations, "built_runs")
    monkeypatch.setattr("anyflex.frontend.custom_ops._copied_views", None)
    compiled = torch.compile(model(packed, layers=2), fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x, ids = inputs(96)
        with_gradient(compiled, x + seed, ids, 0)
        gc.collect()
    # The mask is built at each step, from ids that may have changed; its forms belong to content.
    assert derived.count("built_runs") == 3
    assert derived.count("_transpose") <= 1  # the reference needs none


def test_a_mask_without_tensors_is_built_once_for_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Any] = []
    original = op_implementations.built_runs
    monkeypatch.setattr(
        op_implementations, "built_runs", lambda *given: (built.append(given), original(*given))[1]
    )
    op_implementations._views_of_numbers.cache_clear()
    compiled = torch.compile(model(numbered, 1), fullgraph=True, backend="eager", dynamic=True)
    for length, number in ((90, 7), (90, 7), (90, 8), (60, 7), (90, 7)):
        x, ids = inputs(length)
        wanted = dense(numbered, x, ids, number, 1).float()
        torch.testing.assert_close(compiled(x, ids, number)[0], wanted, rtol=2e-5, atol=2e-5)
    assert len(built) == 3


def test_a_mask_whose_derived_forms_are_gone_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views_registry, "_MARKED", 0)
    x, ids = inputs(90)
    compiled = torch.compile(model(packed), fullgraph=True, backend="aot_eager")
    found = with_gradient(compiled, x, ids, 0)
    wanted = with_gradient(lambda *given: dense(packed, *given), x, ids, 0)
    torch.testing.assert_close(found[1], wanted[1].float(), rtol=2e-5, atol=2e-5)


def test_a_mark_is_that_of_the_content_and_finds_nothing_else() -> None:
    views = create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16).views()
    twin = MaskViews(views.offsets.clone(), views.runs.clone(), 64, 64, (16, 16))
    kept, mark = views_registry.marked(twin)
    again, same = views_registry.marked(views)
    assert again is kept and torch.equal(mark, same)
    other = create_block_mask(causal, None, None, 63, 64, BLOCK_SIZE=16).views()
    assert not torch.equal(views_registry.marked(other)[1], mark)

    def find(lengths: tuple[int, int], sizes: tuple[int, int], offsets: Tensor) -> Any:
        return views_registry.find_marked(mark, offsets, lengths, sizes)

    assert find((64, 64), (16, 16), views.offsets) is kept
    assert find((64, 63), (16, 16), views.offsets) is None
    assert find((64, 64), (16, 8), views.offsets) is None
    assert find((64, 64), (16, 16), views.offsets[:, :, 1:]) is None
    assert views_registry.find_marked(mark + 1, views.offsets, (64, 64), (16, 16)) is None


def test_a_mask_goes_through_a_graph_break_and_out_of_the_graph() -> None:
    @torch.compile(backend="eager")
    def broken(x: Tensor, ids: Tensor) -> Any:
        mask = create_block_mask(packed(x, ids, 0), 2, None, 96, 96, BLOCK_SIZE=BLOCK)
        torch._dynamo.graph_break()
        return anyflex.flex_attention(x, x, x, block_mask=mask), mask

    x, ids = inputs(96)
    wanted = dense(packed, x, ids, 0, 1).float()
    found, mask = broken(x, ids)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    again = anyflex.flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(again, wanted, rtol=2e-5, atol=2e-5)


def test_a_checkpointed_layer_is_given_the_mask() -> None:
    def forward(x: Tensor, ids: Tensor) -> Any:
        length = x.shape[2]
        mask = create_block_mask(packed(x, ids, 0), 2, None, length, length, BLOCK_SIZE=BLOCK)
        for _ in range(2):
            x = checkpoint(
                lambda x: anyflex.flex_attention(x, x, x, block_mask=mask), x, use_reentrant=False
            )
        return x

    x, ids = inputs(70)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    found = with_gradient(compiled, x, ids)
    wanted = with_gradient(lambda *given: dense(packed, *given, 0), x, ids)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=2e-5, atol=2e-5)


def test_the_ops_pass_torchs_own_checks() -> None:
    x, ids = inputs(70)
    calls: list[Any] = []

    class Recording(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            if function.namespace == "anyflex":
                calls.append((function, arguments, options or {}))
            return function(*arguments, **(options or {}))

    def every(x: Tensor, ids: Tensor) -> Any:
        mask = create_block_mask(packed(x, ids, 0), 2, None, 70, 70, BLOCK_SIZE=BLOCK)
        rows = mask.row_slice(10, 40)
        given = BlockMask.from_runs(
            OFFSETS, RUNS, seq_lengths=(32, 32), block_size=16, mask_mod=causal, capacity=5
        )
        return rows.runs, given.runs

    def record(graph: Any, given: Any) -> Any:
        def run(*tensors: Any) -> Any:
            with Recording():
                return graph(*tensors)

        return run

    torch.compile(every, fullgraph=True, backend=record)(x, ids)
    assert [call[0] for call in calls] == [
        mask_ops.built_op,
        mask_ops.rows_op,
        mask_ops.checked_op,
    ]
    for function, arguments, options in calls:
        torch.library.opcheck(function, arguments, options)


OFFSETS = torch.tensor([[[0, 1, 3]]], dtype=torch.int32)
RUNS = torch.tensor([[0, 1, PARTIAL], [0, 1, FULL], [1, 2, PARTIAL]], dtype=torch.int32)


def attend_to_runs(x: Tensor, offsets: Tensor, runs: Tensor, **given: Any) -> Any:
    options: dict[str, Any] = {"seq_lengths": (32, 32), "block_size": 16, "mask_mod": causal}
    mask = BlockMask.from_runs(offsets, runs, **(options | given))
    for _ in range(2):
        x = anyflex.flex_attention(x, x, x, block_mask=mask)
    return x, mask


def test_runs_become_a_mask_in_a_graph() -> None:
    x, _ = inputs(32)
    compiled = torch.compile(attend_to_runs, fullgraph=True, backend="aot_eager")
    make: Make = lambda x, ids, number: causal  # noqa: E731
    wanted = with_gradient(lambda x: dense(make, x, x, 0), x)
    found = with_gradient(compiled, x, OFFSETS, RUNS)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=2e-5, atol=2e-5)
    mask = compiled(x, OFFSETS, RUNS, capacity=9)[1]
    assert mask == attend_to_runs(x, OFFSETS, RUNS)[1] and mask.runs.shape == (9, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"runs": RUNS.flip(0)}, "run 1 in row .* overlap|overlap or are not in order"),
        ({"runs": RUNS[:2]}, "offsets must end with the number of runs"),
        ({"mask_mod": None}, r"row \[0, 0, 0\] has a PARTIAL run and there is no mask_mod"),
        ({"capacity": 1}, "capacity must be at least the number of runs, 3, got 1"),
        ({"offsets": OFFSETS.long()}, "offsets must have dtype int32"),
        ({"seq_lengths": (64, 64)}, r"offsets must have shape \[B', H', 5\]"),
        ({"seq_lengths": 32}, "seq_lengths must be a pair"),
    ],
)
def test_wrong_runs_are_refused_in_a_graph(given: dict[str, Any], message: str) -> None:
    compiled = torch.compile(attend_to_runs, fullgraph=True, backend="aot_eager")
    length = 64 if given.get("seq_lengths") == (64, 64) else 32
    arguments = {"x": inputs(length)[0], "offsets": OFFSETS, "runs": RUNS} | given
    with pytest.raises(BlockMaskError, match=message):
        compiled(**arguments)


@pytest.mark.parametrize("inside", [False, True])
def test_rows_are_sliced_in_a_graph(inside: bool) -> None:
    """Chunks of a prefill, and steps of decoding, of a mask that is passed in or built inside."""
    counting = CountingBackend()

    def attend(x: Tensor, ids: Tensor, mask: Any, start: int, stop: int) -> Any:
        if inside:
            mask = create_block_mask(packed(x, ids, 0), 2, None, 96, 96, BLOCK_SIZE=BLOCK)
        rows = mask.row_slice(start, stop)
        return anyflex.flex_attention(x[:, :, start:stop], x, x, block_mask=rows), rows

    x, ids = inputs(96)
    wanted = dense(packed, x, ids, 0, 1).float()
    mask = model(packed)(x, ids, 0)[1]
    compiled = torch.compile(attend, fullgraph=True, backend=counting, dynamic=True)
    ranges = ((0, 32), (32, 64), (33, 70), (64, 65), (90, 91), (95, 96))
    for start, stop in ranges if SOAK or inside else ranges[:3]:
        found, rows = compiled(x, ids, mask, start, stop)
        torch.testing.assert_close(found, wanted[:, :, start:stop], rtol=2e-5, atol=2e-5)
        assert rows == mask.row_slice(start, stop)
        assert torch.equal(
            rows.mask_mod(*[torch.tensor(i) for i in (1, 0, 0, start)]), torch.tensor(True)
        )
    assert counting.graphs <= 3  # one for single rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((90, 99), "rows 90:99 are no range of the mask's 96 rows"),
        ((20, 10), "rows 20:10 are no range"),
        ((-1, 10), "start must be in 0..2147483647, got -1"),
        ((0, 1.0), "stop must be an int, got float"),
        ((0, 1, 97), "kv_len 97 is more than the mask's KV_LEN 96"),
    ],
)
def test_a_range_that_is_none_is_refused_in_a_graph(given: Any, message: str) -> None:
    mask = create_block_mask(causal, None, None, 96, 96, BLOCK_SIZE=BLOCK)

    @torch.compile(fullgraph=True, backend="eager")
    def slice_rows(mask: Any, start: Any, stop: Any, kv_len: Any = None) -> Any:
        return mask.row_slice(start, stop, kv_len=kv_len).runs

    slice_rows(mask, 3, 7)
    with pytest.raises(BlockMaskError, match=message):
        slice_rows(mask, *given)


def test_rows_of_a_slice_add_their_numbers() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def twice(mask: Any) -> Any:
        return mask.row_slice(16, 80).row_slice(20, 40, kv_len=50)

    mask = create_block_mask(causal, None, None, 96, 96, BLOCK_SIZE=BLOCK)
    found, wanted = twice(mask), mask.row_slice(36, 56, kv_len=50)
    assert found == wanted and found.traced.ints == [36]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative": ({"B": -1}, BlockMaskError, r"B must be in 0..2147483647, got -1"),
    "float": ({"Q_LEN": 2.5}, BlockMaskError, "Q_LEN must be an int, got float"),
    "tensor": ({"KV_LEN": torch.tensor(64)}, BlockMaskError, "KV_LEN must be an int, got Tensor"),
    "bool": ({"H": True}, BlockMaskError, "H must be an int, got bool"),
    "block size": ({"BLOCK_SIZE": 0}, BlockMaskError, "BLOCK_SIZE must be in 1"),
    "three sizes": ({"BLOCK_SIZE": (8, 8, 8)}, BlockMaskError, "an int or a pair of ints"),
    "device": ({"device": "nope"}, BlockMaskError, "device 'nope' is not a device that torch"),
    "flag": ({"exact": 1}, BlockMaskError, "exact must be a bool in create_block_mask, got int"),
    "no function": ({"mask_mod": 3}, ArgumentTypeError, "mask_mod must be a function, got int"),
    "arguments": ({"mask_mod": lambda q, k: q >= k}, BlockMaskError, "takes 2 positional arg"),
    "int": ({"mask_mod": lambda b, h, q, k: q + k}, BlockMaskError, "returned dtype torch.int64"),
    "branch": (
        {"mask_mod": lambda b, h, q, k: q if q > k else k},
        ModTraceError,
        "a Python branch on a symbol",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_refused_by_the_errors_of_eager_calls(name: str) -> None:
    wrong, error, message = WRONG[name]

    def build(x: Tensor) -> Any:
        options: dict[str, Any] = {"mask_mod": causal, "B": 1, "H": 1, "Q_LEN": 64, "KV_LEN": 64}
        return x + create_block_mask(**(options | wrong)).runs.sum()

    if name != "tensor":  # an eager call reads it
        with pytest.raises(error):
            build(torch.zeros(1))
    with pytest.raises(error, match=message):
        torch.compile(build, fullgraph=True, backend="eager")(torch.zeros(1))


def test_a_captured_tensor_may_require_grad_and_gets_none() -> None:
    table = torch.randn(64, requires_grad=True)

    def positive(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[kv_idx] > 0

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(x: Tensor) -> Any:
        mask = create_block_mask(positive, None, None, 64, 64)
        return anyflex.flex_attention(x, x, x, block_mask=mask)

    x = torch.randn(1, 1, 64, 8, requires_grad=True)
    out = attend(x)
    out.sum().backward()
    mask = create_block_mask(positive, None, None, 64, 64)
    torch.testing.assert_close(out, anyflex.flex_attention(x, x, x, block_mask=mask))
    assert x.grad is not None and table.grad is None


def test_a_mask_for_one_batch_entry_serves_no_others_in_a_graph_either() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def attend(x: Tensor, ids: Tensor) -> Any:
        mask = create_block_mask(packed(x, ids, 0), None, None, 64, 64)
        return anyflex.flex_attention(x, x, x, block_mask=mask)

    with pytest.raises(BlockMaskError, match="was built for one b alone"):
        attend(*inputs(64))


def test_a_read_outside_of_a_captured_tensor_is_refused_when_the_program_runs() -> None:
    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def attend(x: Tensor, table: Tensor) -> Any:
        mask = create_block_mask(lambda b, h, q, k: table[k] >= 0, None, None, 64, 64)
        return anyflex.flex_attention(x, x, x, block_mask=mask)

    x, _ = inputs(64)
    attend(x, torch.zeros(64))
    with pytest.raises(ModIndexError, match=r"outside of it: in dimension 0 of size 40"):
        attend(x, torch.zeros(40))


@pytest.mark.parametrize("fullgraph", [True, *([False] if SOAK else [])])
def test_a_mod_that_only_vmap_runs_is_refused(fullgraph: bool) -> None:
    table = torch.arange(64 * 65).view(64, 65) % 5

    @torch.compile(fullgraph=fullgraph, backend="eager")
    def build(x: Tensor) -> Any:
        mod: Mod = lambda b, h, q, k: table[q].sum() > table[k, 0]  # noqa: E731
        return x + create_block_mask(mod, 1, 1, 64, 64).runs.sum()

    with pytest.raises(ModTraceError, match="a row of shape .65. of captured tensor"):
        build(torch.zeros(1))


ONE = torch.ones((1, 1, 1), dtype=torch.int32)
PARENTS, EDGES = torch.tensor([-1, 0, 0]), torch.tensor([0, 20, 64])


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("BlockMask.extend", lambda mask: mask.extend(128).runs),
        ("BlockMask.__getitem__", lambda mask: mask[:, :, 0].runs),
        ("__eq__", lambda mask: mask.runs + (mask == mask)),
        (
            "BlockMask.from_kv_blocks",
            lambda mask: BlockMask.from_kv_blocks(ONE, ONE[..., None] - 1).runs,
        ),
        ("create_mask", lambda mask: anyflex.create_mask(causal, 1, 1, 4, 4)),
        ("tree", lambda mask: create_block_mask(masks.tree(PARENTS), 1, 1, 3, 3).runs),
        (
            "document_offsets",
            lambda mask: create_block_mask(masks.document_offsets(EDGES), 1, 1, 64, 64).runs,
        ),
    ],
)
def test_what_reads_values_says_so_in_a_whole_graph(name: str, work: Any) -> None:
    mask = create_block_mask(causal, None, None, 64, 64)
    with pytest.raises(BlockMaskError, match=f"{name} works on values .* call it before"):
        torch.compile(work, fullgraph=True, backend="eager")(mask)
    torch.testing.assert_close(torch.compile(work, backend="eager")(mask), work(mask))


def test_a_mask_moves_to_where_it_is_in_a_graph() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def build(x: Tensor, ids: Tensor) -> Any:
        mask = create_block_mask(packed(x, ids, 0), 2, None, 64, 64, device=x.device)
        return anyflex.flex_attention(x, x, x, block_mask=mask.to(x.device))

    x, ids = inputs(64)
    wanted = dense(packed, x, ids, 0, 1).float()
    torch.testing.assert_close(build(x, ids), wanted, rtol=2e-5, atol=2e-5)


def test_a_mask_is_fake_under_a_fake_tensor_mode() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 2, 64, 8)
        ids = torch.zeros(2, 64, dtype=torch.int64)
        mask = create_block_mask(packed(x, ids, 0), 2, None, 64, 64, BLOCK_SIZE=BLOCK)
        assert mask.shape == (2, 1, 64, 64) and mask.runs.shape == (2 * 4 * 4, 3)
        assert anyflex.flex_attention(x, x, x, block_mask=mask).shape == x.shape


def test_a_mask_of_more_runs_than_a_graph_has_room_for_is_the_same_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_request, "ROOM_OF_A_ROW", 3)
    monkeypatch.setattr(mask_request, "LEAST_ROOM", 0)
    generator = torch.Generator().manual_seed(5)
    # Blocks are FULL, PARTIAL or dead at random.
    kinds = torch.randint(0, 3, (16, 16), generator=generator)
    kinds[3], kinds[4] = 0, torch.arange(16) % 2
    noise = torch.rand((64, 64), generator=generator) < 0.5
    kinds = kinds.repeat_interleave(4, 0).repeat_interleave(4, 1)
    live = (kinds == FULL) | ((kinds == PARTIAL) & noise)
    make: Make = lambda x, ids, number: lambda b, h, q, k: live[q, k]  # noqa: E731

    def attend(x: Tensor) -> Any:
        mask = create_block_mask(make(x, x, 0), None, None, 64, 64, BLOCK_SIZE=4)
        return anyflex.flex_attention(x, x, x, block_mask=mask), mask

    x, _ = inputs(64)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.warns(PerformanceWarning, match="has room for 48: .* more than 3 runs are merged"):
        mask = compiled(x)[1]
    assert mask.runs.shape == (48, 3) and mask != attend(x)[1]
    wanted = with_gradient(lambda x: dense(make, x, x, 0, 1), x)
    with pytest.warns(PerformanceWarning, match="has room for"):
        found = with_gradient(compiled, x)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=2e-5, atol=2e-5)


def test_runs_are_merged_in_rows_of_more_than_the_limit_alone() -> None:
    runs = [(0, 0, 2, 1), (0, 2, 3, 2), (2, 1, 2, 1), (2, 3, 4, 1), (2, 4, 6, 2), (2, 8, 9, 1)]
    runs += [(2, 10, 11, 2)]
    found = op_implementations.at_most(RunList(*torch.tensor(runs).unbind(1)), 2)
    assert torch.stack(found, 1).tolist() == [
        [0, 0, 2, FULL],
        [0, 2, 3, PARTIAL],
        [2, 1, 6, PARTIAL],
        [2, 8, 11, PARTIAL],
    ]


def test_a_fake_mask_is_on_the_device_of_what_it_reads_and_its_mark_on_the_host() -> None:
    with FakeTensorMode():
        ids = torch.empty((2, 64), dtype=torch.int64, device="cuda")
        mask = create_block_mask(masks.document(ids), 2, None, 64, 64)
        host = create_block_mask(masks.document(ids), 2, None, 64, 64, device="cpu")
    assert mask.device.type == mask.runs.device.type == mask.traced.captured[0].device.type
    assert mask.device.type == "cuda"
    assert mask.mark is not None and mask.mark.device.type == "cpu"
    assert host.device.type == host.traced.captured[0].device.type == "cpu"
