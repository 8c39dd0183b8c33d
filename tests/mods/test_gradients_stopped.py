"""`torch.no_grad` and custom autograd Functions inside of a score mod: gradients agree with those
of dense torch, or the mod is refused, eager and compiled."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import anyflex
from anyflex.errors import ModTraceError, PerformanceWarning
from anyflex.registry.fallback import forget_warnings
from anyflex.tracing.trace import trace_mod

__all__: list[str] = []

TABLE = torch.randn(20, generator=torch.Generator().manual_seed(4)).requires_grad_()
Attention = Callable[..., Tensor]


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Reversed(Rounded):
    """Passes the value unchanged and the gradient with the other sign."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_warnings()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 2, 20, 8, generator=generator, requires_grad=True) for _ in range(3)]


def by_anyflex(mod: Callable[..., Any], compiled: bool) -> Attention:
    def attend(*inputs: Tensor) -> Tensor:
        out = anyflex.flex_attention(*inputs, mod)
        assert isinstance(out, Tensor)
        return out

    return torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend


def by_torch(mod: Callable[..., Any]) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT / 8**0.5
        scores = mod(scores, 0, 0, torch.arange(20)[:, None], torch.arange(20))
        return torch.softmax(scores, -1) @ value

    return attend


def gradients_of(attend: Attention) -> tuple[Tensor, ...]:
    inputs = [*leaves(), TABLE]
    found = torch.autograd.grad(
        attend(*inputs[:3]).square().sum(), inputs, allow_unused=True, materialize_grads=True
    )
    return tuple(found)


def agree(attend: Attention, mod: Callable[..., Any]) -> None:
    for found, wanted in zip(gradients_of(attend), gradients_of(by_torch(mod)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def with_a_part(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    with torch.no_grad():
        part = TABLE[k] * s
    return s + part * 0.5


def with_nested_modes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    with torch.no_grad():
        part = torch.tanh(s)
        with torch.enable_grad():
            learned = TABLE[q] * part
    return s * part + learned


@torch.no_grad()
def decorated(s: Any) -> Any:
    return torch.sigmoid(s) + TABLE[3]


def with_a_decorated_function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * decorated(s) + (q - k) * 0.1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mod", [with_a_part, with_nested_modes, with_a_decorated_function])
def test_no_grad_inside_of_a_mod_stops_gradients(mod: Callable[..., Any], compiled: bool) -> None:
    agree(by_anyflex(mod, compiled), mod)


def test_a_trace_that_was_made_without_gradients_is_none_for_a_call_with_them() -> None:
    with torch.no_grad():
        by_anyflex(with_a_part, False)(*leaves())
    agree(by_anyflex(with_a_part, False), with_a_part)
    with torch.no_grad():
        out = by_anyflex(with_a_part, False)(*leaves())
        torch.testing.assert_close(out, by_torch(with_a_part)(*leaves()))


FUNCTIONS = {
    "of the score": lambda s, b, h, q, k: Rounded.apply(s * 3),
    "of a captured tensor's element": lambda s, b, h, q, k: s + Rounded.apply(TABLE[k] * 2),
    "of what it returns": lambda s, b, h, q, k: Reversed.apply(s * 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_custom_function_runs_on_the_reference_with_its_own_backward(name: str) -> None:
    mod = FUNCTIONS[name]
    with pytest.warns(PerformanceWarning, match=r"torch\.autograd\.Function in a mod"):
        agree(by_anyflex(mod, False), mod)


@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "in one graph"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_custom_function_is_refused_where_it_would_be_compiled(name: str, whole: bool) -> None:
    attend = torch.compile(
        by_anyflex(FUNCTIONS[name], False), backend="aot_eager", fullgraph=whole
    )
    with pytest.raises(ModTraceError, match=r"Function in a mod.*\n?.*\.detach\(\)"):
        attend(*leaves())


def clamped_in(x: Tensor) -> Tensor:
    """Called by a Function's forward."""
    return torch.round(x)


class ByAHelper(Rounded):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return clamped_in(x)


class ByTorchAlone(Rounded):
    """Has no frame of Python at all."""

    forward = staticmethod(operator.neg)  # type: ignore[assignment]


class WithGradients(Rounded):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            return torch.round(x) + 0.0


class UnderInference(Rounded):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.inference_mode():
            return torch.round(x)


class InContext(Rounded):
    """Returns its input and computes in `setup_context`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(torch.tanh(output))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0]


class Outer(Rounded):
    """Applies another one."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        result = Reversed.apply(x)
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


class OwnBatches(Rounded):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return OwnBatches.apply(*args), in_dims[0]


EVERY_FUNCTION = [Rounded, Reversed, ByAHelper, ByTorchAlone, WithGradients, UnderInference]
EVERY_FUNCTION += [InContext, Outer, OwnBatches]


@pytest.mark.parametrize("function", EVERY_FUNCTION, ids=lambda function: str(function.__name__))
def test_a_custom_function_is_found_however_it_is_written(function: Any) -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return function.apply(s * 3) + TABLE[k]

    with pytest.raises(ModTraceError, match=r"torch\.autograd\.Function.* in? ?a mod") as caught:
        trace_mod(mod, "score")
    assert caught.value.pure
    with pytest.warns(PerformanceWarning, match=r"torch\.autograd\.Function"):
        agree(by_anyflex(mod, False), mod)


def test_a_function_defined_while_others_are_known_is_found() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        class Local(Reversed):
            pass

        return Local.apply(s)

    with pytest.raises(ModTraceError, match=r"Function in a mod"):
        trace_mod(mod, "score")


def test_a_forward_that_is_called_and_not_applied_is_a_function_like_any_other() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return WithGradients.forward(s * 3) * s

    trace_mod(mod, "score")
    agree(by_anyflex(mod, False), mod)


def test_the_refusal_of_a_custom_function_tells_the_line() -> None:
    with pytest.raises(ModTraceError, match=r"Function in a mod \(.*test_gradients_stopped") as e:
        trace_mod(FUNCTIONS["of the score"], "score")
    assert e.value.pure


class Older(torch.autograd.Function):
    """In the form that vmap can't call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def test_a_function_that_vmap_cannot_call_is_refused_with_the_cure() -> None:
    with pytest.raises(ModTraceError, match=r"Function in a mod.*\.detach\(\)") as caught:
        by_anyflex(lambda s, b, h, q, k: Older.apply(s), False)(*leaves())
    assert "setup_context" in str(caught.value.__cause__)


def test_where_no_gradient_is_recorded_a_function_is_what_its_forward_does() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return Older.apply(s * 3)

    with torch.no_grad():
        wanted = by_torch(mod)(*leaves())
        for compiled in (False, True):
            torch.testing.assert_close(by_anyflex(mod, compiled)(*leaves()), wanted)
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: Older.apply((q - k) * 1.0) > 0, None, None, 40, 40
    )
    plain = anyflex.create_block_mask(lambda b, h, q, k: q > k, None, None, 40, 40)
    assert torch.equal(mask.runs, plain.runs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_around_the_attention_changes_no_refusal(reentrant: bool) -> None:
    def attend(mod: Callable[..., Any]) -> Tensor:
        out = checkpoint(by_anyflex(mod, False), *leaves(), use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return out

    with pytest.raises(ModTraceError, match="returns a bool"):
        attend(lambda s, b, h, q, k: s > 0)
    with pytest.raises(ModTraceError, match="reduction"):
        attend(lambda s, b, h, q, k: s + TABLE.sum() * s.sum())
    gc.collect()  # a checkpoint that an error left keeps its hooks, in torch 2.11, until then
    torch.testing.assert_close(attend(with_a_part), by_torch(with_a_part)(*leaves()))


class Recomputed(torch.autograd.Function):
    """Calls attention with gradients from its forward."""

    @staticmethod
    def forward(ctx: Any, mod: Any, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = by_anyflex(mod, False)(*leaves)
            ctx.gradients = torch.autograd.grad(out.square().sum(), leaves)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *ctx.gradients)


def test_gradients_that_are_taken_inside_of_a_function_around_the_attention() -> None:
    def plain(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * torch.tanh(s)

    inputs = leaves()
    out = Recomputed.apply(plain, *inputs)
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out.sum(), inputs)
    wanted = torch.autograd.grad(by_torch(plain)(*inputs).square().sum(), inputs)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    with pytest.warns(PerformanceWarning, match=r"Function in a mod"):
        Recomputed.apply(FUNCTIONS["of what it returns"], *inputs)


def test_inference_mode_inside_of_a_mod_stops_gradients() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        with torch.inference_mode():
            part = torch.tanh(s)
        return s + part * 0.5

    with pytest.warns(PerformanceWarning, match=r"torch\.inference_mode.*\.detach\(\)"):
        agree(by_anyflex(mod, False), mod)


def test_a_call_in_inference_mode_takes_any_mod() -> None:
    with torch.inference_mode():
        for mod in (with_a_part, FUNCTIONS["of the score"], FUNCTIONS["of what it returns"]):
            out = by_anyflex(mod, False)(*leaves())
            torch.testing.assert_close(out, by_torch(mod)(*leaves()))
        with pytest.raises(ModTraceError, match="a reduction in a mod"):
            by_anyflex(lambda s, b, h, q, k: s.sum(), False)(*leaves())


def test_a_custom_function_of_a_whole_table_is_none_of_the_mods_business() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + Rounded.apply(TABLE * 2)[k]

    agree(by_anyflex(mod, False), mod)
