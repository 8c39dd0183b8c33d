"""Gradients through every door: core's for a forward-only backend, saved outputs and workspace,
lse and delta from outside, autocast, and what can't be differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import anyflex
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved, TensorSpec
from anyflex.contract.capabilities import Capabilities
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.spec import Spec
from anyflex.errors import ArgumentError, ArgumentTypeError, BackendRefused
from anyflex.reference.backend import ReferenceBackend
from anyflex.registry import isolated, register
from tests.soak import SOAK

__all__: list[str] = []


@pytest.fixture
def registry() -> Iterator[None]:
    with isolated(reference=ReferenceBackend):
        yield


def tensors(*shape: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + count)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(count)
    ]


SLOPES = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)


def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.tanh(s) * 3 + SLOPES[h] * (k - q)


class _Forward(Kernel):
    """The reference's forward, and nothing else."""

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner

    def forward(self, call: Call, out: Outputs) -> None:
        self.inner.forward(call, out)


class ForwardOnly(Backend):
    """A backend whose gradients core computes."""

    capabilities = Capabilities(
        dtypes=frozenset({torch.float64}),
        captured_dtypes=frozenset({torch.float64}),
        aux=frozenset({"lse", "max_scores"}),
        core_backward=True,
    )

    def probe(self) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        reference = ReferenceBackend("reference", "cpu")
        return _Forward(reference.compile(spec, artifacts))


class _Saving(Kernel):
    """Leaves twice the lse for its backward, which halves it, and wants scratch both ways."""

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner

    def workspace(self, call: Call, direction: Any) -> tuple[TensorSpec, ...]:
        return (TensorSpec((3, len(direction)), torch.int16, zeroed=True),)

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        return (TensorSpec(tuple(call.query.shape[:3]), torch.float64),)

    def forward(self, call: Call, out: Outputs) -> None:
        assert [tuple(scratch.shape) for scratch in out.workspace] == [(3, len("forward"))]
        assert not out.workspace[0].any()
        assert out.lse is not None
        self.inner.forward(call, out)
        for saved in out.saved:
            saved.copy_(2 * out.lse)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        assert [tuple(scratch.shape) for scratch in grads.workspace] == [(3, len("backward"))]
        (doubled,) = saved.extras
        self.inner.backward(call, Saved(saved.out, doubled / 2), grad, grads)


class SavingBackend(ForwardOnly):
    def supports(self, spec: Spec) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        reference = ReferenceBackend("reference", "cpu")
        return _Saving(reference.compile(spec, artifacts))


def gradients_of(backend: str, attend: Any = anyflex.flex_attention) -> list[Tensor]:
    leaves = [*tensors(2, 2, 9, 4), SLOPES]
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 9, 9, BLOCK_SIZE=4)
    out, aux = attend(
        *leaves[:3],
        alibi,
        mask,
        return_aux=anyflex.AuxRequest(lse=True),
        backend=backend,
    )
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    loss = (out * weights).sum() + (aux.lse * weights[..., 0]).sum()
    return [out, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("kind", [ForwardOnly, SavingBackend])
def test_a_backend_gets_the_references_gradients(kind: type[Backend], registry: None) -> None:
    register("cpu.stub", kind)
    for found, wanted in zip(gradients_of("cpu.stub"), gradients_of("reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_two_halves_of_the_keys_give_the_whole_gradient() -> None:
    query, key, value = tensors(2, 2, 10, 4)
    out, aux = anyflex.flex_attention(
        query, key, value, alibi, return_aux=anyflex.AuxRequest(lse=True)
    )
    dout, dlse = torch.ones_like(out) * 0.3, torch.linspace(0, 1, 40).view(2, 2, 10).double()
    whole = torch.autograd.grad(
        (out * dout).sum() + (aux.lse * dlse).sum(), [query, key, value, SLOPES]
    )
    out, lse = out.detach(), aux.lse.detach()

    parts = []
    for begin in (0, 5):

        def shifted(s: Any, b: Any, h: Any, q: Any, k: Any, begin: int = begin) -> Any:
            return alibi(s, b, h, q, k + begin)

        half = slice(begin, begin + 5)
        for delta in (None, (dout * out).sum(-1)):
            part = anyflex.flex_attention_backward(
                dout,
                query,
                key[:, :, half],
                value[:, :, half],
                out,
                lse,
                shifted,
                dlse=dlse,
                delta=delta,
            )
        assert part.captured[0][0] is SLOPES
        parts.append(part)
    torch.testing.assert_close(parts[0].query + parts[1].query, whole[0])
    torch.testing.assert_close(torch.cat([part.key for part in parts], 2), whole[1])
    torch.testing.assert_close(torch.cat([part.value for part in parts], 2), whole[2])
    torch.testing.assert_close(parts[0].captured[0][1] + parts[1].captured[0][1], whole[3])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dout": None}, ArgumentTypeError, "dout must be a Tensor"),
        ({"dout": torch.zeros(2, 2, 10, 3).double()}, ArgumentError, r"dout.*\[2, 2, 10, 4\]"),
        ({"lse": torch.zeros(2, 2, 9).double()}, ArgumentError, r"lse.*\[2, 2, 10\]"),
        ({"lse": torch.zeros(2, 2, 10)}, ArgumentTypeError, "lse.*float64"),
        ({"delta": torch.zeros(2, 2)}, ArgumentError, "delta"),
        ({"dlse": 3.0}, ArgumentTypeError, "dlse"),
        ({"backend": "nobody"}, ArgumentError, "nobody"),
    ],
)
def test_a_wrong_tensor_from_outside_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    query, key, value = (tensor.detach() for tensor in tensors(2, 2, 10, 4))
    out, lse = torch.zeros_like(query), torch.zeros(2, 2, 10).double()
    given = {"dout": out, "query": query, "key": key, "value": value, "out": out, "lse": lse}
    with pytest.raises(error, match=message):
        anyflex.flex_attention_backward(**{**given, **change})


@pytest.mark.parametrize("compiled", [False, True])
def test_second_derivatives_are_refused(compiled: bool) -> None:
    query, key, value = tensors(1, 1, 4, 4)
    attend = anyflex.flex_attention
    if compiled:
        torch._dynamo.reset()
        with pytest.raises((BackendRefused, RuntimeError), match="twice|double backward"):
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
            (first,) = torch.autograd.grad(
                attend(query, key, value).sum(), query, create_graph=True
            )
            torch.autograd.grad(first.sum(), query)
        return
    (first,) = torch.autograd.grad(attend(query, key, value).sum(), query, create_graph=True)
    with pytest.raises(BackendRefused, match="not differentiable twice"):
        torch.autograd.grad(first.sum(), query)


def part(dout: Tensor, *given: Tensor) -> list[Tensor]:
    """Gradients of query, key, value and SLOPES, with lse from outside."""
    found = anyflex.flex_attention_backward(dout, *given, alibi)
    return [found.query, found.key, found.value, found.captured[0][1]]


def given_from_outside() -> list[Tensor]:
    query, key, value = (tensor.detach() for tensor in tensors(1, 2, 6, 4))
    out, lse = anyflex.flex_attention(query, key, value, alibi, return_lse=True)
    return [torch.ones_like(out), query, key, value, out.detach(), lse.detach()]


def test_gradients_with_lse_from_outside_are_compiled_into_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(part, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given_from_outside()), part(*given_from_outside()))


def test_gradients_with_lse_from_outside_of_tensors_without_numbers() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in given_from_outside()]
        assert [found.shape for found in part(*fakes)] == [(1, 2, 6, 4)] * 3 + [(2,)]
    metas = [tensor.to("meta") for tensor in given_from_outside()]
    with pytest.raises(BackendRefused, match="meta"):
        anyflex.flex_attention_backward(*metas)


def test_batched_gradients_are_refused() -> None:
    query, key, value = tensors(1, 2, 6, 4)
    out = anyflex.flex_attention(query, key, value)
    with pytest.raises(BackendRefused, match="batched.*one at a time"):
        torch.autograd.grad(out, query, torch.ones(3, *out.shape).double(), is_grads_batched=True)
    given = given_from_outside()
    with pytest.raises(BackendRefused, match="vmap"):
        torch.vmap(lambda dout: part(dout, *given[1:]))(given[0][None])


def test_batched_gradients_of_lse_alone_are_refused() -> None:
    query, key, value = tensors(1, 2, 6, 4)
    _, lse = anyflex.flex_attention(query, key, value, return_lse=True)
    with pytest.raises(BackendRefused, match="batched.*one at a time"):
        torch.autograd.grad(lse, query, torch.ones(3, *lse.shape).double(), is_grads_batched=True)


def test_second_derivatives_by_what_arrives_at_lse_are_refused() -> None:
    query, key, value = tensors(1, 2, 6, 4)
    weights = torch.ones(1, 2, 6, dtype=torch.float64, requires_grad=True)
    _, lse = anyflex.flex_attention(query, key, value, return_lse=True)
    (first,) = torch.autograd.grad((weights * lse).sum(), query, create_graph=True)
    with pytest.raises(BackendRefused, match="not differentiable twice"):
        torch.autograd.grad(first.square().sum(), weights)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [((0, 4, 20, 8), (1, 2, 30, 8)), ((2, 4, 0, 8), (2, 2, 30, 8))])
def test_keys_of_no_queries_have_gradients_of_zero(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, backend: str | None
) -> None:
    of_query, of_key = shapes
    leaves = [torch.ones(s, dtype=dtype, requires_grad=True) for s in (of_query, of_key, of_key)]
    table = torch.ones(40, requires_grad=True)
    released = [torch.full(of_key, torch.nan, dtype=dtype) for _ in range(8)]
    del released  # gradients are allocated in its memory
    out = anyflex.flex_attention(
        *leaves, lambda s, b, h, q, k: s + table[k], backend=backend, enable_gqa=True
    )
    out.sum().backward()
    for tensor in (*leaves, table):
        assert tensor.grad is not None and not tensor.grad.any()


def test_second_derivatives_by_a_captured_tensor_are_refused() -> None:
    query, key, value = (tensor.detach() for tensor in tensors(1, 2, 6, 4))
    out = anyflex.flex_attention(query, key, value, alibi)
    (gradient,) = torch.autograd.grad(out.sum(), SLOPES, create_graph=True)
    with pytest.raises(BackendRefused, match="not differentiable twice"):
        torch.autograd.grad(gradient.sum(), SLOPES)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("recorded", [False, True])
def test_a_forward_mode_derivative_is_refused(position: int, recorded: bool) -> None:
    given = [tensor.detach() for tensor in tensors(1, 2, 6, 4)]
    given.append(SLOPES.detach())
    with forward_ad.dual_level():
        given[position] = forward_ad.make_dual(given[position], torch.ones_like(given[position]))
        if recorded:
            given[0].requires_grad_()
        query, key, value, slopes = given
        with pytest.raises(BackendRefused, match="forward-mode"):
            anyflex.flex_attention(query, key, value, lambda s, b, h, q, k: s + slopes[h] * q)


TRANSFORMS: dict[str, Any] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
}


@pytest.mark.parametrize(
    ("transform", "whole"),
    [
        *[(transform, True) for transform in TRANSFORMS],
        *[(transform, False) for transform in list(TRANSFORMS)[:: 1 if SOAK else 3]],
    ],
)
def test_a_transform_inside_of_a_compiled_program_is_refused(transform: str, whole: bool) -> None:
    query, key, value = (tensor.detach() for tensor in tensors(1, 2, 6, 4))
    torch._dynamo.reset()

    def transformed(x: Tensor) -> Tensor:
        found = TRANSFORMS[transform](lambda x: anyflex.flex_attention(x, key, value), x)
        assert isinstance(found, Tensor)
        return found

    with pytest.raises(BackendRefused, match=f"functorch transform {transform}"):
        torch.compile(transformed, backend="aot_eager", fullgraph=whole)(query)


@pytest.mark.parametrize("way", ["compiled", "compiled before", "watched"])
def test_a_tangent_is_refused_on_the_way_through_the_static_op(way: str) -> None:
    query, key, value = (tensor.detach() for tensor in tensors(1, 2, 6, 4))
    torch._dynamo.reset()
    compiled = torch.compile(anyflex.flex_attention, backend="aot_eager")
    if way == "compiled before":
        compiled(query, key, value)
    with forward_ad.dual_level():
        query = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(BackendRefused, match="forward-mode"):
            if way != "watched":
                compiled(query, key, value)
            else:
                with FlopCounterMode(display=False):
                    anyflex.flex_attention(query, key, value)


def untraceable(slopes: Tensor) -> Any:
    return lambda s, b, h, q, k: s + torch.special.i0(slopes[h]) * (k - q)


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_an_untraceable_mods_gradient_passes_through_hooks_on_saved_tensors() -> None:
    query, key, value = tensors(1, 2, 6, 4)
    wanted = torch.autograd.grad(
        anyflex.flex_attention(query, key, value, untraceable(SLOPES)).square().sum(), SLOPES
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        out = anyflex.flex_attention(query, key, value, untraceable(SLOPES))
    assert wanted[0].any()
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), SLOPES), wanted)


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_a_change_of_what_an_untraceable_mod_reads_is_noticed_in_backward() -> None:
    query, key, value = tensors(1, 2, 6, 4)
    slopes = SLOPES.detach().clone()
    out = anyflex.flex_attention(query, key, value, untraceable(slopes))
    slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tensors_of_inference_mode_in_training_are_refused_with_the_cure() -> None:
    with torch.inference_mode():
        ids = torch.arange(6) // 2
        mask = anyflex.create_block_mask(lambda b, h, q, k: ids[q] == ids[k], 1, 1, 6, 6)
    query, key, value = tensors(1, 2, 6, 4)
    with pytest.raises(ArgumentError, match=r"inference_mode.*clone"):
        anyflex.flex_attention(query, key, value, block_mask=mask)
    with torch.no_grad():
        anyflex.flex_attention(query, key, value, block_mask=mask)


def test_max_scores_have_no_gradient() -> None:
    out, aux = anyflex.flex_attention(
        *tensors(1, 1, 4, 4), return_aux=anyflex.AuxRequest(max_scores=True)
    )
    assert out.requires_grad
    assert not aux.max_scores.requires_grad
    assert aux.lse is None


def test_an_unused_output_costs_no_gradient() -> None:
    query, key, value = tensors(1, 1, 4, 4)
    out, aux = anyflex.flex_attention(query, key, value, return_aux=anyflex.AuxRequest(lse=True))
    for loss in (out.sum(), aux.lse.sum()):
        (gradient,) = torch.autograd.grad(loss, query, retain_graph=True)
        assert gradient.isfinite().all()
    (none,) = torch.autograd.grad(aux.lse.sum(), value, retain_graph=True)
    assert not none.any()


@pytest.mark.parametrize("through_op", [False, True])
def test_autocast_casts_all_but_float64(through_op: bool) -> None:
    attend = anyflex.flex_attention
    if through_op:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="eager", fullgraph=True)
    query = torch.randn(1, 1, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(query, query.half(), query).dtype is torch.bfloat16
        wide = query.double()
        assert attend(wide, wide, wide).dtype is torch.float64
    with torch.autocast("cpu", enabled=False):
        assert attend(query, query, query).dtype is torch.float32


@pytest.mark.parametrize("through_op", [False, True])
def test_autocast_is_a_cast_of_the_inputs_and_nothing_more(through_op: bool) -> None:
    attend = anyflex.flex_attention
    if through_op:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="eager", fullgraph=True)
    torch.manual_seed(3)
    wide = [torch.randn(1, 2, 40, 32) for _ in range(3)]
    narrow = [tensor.bfloat16().requires_grad_() for tensor in wide]
    want, want_lse = anyflex.flex_attention(*narrow, return_lse=True)
    wanted = torch.autograd.grad(want.float().square().sum() + want_lse.sum(), narrow)
    for tensor in wide:
        tensor.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attend(*wide, return_lse=True)
        found = torch.autograd.grad(out.float().square().sum() + lse.sum(), wide)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)  # scores and sums stay in float32
    for gradient, right in zip(found, wanted, strict=True):
        assert torch.equal(gradient, right.float())


def test_the_output_keeps_the_querys_dimension_order() -> None:
    packed = torch.randn(2, 7, 3, 8, requires_grad=True)
    query = packed.transpose(1, 2)  # [B, H, L, E] stored as [B, L, H, E]
    key = torch.randn(1, 1, 5, 8).expand(2, 3, 5, 8).requires_grad_()
    value = torch.randn(2, 3, 5, 6)
    out = anyflex.flex_attention(query, key, value)
    assert out.transpose(1, 2).is_contiguous()
    dq, dk = torch.autograd.grad(out.sum(), [query, key])
    assert dq.stride() == query.stride()
    assert dk.is_contiguous()  # never a copied stride 0


def test_memory_of_a_call_is_freed_with_its_results() -> None:
    import gc
    import weakref

    query = torch.randn(1, 1, 4, 4, requires_grad=True)
    out = anyflex.flex_attention(query, query, query, lambda s, b, h, q, k: s * 2)
    watched = weakref.ref(out)
    gc.disable()
    try:
        del out
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "mps"])
def test_autocast_casts_on_device_types_that_this_machine_lacks(device_type: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    try:
        with FakeTensorMode():
            try:
                query = torch.empty(1, 1, 4, 4, device=f"{device_type}:0")
            except AssertionError as error:
                pytest.skip(f"this torch makes no fake tensors on {device_type}: {error}")
            assert anyflex.flex_attention(query, query.half(), query).dtype is torch.bfloat16
    finally:
        torch.set_autocast_enabled(device_type, False)
