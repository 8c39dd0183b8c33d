"""`sinks=` of flex_attention: in a kernel that has sinks and, for others, applied by core.

The conformance kit compares results and gradients with the dense formula, on every backend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import anyflex
from anyflex import AuxRequest
from anyflex.errors import ArgumentError, ArgumentTypeError, BackendRefused
from anyflex.plugin import (
    Accepted,
    Call,
    Decision,
    GradInputs,
    Grads,
    Kernel,
    Rejected,
    Saved,
    Spec,
    isolated,
    register,
)
from anyflex.reference.backend import ReferenceBackend
from anyflex.runtime import launch

__all__: list[str] = []

SINKS = (0.3, -math.inf, 2.0, -1.0)
BOTH = AuxRequest(lse=True, max_scores=True)


class WithoutSinks(ReferenceBackend):
    """The reference, with sinks unknown to it."""

    capabilities = dataclasses.replace(
        ReferenceBackend.capabilities,
        known_fields=ReferenceBackend.capabilities.known_fields - {"sinks"},
    )


@pytest.fixture(params=["reference", "cpu.without"])
def backend(request: pytest.FixtureRequest) -> Any:
    with isolated():
        register("cpu.without", WithoutSinks)
        yield request.param


def inputs(
    dtype: torch.dtype = torch.float64, length: int = 21, keys: int = 33, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn((2, heads, rows, 8), generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads, rows in ((4, length), (2, keys), (2, keys))
    )
    return query, key, value, torch.tensor(SINKS, dtype=dtype, requires_grad=True)


def formula(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, live: Tensor | None = None
) -> Tensor:
    """A softmax over the keys and the sink, which is then dropped, in float64."""
    query, key, value, sinks = (each.double() for each in (query, key, value, sinks))
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if live is not None:
        scores = scores.masked_fill(~live, -math.inf)
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], -1)
    # A row of -inf alone is 0, with gradients 0.
    dead = (scores[..., :-1] == -math.inf).all(-1, keepdim=True)
    return torch.softmax(torch.where(dead, 0.0, scores), -1)[..., :-1].masked_fill(dead, 0) @ value


def attend(*tensors: Tensor, backend: str, **more: Any) -> Any:
    *given, sinks = tensors
    return anyflex.flex_attention(*given, enable_gqa=True, sinks=sinks, backend=backend, **more)


def check(
    found: Callable[..., Tensor], tensors: tuple[Tensor, ...], live: Tensor | None = None
) -> None:
    """Compare out and every gradient with the formula's."""
    out, exact = found(*tensors), formula(*tensors, live)
    assert out.dtype is tensors[0].dtype
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad((out * weight).sum(), tensors)
    wanted = torch.autograd.grad((exact * weight.double()).sum(), tensors)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}[out.dtype]
    for one, other, tensor in zip([out, *grads], [exact, *wanted], [out, *tensors], strict=True):
        assert one.dtype is tensor.dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_out_and_gradients_are_those_of_the_formula(backend: str, dtype: torch.dtype) -> None:
    for length, keys in ((1, 40), (5, 3), (130, 70)):
        check(lambda *t: attend(*t, backend=backend), inputs(dtype, length, keys))


def test_a_dead_row_is_0_with_gradients_0(backend: str) -> None:
    tensors = inputs()
    mask = anyflex.create_block_mask(lambda b, h, q, k: k + 4 <= q, None, None, 21, 33)
    live = torch.arange(33) + 4 <= torch.arange(21)[:, None]
    check(lambda *t: attend(*t, backend=backend, block_mask=mask), tensors, live)
    out = attend(*tensors, backend=backend, block_mask=mask)
    strange = torch.zeros_like(out)
    strange[:, :, 0] = math.nan  # what arrives at a dead row reaches nothing
    for gradient in torch.autograd.grad(out, tensors, strange):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    with torch.no_grad():
        tensors[3].fill_(math.nan)
    out = attend(*tensors, backend=backend, block_mask=mask)
    assert (out[:, :, :4] == 0).all()
    assert out[:, :, 4:].isnan().all()
    (gradient,) = torch.autograd.grad(out.sum(), tensors[0])
    assert (gradient[:, :, :4] == 0).all()


def test_a_lack_of_memory_beside_sinks_is_named_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(*given: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    *tensors, sinks = inputs()
    out = attend(*tensors, sinks, backend="reference")
    monkeypatch.setattr(torch, "logaddexp", lacks)
    with pytest.raises(anyflex.AllocationError, match="memory"):
        out.sum().backward()


def test_lse_and_max_scores_leave_the_sinks_out(backend: str) -> None:
    tensors = inputs()
    with torch.no_grad():
        out, aux = attend(*tensors, backend=backend, return_aux=BOTH)
        plain, without = attend(*tensors[:3], None, backend=backend, return_aux=BOTH)
        assert torch.equal(aux.lse, without.lse)
        assert torch.equal(aux.max_scores, without.max_scores)
        torch.testing.assert_close(out, anyflex.with_sinks(plain, aux.lse, tensors[3]))
        maxima = attend(*tensors, backend=backend, return_aux=AuxRequest(max_scores=True))
        assert maxima[1].lse is None
        assert torch.equal(maxima[0], attend(*tensors, backend=backend))


def test_a_gradient_of_lse_is_that_of_the_keys_alone(backend: str) -> None:
    *tensors, sinks = inputs()
    out, aux = attend(*tensors, sinks, backend=backend, return_aux=BOTH)
    again, plain = attend(*tensors, None, backend="reference", return_aux=BOTH)
    wanted = anyflex.with_sinks(again, plain.lse, sinks)
    grads = torch.autograd.grad(out.square().sum() + aux.lse.sin().sum(), [*tensors, sinks])
    exact = torch.autograd.grad(wanted.square().sum() + plain.lse.sin().sum(), [*tensors, sinks])
    torch.testing.assert_close(grads, exact)


def test_no_sinks_and_sinks_of_minus_infinity_are_one_call(backend: str) -> None:
    *tensors, _ = inputs()
    none = torch.full((4,), -math.inf, dtype=torch.float64)
    assert torch.equal(
        attend(*tensors, none, backend=backend), attend(*tensors, None, backend=backend)
    )


def test_sinks_of_any_float_type_and_stride_get_a_gradient_of_theirs(backend: str) -> None:
    *tensors, _ = inputs(torch.float32)
    wide = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    check(lambda *t: attend(*t, backend=backend), (*tensors, torch.zeros(4, requires_grad=True)))
    out = attend(*tensors, wide[::2], backend=backend)
    out.square().sum().backward()
    assert wide.grad is not None and wide.grad.dtype is torch.bfloat16
    assert bool(wide.grad[::2].all()) and not wide.grad[1::2].any()
    one = torch.zeros((), requires_grad=True)
    attend(*tensors, one.expand(4), backend=backend).square().sum().backward()
    torch.testing.assert_close(one.grad, wide.grad.float().sum(), rtol=0.02, atol=0.02)


def test_gradients_of_many_heads_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_PRODUCTS", 2 * 2 * 21 * 8)
    check(lambda *t: attend(*t, backend="reference"), inputs())
    monkeypatch.setattr(launch, "_PRODUCTS", 1)
    check(lambda *t: attend(*t, backend="reference"), inputs())


def test_where_the_sinks_alone_learn_no_kernel_runs_backward() -> None:
    class Counting(ReferenceBackend):
        def compile(self, *given: Any) -> Kernel:
            kernel = super().compile(*given)

            class NoBackward(type(kernel)):  # type: ignore[misc]
                def backward(
                    self, call: Call, saved: Saved, grad: GradInputs, grads: Grads
                ) -> None:
                    raise AssertionError("nothing is left to compute")

            return NoBackward(kernel.prepared)  # type: ignore[attr-defined]

    with isolated():
        register("cpu.counting", Counting)
        *tensors, sinks = inputs()
        frozen = [each.detach() for each in tensors]
        out = attend(*frozen, sinks, backend="cpu.counting")
        (found,) = torch.autograd.grad(out.square().sum(), sinks)
        (wanted,) = torch.autograd.grad(formula(*frozen, sinks).square().sum(), sinks)
        torch.testing.assert_close(found, wanted)


def test_compiled_calls_compute_the_same(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *t: attend(*t, backend=backend), backend="aot_eager", fullgraph=True
    )
    for length in (21, 30):
        check(compiled, inputs(length=length))
    *tensors, sinks = inputs()
    frozen = [each.detach() for each in tensors]
    (found,) = torch.autograd.grad(compiled(*frozen, sinks).square().sum(), sinks)
    (wanted,) = torch.autograd.grad(formula(*frozen, sinks).square().sum(), sinks)
    torch.testing.assert_close(found, wanted)


def test_compiled_autograd_computes_the_same_gradients() -> None:
    torch._dynamo.reset()
    tensors = inputs()
    wanted = torch.autograd.grad(formula(*tensors).square().sum(), tensors)
    loss = attend(*tensors, backend="reference").square().sum()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    torch.testing.assert_close([each.grad for each in tensors], list(wanted))


def test_a_program_exported_without_gradients_refuses_them() -> None:
    class Attention(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            out: Tensor = attend(*tensors, backend="reference")
            return out

    tensors = inputs()
    frozen = tuple(each.detach() for each in tensors)
    program = torch.export.export(Attention(), frozen).module()
    torch.testing.assert_close(program(*frozen), formula(*frozen))
    with pytest.raises(ArgumentError, match="exported or traced without"):
        program(*tensors).sum().backward()


def test_gradients_of_gradients_are_refused(backend: str) -> None:
    tensors = inputs()
    out = attend(*tensors, backend=backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(BackendRefused, match="not differentiable twice"):
        torch.autograd.grad(gradient.square().sum(), tensors[3])


def test_explain_says_who_applies_the_sinks(backend: str) -> None:
    *tensors, sinks = inputs()
    told = anyflex.explain(*tensors, enable_gqa=True, sinks=sinks, backend=backend)
    assert told.sinks_by == {"reference": "kernel", "cpu.without": "core"}[backend]
    assert f"sinks by {told.sinks_by}" in str(told)
    assert told.to_dict()["sinks_by"] == told.sinks_by
    assert told.selection.spec.sinks is (told.sinks_by == "kernel")
    # Beside a gradient of lse core applies them, and not beside lse alone.
    asked: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "backend": backend}
    assert anyflex.explain(*tensors, **asked, sinks=sinks).sinks_by == "core"
    frozen = [each.detach() for each in tensors]
    found = anyflex.explain(*frozen, **asked, sinks=sinks.detach())
    assert found.sinks_by == told.sinks_by
    plain = anyflex.explain(*tensors, enable_gqa=True, backend=backend)
    assert plain.sinks_by == "" and "sinks" not in str(plain)


class InferenceOnly(ReferenceBackend):
    """The reference, with sinks and without any gradient."""

    priority = 1000
    calls: ClassVar[list[tuple[bool, bool]]] = []
    """For each compiled spec whether it has sinks, and whether it needs gradients."""

    def supports(self, spec: Spec) -> Decision:
        return Rejected("gradients") if spec.gradients else Accepted()

    def compile(self, spec: Spec, artifacts: object) -> Kernel:
        self.calls.append((spec.sinks, bool(spec.gradients)))
        return super().compile(spec, artifacts)


@pytest.mark.parametrize("packed", [False, True])
def test_a_backend_without_gradients_applies_the_sinks_of_calls_that_need_none(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InferenceOnly, "calls", [])
    q, k, v, sinks = (t.detach() for t in inputs())
    with isolated():
        register("cpu.inference", InferenceOnly)
        if packed:
            ends = torch.tensor([[0, 21], [0, 33]], dtype=torch.int32)
            batch = anyflex.Packed(ends[0], kv_offsets=ends[1])
            rows = (each[0].transpose(0, 1) for each in (q, k, v))
            out = anyflex.flex_attention_packed(
                *rows, batch.begin(), sinks=sinks, enable_gqa=True, backend="cpu.inference"
            ).transpose(0, 1)[None]
        else:
            out = attend(q, k, v, sinks, backend="cpu.inference")
    torch.testing.assert_close(out[0], formula(q, k, v, sinks)[0])
    assert InferenceOnly.calls == [(True, False)]


def test_who_applies_sinks_is_asked_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InferenceOnly, "calls", [])
    tensors = [t.detach() for t in inputs()]
    with isolated():
        register("cpu.inference", InferenceOnly)
        supports = InferenceOnly.supports

        def exhausted(backend: InferenceOnly, spec: Spec) -> Decision:
            raise torch.OutOfMemoryError("no memory to probe")

        monkeypatch.setattr(InferenceOnly, "supports", exhausted)
        with pytest.raises((torch.OutOfMemoryError, anyflex.AnyflexError)):
            attend(*tensors, backend="cpu.inference")
        monkeypatch.setattr(InferenceOnly, "supports", supports)
        attend(*tensors, backend="cpu.inference")
    assert InferenceOnly.calls == [(True, False)]


def test_a_changed_sink_is_noticed_before_backward() -> None:
    *tensors, sinks = inputs()

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return torch.zeros(3, dtype=tensor.dtype) if tensor.shape == (4,) else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = attend(*tensors, sinks, backend="reference")
    with pytest.raises(ArgumentError, match=r"captured tensor 'sinks' must have shape \[4\]"):
        out.sum().backward()


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (0.5, ArgumentTypeError, r"sinks must be a Tensor \[4\], one .* got float"),
    "ints": (torch.zeros(4, dtype=torch.int64), ArgumentTypeError, "sinks must be floating"),
    "of key heads": (torch.zeros(2), ArgumentError, r"must have shape \[4\], .* got \[2\]"),
    "of rank 0": (torch.zeros(()), ArgumentError, r"must have shape \[4\], .* got \[\]"),
    "of rank 2": (torch.zeros(1, 4), ArgumentError, r"must have shape \[4\], .* got \[1, 4\]"),
    "sparse": (torch.zeros(4).to_sparse(), ArgumentError, r"use sinks.to_dense\(\)"),
    "elsewhere": (torch.zeros(4, device="meta"), ArgumentError, "sinks is on meta.* move it"),
}


CALLS = [(name, False) for name in REFUSED]
CALLS += [(name, True) for name in REFUSED if name != "sparse"]  # Dynamo takes none


@pytest.mark.parametrize(("name", "compiled"), CALLS)
def test_wrong_sinks_are_refused(name: str, compiled: bool) -> None:
    sinks, error, message = REFUSED[name]
    *tensors, _ = inputs()
    call: Callable[..., Any] = attend
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(attend, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=message) as raised:
        call(*tensors, sinks, backend="reference")
    assert compiled or isinstance(raised.value, error)


def test_sinks_without_memory_are_refused() -> None:
    *tensors, _ = inputs()
    sinks = torch.zeros(4, dtype=torch.float64)
    sinks.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="sinks"):
        attend(*tensors, sinks, backend="reference")
