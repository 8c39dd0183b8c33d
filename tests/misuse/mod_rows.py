"""Rows 91 to 124: score mods and their captured values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from anyflex import create_block_mask
from anyflex.errors import (
    AnyflexError,
    ArgumentError,
    ArgumentTypeError,
    ModIndexError,
    ModTraceError,
)
from tests.misuse.row import Attend, Table, inputs

__all__ = ["TABLE"]

TABLE = Table()
legal = TABLE.legal


def refused(
    number: int,
    *names: str,
    error: type[Exception] = ModTraceError,
    compiled: bool = True,
    **details: Any,
) -> Any:
    """Enter a row; nearly all raise ModTraceError, compiled or not."""
    return TABLE.wrong(number, error, *names, compiled=compiled, **details)


def at_line(number: int, *names: str, **details: Any) -> Any:
    """Enter a row whose error must name the mod's line."""
    return refused(number, *names, line=True, **details)


@refused(91, r"\b4\b", "score, b, h, q_idx, kv_idx")
def score_mod_with_four_arguments(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, q, k: s)


@refused(91, r"\b6\b", "score, b, h, q_idx, kv_idx")
def score_mod_with_six_arguments(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k, extra: s)


@refused(92, "score_mod", "Tensor", error=ArgumentTypeError)
def score_mod_is_a_tensor(attend: Attend) -> None:
    attend(*inputs(), torch.zeros(16, 16))


@refused(92, "score_mod", "str", error=ArgumentTypeError)
def score_mod_is_a_string(attend: Attend) -> None:
    attend(*inputs(), "causal")


@refused(93, "None", "return")
def score_mod_returns_none(attend: Attend) -> None:
    def forgets(s: Any, b: Any, h: Any, q: Any, k: Any) -> None:
        s + 1.0

    attend(*inputs(), forgets)


@refused(94, "tuple")
def score_mod_returns_a_tuple(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: (s, s))


@refused(95, r"\[3\]|\(3,\)", r"\[16, 3\]|\(16, 3\)")
def score_mod_returns_a_row(attend: Attend) -> None:
    table = torch.zeros(16, 3)
    attend(*inputs(), lambda s, b, h, q, k: table[q])


@refused(96, "complex")
def score_mod_returns_a_complex_number(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s + 1j)


@refused(97, "bool", "mask_mod", "create_block_mask")
def score_mod_returns_a_bool(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: q >= k)


@legal(98, compiled=True)
def score_mod_returns_an_int(attend: Attend) -> None:
    query, key, value = inputs()
    found = attend(query, key, value, lambda s, b, h, q, k: q - k)
    wanted = attend(query, key, value, lambda s, b, h, q, k: (q - k).float())
    assert torch.equal(found, wanted)


@at_line(99, r"torch\.where")
def branch_on_an_index(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s if q >= k else -s)


@at_line(100, "&")
def python_and(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: torch.where((q >= k) and (k > 2), s, 0.0))


@at_line(100, r"\|")
def python_or(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: torch.where((q >= k) or (k > 2), s, 0.0))


@at_line(100, "~")
def python_not(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: torch.where(not (q >= k), s, 0.0))


@at_line(100, "chained")
def chained_comparison(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: torch.where(0 <= k < 5, s, 0.0))


@at_line(101, "loop|integer")
def loop_length_from_an_index(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s + sum(0.1 for _ in range(q)))


@at_line(102, r"item")
def item(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s * q.item())


@at_line(103, r"int\(\)", r"\.int\(\)")
def python_int(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s * int(q))


@at_line(103, r"float\(\)", r"\.float\(\)")
def python_float(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s * float(q))


@at_line(103, r"torch\.tanh")
def math_function(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: math.tanh(s))


@at_line(104, r"torch\.minimum", r"torch\.clamp")
def builtin_min(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: min(s, 1.0))


@at_line(104, r"torch\.maximum", r"torch\.clamp")
def builtin_max(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s + max(q, k))


@at_line(105, "rand", "table")
def random_number(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s + torch.rand(()))


@at_line(105, "rand_like", "table")
def random_number_like_the_score(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: s + torch.rand_like(s))


@at_line(106, "dropout")
def dropout_in_the_mod(attend: Attend) -> None:
    attend(*inputs(), lambda s, b, h, q, k: F.dropout(s, 0.5))


@at_line(107, "add_")
def captured_tensor_is_changed(attend: Attend) -> None:
    table = torch.zeros(16)

    def changes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        table.add_(1.0)
        return s + table[k]

    try:
        attend(*inputs(), changes)
    finally:
        assert not table.any()


@at_line(108, "__setitem__|assignment")
def captured_tensor_is_assigned_to(attend: Attend) -> None:
    table = torch.zeros(16)

    def changes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        table[q] = 1.0
        return s + table[k]

    try:
        attend(*inputs(), changes)
    finally:
        assert not table.any()


def changing(statement: Callable[[Any], Any]) -> Callable[[Attend], None]:
    """A row whose mod changes its captured tensor, which must stay as it is."""

    def attend_once(attend: Attend) -> None:
        table = torch.zeros(16, dtype=torch.int64)

        def changes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            statement(table)
            return s + table[k]

        address = table.data_ptr()
        try:
            attend(*inputs(), changes)
        finally:
            assert table.data_ptr() == address
            assert not table.any()
            assert table.grad is None

    return attend_once


def set_data(table: Any) -> None:
    table.data = torch.ones(16, dtype=torch.int64)


def set_gradient(table: Any) -> None:
    table.grad = torch.ones(16)


def add_to_it(table: Any) -> None:
    table += 1


def or_into_it(table: Any) -> None:
    table |= 1


# torch.compile makes the first three, and doesn't ask a mod about them.
for compiled, name, statement, expected in (
    (False, "data_of_a_captured_tensor_is_assigned", set_data, r"\.data"),
    (False, "gradient_of_a_captured_tensor_is_assigned", set_gradient, r"\.grad"),
    (False, "function_changes_a_captured_tensor", lambda t: torch.fill_(t, 1), "fill_"),
    (True, "captured_tensor_is_resized_in_the_mod", lambda t: t.resize_(4), "resize_"),
    (True, "captured_tensor_is_added_to", add_to_it, "add_|iadd"),
    (True, "captured_tensor_is_or_ed_into", or_into_it, "ior"),
    (True, "operator_changes_a_captured_tensor", lambda t: torch.ops.aten.fill_(t, 1), "fill_"),
    (True, "inplace_option_on_a_captured_tensor", lambda t: F.relu(t, inplace=True), "inplace"),
):
    row = changing(statement)
    row.__name__ = name
    refused(107, "in place", expected, compiled=compiled)(row)


@refused(107, "in place", "add_", line=True, compiled=False)
def captured_tensor_is_changed_after_what_no_graph_holds(attend: Attend) -> None:
    table = torch.zeros(16)

    def changes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        gamma = torch.lgamma(s.abs() + 1.0)
        table.add_(1.0)
        return gamma

    try:
        attend(*inputs(), changes)
    finally:
        assert not table.any()


@refused(109, "table", "meta", "cpu", error=ArgumentError, compiled=False)
def captured_tensor_is_on_another_device(attend: Attend) -> None:
    table = torch.zeros(16, device="meta")
    attend(*inputs(), lambda s, b, h, q, k: s + table[k])


@at_line(110, r"\[16\]|\(16,\)", eager=("table",))
def captured_tensor_is_used_whole(attend: Attend) -> None:
    table = torch.zeros(16)
    attend(*inputs(), lambda s, b, h, q, k: s + table)


@at_line(111, r"rank 2", r"\b1\b", eager=("table",))
def too_few_indices(attend: Attend) -> None:
    table = torch.zeros(16, 16)
    attend(*inputs(), lambda s, b, h, q, k: s + table[q])


@refused(112, r"\b2\b", r"\b3\b", error=ModIndexError, line=True, eager=("table",))
def too_many_indices(attend: Attend) -> None:
    table = torch.zeros(16, 16)
    attend(*inputs(), lambda s, b, h, q, k: s + table[q, k, h])


@refused(113, "float32", r"\.long\(\)", error=ModIndexError, line=True)
def float_index(attend: Attend) -> None:
    table = torch.zeros(16)
    attend(*inputs(), lambda s, b, h, q, k: s + table[s])


@refused(113, "bool", r"\.long\(\)|torch\.where", error=ModIndexError, line=True)
def bool_index(attend: Attend) -> None:
    table = torch.zeros(16)
    attend(*inputs(), lambda s, b, h, q, k: s + table[q > k])


@at_line(114, "slice|integer")
def symbol_as_slice_bound(attend: Attend) -> None:
    table = torch.zeros(16)
    attend(*inputs(), lambda s, b, h, q, k: s + table[q:].sum())


@refused(115, r"\b16\b", error=ModIndexError, eager=("table",))
def index_certainly_past_the_end(attend: Attend) -> None:
    table = torch.zeros(16)
    attend(*inputs(), lambda s, b, h, q, k: s + table[k + 16])


@refused(116, r"\b16\b", error=ModIndexError, eager=("table",))
def index_that_happens_to_be_past_the_end(attend: Attend) -> None:
    table = torch.zeros(16)
    jump = torch.zeros(16, dtype=torch.int64)
    jump[5] = 16
    attend(*inputs(), lambda s, b, h, q, k: s + table[jump[k]])


@legal(117, compiled=True)
def index_past_the_end_where_masked(attend: Attend) -> None:
    table = torch.zeros(4)
    mask = create_block_mask(lambda b, h, q, k: k < 4, 1, 1, 16, 16)
    query, key, value = inputs()
    found = attend(query, key, value, lambda s, b, h, q, k: s + table[k], mask)
    torch.testing.assert_close(found, attend(query, key, value, block_mask=mask))


@at_line(118, "captured tensor|captured")
def list_indexed_by_a_symbol(attend: Attend) -> None:
    values = [0.0, 1.0] * 8
    attend(*inputs(), lambda s, b, h, q, k: s + values[q])


@at_line(118, "captured tensor|captured")
def dict_indexed_by_a_symbol(attend: Attend) -> None:
    values = {0: 0.0, 1: 1.0}
    attend(*inputs(), lambda s, b, h, q, k: s + values[q])


@refused(119, "table", "sparse", error=ArgumentTypeError, compiled=False)
def captured_tensor_is_sparse(attend: Attend) -> None:
    table = torch.eye(16).to_sparse()
    attend(*inputs(), lambda s, b, h, q, k: s + table[q, k])


@refused(119, "table", "complex64", error=ArgumentTypeError, compiled=False)
def captured_tensor_is_complex(attend: Attend) -> None:
    table = torch.zeros(16, dtype=torch.complex64)
    attend(*inputs(), lambda s, b, h, q, k: s + table[k])


@refused(119, "table", "nested", error=ArgumentTypeError, compiled=False)
def captured_tensor_is_nested(attend: Attend) -> None:
    table = torch.nested.nested_tensor([torch.zeros(16), torch.zeros(8)], layout=torch.strided)
    attend(*inputs(), lambda s, b, h, q, k: s + table[q, k])


@at_line(120, "outside")
def reduction_of_a_captured_tensor(attend: Attend) -> None:
    table = torch.zeros(16)
    attend(*inputs(), lambda s, b, h, q, k: s + table.sum())


@refused(121, "^mine", error=ZeroDivisionError, compiled=False)
def mod_raises_its_own_error(attend: Attend) -> None:
    def raises(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        raise ZeroDivisionError("mine")

    try:
        attend(*inputs(), raises)
    except ZeroDivisionError as error:
        assert not isinstance(error, AnyflexError)
        # Python 3.10 has no notes.
        notes = getattr(error, "__notes__", None)
        assert notes is None or any("raises" in note for note in notes)
        assert notes or not hasattr(error, "add_note"), "no note that names the mod"
        raise


@refused(122, "async|coroutine|plain function", error=ArgumentTypeError, compiled=False)
def async_function(attend: Attend) -> None:
    async def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s

    attend(*inputs(), mod)


@refused(122, "generator|plain function", error=ArgumentTypeError, compiled=False)
def generator_function(attend: Attend) -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        yield s

    attend(*inputs(), mod)


@refused(123, "document", r"\[4\]|\(4,\)", error=ModIndexError, compiled=False)
def captured_tensor_is_resized_after_building(attend: Attend) -> None:
    document = torch.arange(16) // 5
    mask = create_block_mask(lambda b, h, q, k: document[q] == document[k], 1, 1, 16, 16)
    query, key, value = inputs()
    attend(query, key, value, block_mask=mask)
    document.resize_(4)
    attend(query, key, value, block_mask=mask)
