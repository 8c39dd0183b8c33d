"""A mod that can't be traced runs through vmap: the user's function itself, in backward and in the
calls of its block mask too."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.errors import ArgumentError, ModIndexError, ModTraceError

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


def test_a_loop_s_variable_that_was_rebound_before_backward_is_told() -> None:
    """A mod that can be traced keeps the tensor of its turn."""
    q, k, v = tensors()
    weights = [torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    out = torch.zeros_like(q)
    for w in weights:
        out = out + anyflex.flex_attention(q, k, v, lambda s, b, h, i, j: s * i0(w[h]))  # noqa: B023
    with pytest.raises(ArgumentError, match=r"called again in backward, .* of shape \[2\] there"):
        out.sum().backward()
    kept = torch.zeros_like(q)
    wanted = torch.zeros_like(q)
    for w in weights:
        kept = kept + anyflex.flex_attention(q, k, v, lambda s, b, h, i, j, w=w: s * i0(w[h]))
        wanted = wanted + dense(q, k, v, i0(w)[:, None, None])
    compare_gradients(kept, wanted, [q, k, v, *weights])


def test_a_number_that_a_mod_returns_gets_its_gradient() -> None:
    q, k, v = tensors()
    number = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    mask = anyflex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8)
    _, aux = anyflex.flex_attention(
        q,
        k,
        v,
        lambda s, b, h, i, j: (i0(s), number)[1],
        mask,
        return_aux=anyflex.AuxRequest(lse=True),
    )
    wanted = number + torch.arange(1, 9).double().log().expand(1, 2, 8)
    compare_gradients(aux.lse, wanted, [number])


class Layer(torch.nn.Module):
    """Its score mod is a method, which reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend."""
        out: Tensor = anyflex.flex_attention(q, k, v, self.mod)
        return out

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Scale the score by a function of a parameter."""
        return s * i0(self.weight[h])


def test_a_parameter_that_a_method_reads_gets_its_gradient() -> None:
    q, k, v = tensors()
    layer = Layer()
    wanted = dense(q, k, v, i0(layer.weight)[:, None, None])
    compare_gradients(layer(q, k, v), wanted, [q, k, v, layer.weight])


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


def test_rows_slices_numbers_and_keywords_are_read() -> None:
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
    first, second, end = (table[:, n, None, None] for n in range(3))
    scores = q @ k.mT / 2 * i0(first).clamp(max=2.0) * second.clamp(min=2.0)
    wanted = (scores + end * torch.arange(8)).softmax(-1) @ v
    compare_gradients(out, wanted, [q, k, v, table])


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


def test_what_a_mod_makes_and_writes_into_is_made_at_each_run() -> None:
    q, k, v = tensors()

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = i0(s)  # from here on nothing is traced
        made = torch.ones(3, dtype=torch.float64)
        made[1] = 4.0
        return s * made.mul_(0.5)[1]

    out = anyflex.flex_attention(q, k, v, mod)
    compare_gradients(out, (i0(q @ k.mT / 2) * 2.0).softmax(-1) @ v, [q, k, v])


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i0((i - j) / 16) <= i0(torch.tensor(WINDOW / 16))


def live(window: int, length: int = 40) -> Tensor:
    place = torch.arange(length)
    return (place[:, None] - place).abs() <= window


@pytest.mark.parametrize("way", ["as made", "deepcopy", "pickle", "row_slice", "extend", "slice"])
def test_a_block_mask_holds_the_function(way: str) -> None:
    q, k, v = tensors(40)
    length = 40 if way != "extend" else 24
    mask = anyflex.create_block_mask(near, None, None, length, length, BLOCK_SIZE=16)
    assert mask == anyflex.create_block_mask(near, None, None, length, length, BLOCK_SIZE=16)
    assert mask != anyflex.create_block_mask(
        lambda b, h, i, j: near(b, h, i, j), None, None, length, length, BLOCK_SIZE=16
    )
    rows = slice(0, 40)
    if way == "deepcopy":
        mask = copy.deepcopy(mask)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(mask))
        assert twin == mask and twin.mask_mod is near
        mask = twin
    elif way == "row_slice":
        rows = slice(5, 30)
        mask = mask.row_slice(5, 30)
    elif way == "slice":
        rows = slice(16, 40)
        mask = mask[:, :, 1:]
    elif way == "extend":
        mask = mask.extend(40, 40)
    out = anyflex.flex_attention(q[:, :, rows], k, v, block_mask=mask)
    compare_gradients(out, dense(q[:, :, rows], k, v, 1.0, live(WINDOW)[rows]), [q, k, v])


def test_a_block_mask_whose_function_can_not_be_pickled_can_not_either() -> None:
    mask = anyflex.create_block_mask(lambda b, h, i, j: near(b, h, i, j), None, None, 40, 40)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(mask)


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
