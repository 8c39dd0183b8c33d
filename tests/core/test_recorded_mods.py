"""A mod that can't be traced is what it did when it was called: its calls' backward and its block
mask's calls do the same, whatever has become of what it read."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import anyflex
from anyflex.errors import ArgumentError, BlockMaskError, ModIndexError, ModTraceError
from anyflex.tracing.recorded_mod import recorded

__all__: list[str] = []

pytestmark = pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
i0 = torch.special.i0
WINDOW = 5
TABLE = torch.tensor([0.5, 1.0], dtype=torch.float64)


def tensors(length: int = 8, heads: int = 2) -> list[Tensor]:
    shape = (1, heads, length, 4)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in "qkv"]


def dense(
    q: Tensor, k: Tensor, v: Tensor, factor: Any = 1.0, live: Tensor | None = None
) -> Tensor:
    """`factor` multiplies the scores; a number, or a tensor that broadcasts with them."""
    scores = q @ k.mT / q.shape[3] ** 0.5 * factor
    if live is not None:
        scores = scores.masked_fill(~live, -torch.inf)
    return scores.softmax(-1) @ v


def compare_gradients(out: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(out, wanted)
    dout = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view_as(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted, leaves, dout)
    )


def test_each_turn_of_a_loop_has_the_gradient_of_its_own_tensor() -> None:
    q, k, v = tensors()
    weights = [torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = wanted = torch.zeros_like(q)
    for w in weights:
        out = out + anyflex.flex_attention(q, k, v, lambda s, b, h, i, j: s * i0(w[h]))  # noqa: B023
        wanted = wanted + dense(q, k, v, i0(w)[:, None, None])
    compare_gradients(out, wanted, [q, k, v, *weights])


def test_a_global_tensor_may_be_rebound_before_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    out = anyflex.flex_attention(q, k, v, lambda s, b, h, i, j: s * i0(TABLE[h]))
    wanted = dense(q, k, v, i0(TABLE)[:, None, None])
    monkeypatch.setitem(globals(), "TABLE", TABLE * 3)
    compare_gradients(out, wanted, [q, k, v])


class Layer(torch.nn.Module):
    """Its score mod is a method, which reads a parameter and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2, dtype=torch.float64))
        self.number = 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend."""
        out: Tensor = anyflex.flex_attention(q, k, v, self.mod)
        return out

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Return the modified score."""
        return s * i0(self.weight[h]) * self.number


def test_an_attribute_may_change_between_two_calls_and_backward() -> None:
    q, k, v = tensors()
    layer = Layer()
    out, wanted = layer(q, k, v), dense(q, k, v, i0(layer.weight)[:, None, None])
    layer.number = 2.0
    out = out + layer(q, k, v)
    wanted = wanted + dense(q, k, v, 2 * i0(layer.weight)[:, None, None])
    compare_gradients(out, wanted, [q, k, v, layer.weight])


def test_parameters_of_functional_call_get_their_gradients() -> None:
    q, k, v = tensors()
    weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    out = torch.func.functional_call(Layer(), {"weight": weight}, (q, k, v))
    compare_gradients(out, dense(q, k, v, i0(weight)[:, None, None]), [q, k, v, weight])


def test_a_mod_switches_gradients_off_where_it_did() -> None:
    q, k, v = tensors()
    w, u = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in "wu")

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            quiet = i0(w[h])
        return s * quiet + s * w[h] + s.detach() * i0(u[h])

    out = anyflex.flex_attention(q, k, v, mod)
    w_, u_ = (tensor[:, None, None] for tensor in (w, u))
    scores = q @ k.mT / 2
    scores = scores * (i0(w_).detach() + w_) + scores.detach() * i0(u_)
    compare_gradients(out, scores.softmax(-1) @ v, [q, k, v, w, u])


def test_rows_slices_numbers_and_keywords_are_recorded() -> None:
    q, k, v = tensors()
    table = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    numbers = [2.0]

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = s * i0(0 * s)  # from here on nothing is traced
        first, second, _ = table[h]
        end = table[h, 2:][0]
        made = torch.full((), numbers[0], dtype=s.dtype, device=s.device)
        low = torch.clamp(input=i0(first), max=torch.tensor(numbers)[0].to(s.dtype))
        return s * low * torch.maximum(made, second) + end * j

    out = anyflex.flex_attention(q, k, v, mod)
    numbers[0] = 0.5
    first, second, end = (table[:, n, None, None] for n in range(3))
    scores = q @ k.mT / 2 * i0(first).clamp(max=2.0) * second.clamp(min=2.0)
    wanted = (scores + end * torch.arange(8)).softmax(-1) @ v
    compare_gradients(out, wanted, [q, k, v, table])


def test_a_step_of_a_recorded_mod_lets_go_of_what_no_later_one_reads() -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for _ in range(30):
            s = i0(s) - 1
        return s

    function = recorded(mod, "score")
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Count(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                made.append(weakref.ref(result))
                alive.append(sum(reference() is not None for reference in made))
            return result

    score, index = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    with Count():
        function(score, index, index, index, index)
    assert len(alive) == 60 and max(alive) <= 3


def test_the_device_of_the_indices_is_that_of_each_call() -> None:
    function = recorded(
        lambda b, h, i, j: torch.full((), 2, device=i.device) < i0(j.float()), "mask"
    )
    index = torch.zeros((), dtype=torch.int64, device="meta")
    assert function(index, index, index, index).device.type == "meta"


def test_a_read_outside_names_the_line_of_the_mod() -> None:
    q, k, v = tensors()
    table = torch.rand(5, dtype=torch.float64)
    mod = lambda s, b, h, i, j: s * i0(table[j])  # noqa: E731
    place = re.escape(f"({__file__}:{mod.__code__.co_firstlineno})")
    with pytest.raises(ModIndexError, match=rf"outside of a captured tensor: .*{place}"):
        anyflex.flex_attention(q, k, v, mod)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_hides_its_work_from_torch_is_refused() -> None:
    q, k, v = tensors()

    @torch.jit.script
    def scripted(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    with pytest.raises(ModTraceError, match="hides from torch.*Call the Python function"):
        anyflex.flex_attention(q, k, v, lambda s, b, h, i, j: scripted(i0(s), s))
    with pytest.raises(ModTraceError, match="a transform .* inside a mod"):
        anyflex.flex_attention(
            q, k, v, lambda s, b, h, i, j: i0(s) * torch.vmap(torch.sin)(TABLE)[h]
        )


@pytest.fixture
def double_default() -> Iterator[Callable[[], None]]:
    """Makes float64 torch's default dtype for the rest of the test."""
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype_is_that_of_the_call(double_default: Callable[[], None]) -> None:
    q, k, v = tensors()
    out = anyflex.flex_attention(
        q, k, v, lambda s, b, h, i, j: i0(s * torch.tensor(0.3)) + i0(j / 3) + (j > i * 0.1)
    )
    place = torch.arange(8)
    added = i0(place / 3).double() + (place > place[:, None] * 0.1)
    scores = i0(q @ k.mT / 2 * torch.tensor(0.3))
    double_default()
    compare_gradients(out, (scores + added).softmax(-1) @ v, [q, k, v])


def test_a_block_mask_computes_in_the_default_dtype_of_its_making(
    double_default: Callable[[], None],
) -> None:
    q, k, v = tensors(40)
    # True in float32 alone, whose sums have no place for the second number.
    function = lambda b, h, i, j: torch.gcd(i, j) * 0.0 + 1.0 + (i - j) / 1e12 == 1  # noqa: E731
    built = anyflex.create_block_mask(anyflex.noop_mask, None, None, 40, 40, BLOCK_SIZE=16)
    runs = built.runs.clone()
    runs[:, 2] = 2
    mask = anyflex.BlockMask.from_runs(
        built.offsets, runs, seq_lengths=(40, 40), block_size=16, mask_mod=function
    )
    double_default()
    torch.testing.assert_close(anyflex.flex_attention(q, k, v, block_mask=mask), dense(q, k, v))


def test_what_would_be_of_another_default_dtype_is_refused(
    double_default: Callable[[], None],
) -> None:
    q, k, v = tensors()
    out = anyflex.flex_attention(
        q, k, v, lambda s, b, h, i, j: i0(s) * torch.where(i > j, 1.0, 0.5)
    )
    double_default()
    told = r"was torch\.float32 .* torch\.float64 now, in which its where \(.*test_recorded_mods"
    with pytest.raises(ArgumentError, match=told):
        out.sum().backward()


ARRAYS: dict[str, Callable[[Any, Any], Tensor]] = {
    "tensor": lambda numbers, s: torch.tensor(numbers)[1],
    "as_tensor": lambda numbers, s: torch.as_tensor(numbers)[1],
    "device": lambda numbers, s: torch.as_tensor(numbers, device=s.device)[1],
    "written": lambda numbers, s: torch.as_tensor(numbers).clone().add_(1.0)[1] - 1.0,
}


@pytest.mark.parametrize("way", ARRAYS)
@pytest.mark.parametrize("kind", ["numpy", "array"])
def test_arrays_may_be_written_into_before_backward(way: str, kind: str) -> None:
    q, k, v = tensors()
    numbers: Any = array("d", [1.0, 2.0, 3.0])
    if kind == "numpy":
        numbers = pytest.importorskip("numpy").array(numbers)
    out = anyflex.flex_attention(q, k, v, lambda s, b, h, i, j: i0(s) * ARRAYS[way](numbers, s))
    numbers[1] = -1.0
    compare_gradients(out, (i0(q @ k.mT / 2) * 2.0).softmax(-1) @ v, [q, k, v])


def test_an_array_that_indexes_a_tensor_may_be_written_into_before_backward() -> None:
    q, k, v = tensors()
    rows = pytest.importorskip("numpy").array([1, 0])
    table = torch.rand(2, dtype=torch.float64, requires_grad=True)
    out = anyflex.flex_attention(q, k, v, lambda s, b, h, i, j: s * i0(table[rows][h]))
    rows.fill(0)
    compare_gradients(out, dense(q, k, v, i0(table.flip(0))[:, None, None]), [q, k, v, table])


def test_what_a_mod_makes_and_writes_into_is_made_at_each_run() -> None:
    q, k, v = tensors()

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = i0(s)  # from here on nothing is traced
        made = torch.ones(3, dtype=torch.float64)
        made[1] = 4.0
        return s * made.mul_(0.5)[1]

    out = anyflex.flex_attention(q, k, v, mod)
    compare_gradients(out, (i0(q @ k.mT / 2) * 2.0).softmax(-1) @ v, [q, k, v])


def test_masks_of_arrays_are_compared_by_their_elements() -> None:
    numpy = pytest.importorskip("numpy")
    limits, rows = numpy.array([0.0, 0.27, 0.5]), numpy.array([0, 1])
    table = torch.zeros(2)

    def function(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i0((i - j) / 16) + table[rows][0] <= i0(torch.tensor(limits)[1])

    def mask() -> anyflex.BlockMask:
        return anyflex.create_block_mask(function, None, None, 40, 40, BLOCK_SIZE=64)

    first = mask()
    q, k, v = tensors(40)
    out = anyflex.flex_attention(q, k, v, block_mask=first)
    compare_gradients(out, dense(q, k, v, 1.0, live(4)), [q, k, v])
    assert first == mask()
    limits[2] = 1.0
    assert first != mask()
    limits[2] = 0.5
    rows[1] = 0
    assert first != mask()


def test_a_gradient_that_is_gone_before_backward_is_told() -> None:
    q, k, v = tensors()
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
    weight.sum().backward()
    mod = lambda s, b, h, i, j: i0(s) * weight.grad[i] * torch.tanh(s)  # noqa: E731
    out = anyflex.flex_attention(q, k, v, mod)
    weight.grad = None
    place = re.escape(f"({__file__}:{mod.__code__.co_firstlineno})")
    told = (
        rf"^\.grad gave .* 1 tensor\(s\) when .* gives 0 now: what it reads has changed.*{place}"
    )
    with pytest.raises(ModTraceError, match=told):
        out.sum().backward()


def test_a_fact_that_was_told_may_be_another_in_backward() -> None:
    q, k, v = tensors()
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
    out = anyflex.flex_attention(
        q, k, v, lambda s, b, h, i, j: i0(s) * (2.0 if weight.grad is None else weight.grad[i])
    )
    weight.sum().backward()
    compare_gradients(out, (i0(q @ k.mT / 2) * 2.0).softmax(-1) @ v, [q, k, v])


@pytest.mark.parametrize("sizes", [(1, 1, 0, 8), (1, 1, 8, 0), (0, 1, 8, 8)])
def test_a_mask_without_pairs_takes_an_untraced_mod_that_reads_an_empty_tensor(
    sizes: tuple[int, int, int, int],
) -> None:
    empty = torch.zeros(0)
    function = lambda b, h, i, j: i0(empty[i * 0 + b]) < 2  # noqa: E731
    mask = anyflex.create_block_mask(function, *sizes)
    assert mask.shape == sizes
    assert anyflex.create_mask(function, *sizes).shape == sizes
    assert mask == anyflex.create_block_mask(function, *sizes)
    mask.mask_mod = function
    twin = copy.deepcopy(mask)
    assert twin == mask
    batch, _, rows, columns = sizes
    query = torch.rand(batch, 1, rows, 4)
    key = torch.rand(batch, 1, columns, 4)
    out = anyflex.flex_attention(query, key, key, block_mask=twin)
    assert torch.equal(out, torch.zeros_like(query))
    if batch:
        assert twin.extend(columns, rows, mask_mod=function).shape == sizes
        with pytest.raises(ModIndexError, match="a block mask without pairs: .*outside"):
            twin.extend(8, 8)
    with pytest.raises(ModIndexError, match="outside of a captured tensor"):
        anyflex.create_block_mask(function, 1, 1, 8, 8)


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i0((i - j) / 16) <= i0(torch.tensor(WINDOW / 16))


def live(window: int, length: int = 40) -> Tensor:
    place = torch.arange(length)
    return (place[:, None] - place).abs() <= window


@pytest.mark.parametrize("way", ["as made", "deepcopy", "row_slice", "extend", "slice"])
def test_a_block_mask_keeps_the_numbers_that_it_was_built_from(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    q, k, v = tensors(40)
    length = 40 if way != "extend" else 24
    mask = anyflex.create_block_mask(near, None, None, length, length, BLOCK_SIZE=16)
    monkeypatch.setitem(globals(), "WINDOW", 2)
    rows = slice(0, 40)
    if way == "deepcopy":
        mask = copy.deepcopy(mask)
    elif way == "row_slice":
        rows = slice(5, 30)
        mask = mask.row_slice(5, 30)
    elif way == "slice":
        rows = slice(16, 40)
        mask = mask[:, :, 1:]
    elif way == "extend":
        mask = mask.extend(40, 40)
    out = anyflex.flex_attention(q[:, :, rows], k, v, block_mask=mask)
    monkeypatch.setitem(globals(), "WINDOW", 30)
    compare_gradients(out, dense(q[:, :, rows], k, v, 1.0, live(5)[rows]), [q, k, v])


def test_an_untraced_mask_mod_is_recorded_anew_when_it_is_assigned_or_unpickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = anyflex.create_block_mask(near, None, None, 40, 40, BLOCK_SIZE=64)
    twin = pickle.loads(pickle.dumps(mask))
    assert twin == mask and twin.opaque is not mask.opaque
    monkeypatch.setitem(globals(), "WINDOW", 2)
    assert anyflex.create_block_mask(near, None, None, 40, 40, BLOCK_SIZE=64) != mask
    mask.mask_mod = near
    q, k, v = tensors(40)
    out = anyflex.flex_attention(q, k, v, block_mask=mask)
    compare_gradients(out, dense(q, k, v, 1.0, live(2)), [q, k, v])


@pytest.mark.parametrize("way", ["as made", "row_slice"])
def test_a_change_of_what_an_untraced_mask_mod_captured_is_refused(way: str) -> None:
    ids = torch.arange(40) // 16

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (ids[i] == ids[j]) & (i0((i - j) / 16) > 0)

    mask = anyflex.create_block_mask(same, None, None, 40, 40, BLOCK_SIZE=16)
    if way == "row_slice":
        mask = mask.row_slice(5, 30)
    q, k, v = tensors(40)
    rows = slice(5, 30) if way == "row_slice" else slice(0, 40)
    out = anyflex.flex_attention(q[:, :, rows], k, v, block_mask=mask)
    same_id = (ids[:, None] == ids)[rows]
    torch.testing.assert_close(out, dense(q[:, :, rows], k, v, 1.0, same_id))
    ids.copy_(torch.arange(40) // 5)
    with pytest.raises(BlockMaskError, match="captured tensor 'ids' .*changed in place"):
        anyflex.flex_attention(q[:, :, rows], k, v, block_mask=mask)


def test_values_of_a_structure_that_the_user_gave_may_change() -> None:
    ids = torch.arange(40) // 16
    built = anyflex.create_block_mask(anyflex.noop_mask, None, None, 40, 40, BLOCK_SIZE=16)
    runs = built.runs.clone()
    runs[:, 2] = 2
    mask = anyflex.BlockMask.from_runs(
        built.offsets,
        runs,
        seq_lengths=(40, 40),
        block_size=16,
        mask_mod=lambda b, h, i, j: (ids[i] == ids[j]) & (i0((i - j) / 16) > 0),
    )
    ids.copy_(torch.arange(40) // 5)
    q, k, v = tensors(40)
    out = anyflex.flex_attention(q, k, v, block_mask=mask)
    compare_gradients(out, dense(q, k, v, 1.0, ids[:, None] == ids), [q, k, v])
