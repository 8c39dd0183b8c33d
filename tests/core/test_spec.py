"""Specs: their text, read in any process, and the answer of a backend that doesn't know a
field."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from anyflex.contract.capabilities import CONTRACT_1_FIELDS, Capabilities
from anyflex.contract.option import Option
from anyflex.contract.spec import CapturedFacts, Spec
from anyflex.mod_graph.dtypes import DTYPES
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import OPERATIONS

PLAIN = Spec(device_type="cpu", arch="", dtype=torch.float32, head_dim=16, value_head_dim=16)
NASTY = ("", "a|b", "x=y", "%7C", "(,)", "\x1f", "s:", "None", "True", "1.5", "%", "ü\n")
NUMBERS = (0, 1, -7, 2**40, True, False, 0.0, -0.0, 1.0, 1e-300, 0.1, 1e300)


def random_graph(rng: random.Random) -> ModGraph:
    builder = GraphBuilder()
    dtypes = list(DTYPES.values())
    builder.add("input", torch.float32, (), "score")
    builder.add("number", torch.int64, (), f"i{rng.randrange(9)}")
    for _ in range(rng.randrange(12)):
        dtype = rng.choice(dtypes)
        value = rng.choice((0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 3.0))
        if dtype is torch.bool:
            value = value > 1
        elif not dtype.is_floating_point:
            value = rng.randrange(99)
        builder.add("const", dtype, (), value)
    for _ in range(rng.randrange(12)):
        operation, count = rng.choice([o for o in OPERATIONS.items() if o[1] != 0])
        count = rng.randrange(4) if count is None else count
        arguments = tuple(rng.randrange(len(builder.nodes)) for _ in range(count))
        attribute = rng.randrange(5) if operation == "load" else None
        builder.add(operation, rng.choice(dtypes), arguments, attribute)
    return ModGraph(tuple(builder.nodes), rng.randrange(len(builder.nodes)))


def random_spec(rng: random.Random) -> Spec:
    """A spec with any value that a field's type allows, whether or not a call could have it."""
    flag = lambda: rng.random() < 0.5  # noqa: E731  a word for the table below
    dtypes = list(DTYPES.values())
    return Spec(
        device_type=rng.choice(("cpu", "cuda", *NASTY)),
        arch=rng.choice(("sm_90", "gfx90a:sramecc+:xnack-", *NASTY)),
        dtype=rng.choice(dtypes),
        head_dim=rng.randrange(1, 300),
        value_head_dim=rng.randrange(1, 300),
        gqa_ratio=rng.randrange(1, 9),
        kv_broadcast=flag(),
        score_graph=random_graph(rng) if flag() else None,
        mask_graph=random_graph(rng) if flag() else None,
        mask_kind=rng.choice(("none", "runs")),
        block_size=(rng.randrange(200), rng.randrange(200)),
        captured=tuple(
            CapturedFacts(rng.choice(dtypes), rng.randrange(5), flag())
            for _ in range(rng.randrange(4))
        ),
        aux=rng.choice(((), ("lse",), ("lse", "max_scores"))),
        needs_lse=flag(),
        gradients=rng.choice(((), ("q",), ("q", "k", "v"))),
        dlse=flag(),
        determinism=rng.choice(("off", "warn", "on")),
        fp32_precision=rng.choice(("", "highest")),
        q_class=rng.choice(("one", "short", "long")),
        alignment=tuple(rng.choice(("aligned", "strided", "scattered")) for _ in "qkv"),
        index_width=rng.choice((32, 64)),
        options=tuple((rng.choice(NASTY), rng.choice((*NUMBERS, *NASTY))) for _ in range(3)),
        opaque=flag(),
        page_size=rng.randrange(3),
        sinks=flag(),
        batch_invariant=flag(),
    )


def test_a_text_is_read_back_as_the_same_spec() -> None:
    rng = random.Random(0)
    for _ in range(500):
        spec = random_spec(rng)
        back = Spec.from_text(spec.to_text())
        assert back == spec
        assert hash(back) == hash(spec)
        assert back.to_text() == spec.to_text()  # -0.0, True and 1 stay what they are
        assert back.digest() == spec.digest()


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_options_that_are_no_finite_number_are_read_back(number: float) -> None:
    spec = dataclasses.replace(PLAIN, options=(("bound", number), ("text", str(number))))
    back = Spec.from_text(spec.to_text())
    assert back.to_text() == spec.to_text()
    ((_, found), (_, text)) = back.options
    assert isinstance(found, float) and str(found) == text == str(number)


def test_texts_differ_where_specs_do() -> None:
    rng = random.Random(1)
    specs = {spec.to_text(): spec for spec in (random_spec(rng) for _ in range(500))}
    assert len({spec.digest() for spec in specs.values()}) == len(specs) > 490


def test_texts_and_digests_are_the_same_in_another_process() -> None:
    program = (
        "import random, sys\n"
        "from tests.core import test_spec\n"
        "rng = random.Random(2)\n"
        "print(' '.join(test_spec.random_spec(rng).digest() for _ in range(50)))\n"
    )
    rng = random.Random(2)
    here = [random_spec(rng).digest() for _ in range(50)]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == here


def test_zeros_of_both_signs_make_different_graphs() -> None:
    plus, minus = (ModGraph((Node("const", torch.float32, (), zero),), 0) for zero in (0.0, -0.0))
    assert plus != minus
    assert plus.text != minus.text


@pytest.mark.parametrize(
    "damaged, said",
    [
        ("", "invalid syntax"),
        ("3", "not iterable"),
        ("{'device_type': 'cpu'}", "fields differ"),
        (PLAIN.to_text()[:-1] + ", 'colour': 'red'}", "colour"),
        (PLAIN.to_text().replace("'float32'", "'load'"), "unknown dtype 'load'"),
        (PLAIN.to_text().replace("'head_dim': 16", "'head_dim': many"), "malformed"),
        (PLAIN.to_text().replace("'captured': ()", "'captured': (3,)"), "unpack"),
        (PLAIN.to_text().replace("'score_graph': None", "'score_graph': 'input f32'"), "result"),
    ],
)
def test_a_damaged_text_is_a_value_error(damaged: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Spec.from_text(damaged)


def test_specs_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.head_dim = 8


GRAPH = ModGraph((Node("input", torch.float32, (), "score"),), 0)
ELSEWISE: dict[str, Any] = {
    "gqa_ratio": 2,
    "kv_broadcast": True,
    "score_graph": GRAPH,
    "mask_graph": GRAPH,
    "mask_kind": "runs",
    "block_size": (64, 64),
    "captured": (CapturedFacts(torch.float32, 1, False),),
    "aux": ("lse",),
    "needs_lse": True,
    "gradients": ("q",),
    "dlse": True,
    "determinism": "on",
    "fp32_precision": "highest",
    "q_class": "short",
    "alignment": ("strided",) * 3,
    "index_width": 64,
    "options": (("split", 2),),
    "opaque": True,
    "q_layout": "packed",
    "kv_layout": "paged",
    "page_size": 16,
    "index_map": "offset",
    "kv_storage": "fp8",
    "dropout": True,
    "sinks": True,
    "batch_invariant": True,
}


@pytest.mark.parametrize("field", sorted(ELSEWISE))
def test_a_backend_refuses_what_it_does_not_know(field: str) -> None:
    knows = Capabilities(
        dtypes=frozenset({torch.float32}), known_fields=CONTRACT_1_FIELDS - {field}
    )
    assert PLAIN.unsupported_by(knows) is None
    spec = dataclasses.replace(PLAIN, **{field: ELSEWISE[field]})
    assert str(spec.unsupported_by(knows)).endswith("is not supported")


IN_FLOAT64 = "cast f64 0 -;exp f64 1 -;cast f32 2 -;=3"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("score_graph", f"input f32 - score;{IN_FLOAT64}"),
        ("mask_graph", "input i64 - q_idx;cast f64 0 -;const f64 - 3.5;lt bool 1,2 -;=3"),
    ],
)
def test_a_mod_in_a_type_that_is_not_declared_is_refused_by_its_function(
    field: str, text: str
) -> None:
    without = frozenset(DTYPES.values()) - {torch.float64}
    full = Capabilities(dtypes=frozenset({torch.float32}))
    spec = dataclasses.replace(PLAIN, **{field: parse_graph(text)})
    assert spec.unsupported_by(full) is None
    reason = str(spec.unsupported_by(dataclasses.replace(full, node_dtypes=without)))
    name = field.replace("graph", "mod")
    assert reason.startswith(f"{name} computes in float64, which is not supported: convert to ano")
    assert "float32" in reason.partition("there are")[2]


def test_a_derivative_in_a_type_that_is_not_declared_is_left_to_core_or_refused() -> None:
    # The slope of a maximum compares, in bool.
    graph = parse_graph("input f32 - score;const f32 - 2.0;maximum f32 0,1 -;=2")
    spec = dataclasses.replace(PLAIN, score_graph=graph)
    can = Capabilities(
        dtypes=frozenset({torch.float32}),
        gradients=frozenset({"q"}),
        node_dtypes=frozenset({torch.float32, torch.int64}),
    )
    assert spec.unsupported_by(can) is None
    spec = dataclasses.replace(spec, gradients=("q",))
    reason = "the derivative of score_mod computes in bool, which is not supported"
    assert str(spec.unsupported_by(can)).startswith(reason)
    by_core = dataclasses.replace(can, core_backward=True)
    assert spec.unsupported_by(by_core) is None
    assert str(by_core.gradient_refusal(spec)).startswith(reason)


def test_every_field_that_may_be_unknown_is_tried() -> None:
    needed = {"device_type", "arch", "dtype", "head_dim", "value_head_dim"}
    assert {each.name for each in dataclasses.fields(Spec)} == {*ELSEWISE, *needed}


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        *[("i8", 128, -128), ("i8", 384, -128), ("i8", -129, 127), ("i8", 127, 127)],
        *[("u8", -1, 255), ("u8", 256, 0), ("i16", 32768, -32768), ("i32", 2**31, -(2**31))],
        *[("i64", 2**63 - 1, 2**63 - 1), ("i64", -(2**63), -(2**63)), ("bool", 2, True)],
    ],
)
def test_a_constant_is_one_that_its_type_holds(name: str, value: int, held: int) -> None:
    bound = parse_graph(f"number {name} - i0;=0").bind(constants={"i0": value})
    assert bound.nodes[0].attribute == held
    if name != "bool":
        assert parse_graph(f"const {name} - {value};=0") == bound
    assert bound.nodes[0].attribute == torch.tensor([value]).to(bound.dtype).item()


@pytest.mark.parametrize("name", ["q idx", "x};import os", "", "é", "1x", "a.b", "f0'"])
def test_a_graph_holds_no_name_that_generated_source_could_not(name: str) -> None:
    with pytest.raises(ValueError, match=r"a name that is none|not enough|too many"):
        parse_graph(f"input f32 - {name};=0")


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"dtypes": frozenset({"float32"})}, TypeError, "dtypes=.*frozenset of torch.dtype"),
        ({"dtypes": torch.float32}, TypeError, "dtypes=.*frozenset of torch.dtype, got torch.fl"),
        ({"captured_dtypes": [torch.int32]}, TypeError, "captured_dtypes=.*frozenset"),
        ({"node_dtypes": frozenset({"f64"})}, TypeError, "node_dtypes=.*frozenset of torch.dtype"),
        ({"gradients": frozenset({"query"})}, ValueError, r"gradients=.*\['query'\]; there are"),
        ({"aux": "lse"}, TypeError, "aux=.*frozenset of str, got 'lse'"),
        ({"aux": frozenset({"LSE"})}, ValueError, r"aux=.*\['LSE'\]; there are"),
        ({"head_dim_max": 64.0}, TypeError, "head_dim_max.*must be int"),
        ({"head_dim_multiple": 0}, ValueError, "allow no head dim"),
        ({"head_dim_min": 128, "head_dim_max": 64}, ValueError, "allow no head dim"),
        (
            {"head_dim_min": 33, "head_dim_max": 63, "head_dim_multiple": 32},
            ValueError,
            "allow no",
        ),
    ],
)
def test_capabilities_that_cannot_be_meant_are_refused(
    wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Capabilities(**{"dtypes": frozenset({torch.float32}), **wrong})


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"type": "int"}, TypeError, "type=.*int, float, bool or str, got 'int'"),
        ({"type": list}, TypeError, "type=.*int, float, bool or str"),
        ({"doc": ""}, TypeError, "doc=.*say what the option does"),
        ({"default": "7"}, TypeError, "default=.*of type int, got '7'"),
        ({"default": True}, TypeError, "default=.*of type int, got True"),
        ({"default": 8}, ValueError, "default=8.*none of its choices"),
        ({"choices": 16}, TypeError, "choices=.*must be a tuple"),
        ({"choices": (16, "32")}, TypeError, "choices=.*of type int, got '32'"),
        ({"torch_key": 3}, TypeError, "torch_key=.*must be a str"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(
    wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    right = {"type": int, "default": 16, "doc": "rows of a tile", "choices": (16, 32)}
    with pytest.raises(error, match=said):
        Option(**{**right, **wrong})
    assert Option(**right).default == 16
    assert Option(float, 1, "a factor").default == 1
    assert Option(str, None, "a name").default is None
