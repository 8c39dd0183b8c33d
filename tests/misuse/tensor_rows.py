"""Rows 1 to 32: tensors and scalars."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyflex import AuxRequest
from anyflex.errors import ArgumentError, ArgumentTypeError, BackendRefused, TensorFormError
from tests.misuse.row import Attend, Table, inputs

__all__ = ["TABLE"]

TABLE = Table()
wrong, legal = TABLE.wrong, TABLE.legal


@wrong(1, ArgumentTypeError, "query", "list", "Tensor", compiled=True)
def query_is_a_list(attend: Attend) -> None:
    _, key, value = inputs()
    attend([[1.0]], key, value)


@wrong(2, ArgumentTypeError, "key", r"torch\.from_numpy")
def key_is_a_numpy_array(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, key.numpy(), value)


@wrong(3, ArgumentTypeError, "value", "None", compiled=True)
def value_is_none(attend: Attend) -> None:
    query, key, _ = inputs()
    attend(query, key, None)


@wrong(4, TensorFormError, "3|2, 16, 8", r"\(B, H, L, E\)", "unsqueeze", compiled=True)
def all_are_three_dimensional(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query[0], key[0], value[0])


@wrong(5, TensorFormError, "query", "1, 2, 2, 16, 8", compiled=True)
def query_is_five_dimensional(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query[None], key, value)


@wrong(6, ArgumentError, "query", "key", r"\b8\b", r"\b12\b", compiled=True)
def head_dims_differ(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, torch.cat([key, key[..., :4]], -1), value)


@wrong(7, ArgumentError, "key", "value", r"\b16\b", r"\b15\b", compiled=True)
def key_and_value_lengths_differ(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, key, value[:, :, :15])


@wrong(8, ArgumentError, "key", "value", r"\b1\b", r"\b2\b", compiled=True)
def key_and_value_heads_differ(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, key, value[:, :1])


@wrong(9, ArgumentError, "key", "value", r"\b1\b", r"\b2\b", compiled=True)
def key_and_value_batches_differ(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, key, value[:1])


@wrong(10, ArgumentError, r"\b4\b", r"\b2\b", r"1 or", compiled=True)
def kv_batch_is_neither_one_nor_the_batch(attend: Attend) -> None:
    query, key, value = inputs(batch=4, kv_batch=2)
    attend(query, key, value)


@wrong(11, ArgumentError, r"\b1\b", r"\b4\b", "query", "[Bb]roadcast", compiled=True)
def query_batch_is_one_of_a_larger_kv_batch(attend: Attend) -> None:
    query, key, value = inputs(batch=1, kv_batch=4)
    attend(query, key, value)


@wrong(12, ArgumentTypeError, "int32", "float32", "bfloat16", "float16", compiled=True)
def integers(attend: Attend) -> None:
    attend(*(tensor.int() for tensor in inputs()))


@wrong(13, ArgumentTypeError, "bool", "float32", compiled=True)
def bools(attend: Attend) -> None:
    attend(*(tensor > 0 for tensor in inputs()))


@wrong(14, ArgumentTypeError, "complex64", "float32")
def complex_numbers(attend: Attend) -> None:
    attend(*(tensor + 1j for tensor in inputs()))


@wrong(15, BackendRefused, "float8_e4m3fn")
def float8(attend: Attend) -> None:
    attend(*(tensor.to(torch.float8_e4m3fn) for tensor in inputs()))


@wrong(16, TensorFormError, "query", "key", "float32", "float16", r"\.to\b", compiled=True)
def dtypes_are_mixed(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, key.half(), value)


@wrong(17, ArgumentError, "query", "key", "cpu", "meta")
def devices_are_mixed(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, key.to("meta"), value)


@wrong(18, ArgumentError, "cuda:0", "cuda:1")
def device_indices_are_mixed(attend: Attend) -> None:
    # Fake tensors can be on devices of a kind that this machine lacks, not on a second one of a
    # kind that it has once.
    if torch.cuda.device_count() == 1:
        pytest.skip("this machine has one cuda device")
    with FakeTensorMode():
        query = torch.empty(2, 2, 16, 8, device="cuda:0")
        key = torch.empty(2, 2, 16, 8, device="cuda:1")
        attend(query, key, key)


@wrong(19, BackendRefused, "meta", "trace|fake|export")
def meta_tensors(attend: Attend) -> None:
    attend(*(tensor.to("meta") for tensor in inputs()))


@wrong(20, TensorFormError, "key", "sparse", r"\.to_dense\(\)")
def key_is_sparse(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, key.to_sparse(), value)


@wrong(21, TensorFormError, "query", "nested", "pack")
def query_is_nested(attend: Attend) -> None:
    _, key, value = inputs()
    nested = torch.nested.nested_tensor(
        [torch.randn(2, 3, 8), torch.randn(2, 5, 8)], layout=torch.strided
    )
    attend(nested, key, value)


@wrong(22, ArgumentError, r"E = 0|E=0|head dim.* 0", compiled=True)
def head_dim_is_zero(attend: Attend) -> None:
    attend(*inputs(dim=0))


@wrong(23, ArgumentError, r"\bH", r"\b0\b")
def zero_heads(attend: Attend) -> None:
    query, key, value = (tensor[:, :0] for tensor in inputs())
    out = attend(query, key, value)
    assert out.shape == query.shape
    raise ArgumentError("an empty result is as good: H = 0")


@wrong(23, ArgumentError, r"\bH", r"\b0\b")
def zero_kv_heads_with_enable_gqa(attend: Attend) -> None:
    query, key, value = inputs()
    attend(query, key[:, :0], value[:, :0], enable_gqa=True)


@wrong(23, ArgumentError, r"\bH", r"\b0\b")
def zero_heads_with_enable_gqa(attend: Attend) -> None:
    query, key, value = (tensor[:, :0] for tensor in inputs())
    out = attend(query, key, value, enable_gqa=True)
    assert out.shape == query.shape
    raise ArgumentError("an empty result is as good: H = 0")


@legal(24, compiled=True)
def no_keys(attend: Attend) -> None:
    out, aux = attend(*inputs(kv_length=0), return_aux=AuxRequest(lse=True))
    assert out.shape == (2, 2, 16, 8)
    assert not out.any()
    assert (aux.lse == -math.inf).all()


@wrong(25, ArgumentTypeError, "scale", "str", compiled=True)
def scale_is_a_string(attend: Attend) -> None:
    attend(*inputs(), scale="0.1")


@wrong(26, ArgumentError, "scale", "nan")
def scale_is_nan(attend: Attend) -> None:
    attend(*inputs(), scale=math.nan)


@wrong(26, ArgumentError, "scale", "float32", "1e\\+39")
def scale_is_infinite_as_float32(attend: Attend) -> None:
    attend(*inputs(), scale=1e39)


@wrong(26, ArgumentError, "scale", "inf")
def scale_is_infinite(attend: Attend) -> None:
    attend(*inputs(), scale=math.inf)


@wrong(27, ArgumentError, "scale", "gradient|grad", "mod", "0-d", compiled=True)
def scale_requires_a_gradient(attend: Attend) -> None:
    attend(*inputs(), scale=torch.tensor(0.5, requires_grad=True))


@wrong(28, ArgumentTypeError, "scale", "bool", compiled=True)
def scale_is_a_bool(attend: Attend) -> None:
    attend(*inputs(), scale=True)


@wrong(29, ArgumentTypeError, "scale", r"\[2\]|\(2,\)", compiled=True)
def scale_has_several_elements(attend: Attend) -> None:
    attend(*inputs(), scale=torch.ones(2))


@wrong(30, BackendRefused, "twice|second|double")
def double_backward(attend: Attend) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in inputs())
    out = attend(query, key, value)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    grad.sum().backward()


@wrong(31, BackendRefused, "grad|transform")
def functional_grad(attend: Attend) -> None:
    query, key, value = inputs()
    torch.func.grad(lambda q: attend(q, key, value).sum())(query)


@wrong(31, BackendRefused, "vmap|transform")
def functional_vmap(attend: Attend) -> None:
    query, key, value = inputs()
    torch.func.vmap(lambda q: attend(q, key, value))(query[None])


@wrong(32, RuntimeError, "modified by an inplace operation")
def query_is_changed_before_backward(attend: Attend) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in inputs())
    doubled = query * 2.0
    out = attend(doubled, key, value)
    doubled.add_(1.0)
    out.sum().backward()
