"""``anyflex explain``: calls made from names, calls from a file, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import anyflex
from anyflex import masks, mods
from anyflex.cli.exit_codes import ExitCode
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.spec import Spec
from anyflex.errors import BackendRefused
from anyflex.registry import register
from tests.cli.backends import ForwardOnly, Right
from tests.cli.conftest import RunCommand

SMALL = ("explain", "--q", "1x4x200x16")


def test_a_call_from_names_shows_backend_variant_and_trace(command: RunCommand) -> None:
    result = command(*SMALL, "--kv", "1x2x300x16", "--dtype", "bf16", "--mask", "causal")
    assert result.code == ExitCode.OK, result.err
    assert "backend   reference" in result.out
    assert "variant" in result.out
    assert "gqa=2" in result.out
    assert "bfloat16" in result.out


MASK_ARGUMENTS = {
    "block_causal": ":16",
    "block_diffusion": ":100,16",
    "causal": "",
    "causal_bottom_right": "",
    "causal_window": ":16",
    "chunked": ":64",
    "dilated": ":3,window=5,causal=False",
    "document": f":{[i // 60 for i in range(200)]}",
    "document_offsets": ":[0,60,200]",
    "global_and_window": ":4,left=16",
    "neighbourhood": ":(10,20),3",
    "padding": ":[150]",
    "prefix_lm": ":20",
    "shared_prefix": f":{[-1] * 20 + [i // 60 for i in range(180)]}",
    "sinks_and_window": ":4,16",
    "sliding_window": ":None,8",
    "tree": f":{[(i - 1) // 2 for i in range(200)]}",
}
MOD_ARGUMENTS = {
    "alibi": "",
    "dense_bias": f":{[[0.5] * 200] * 200}",
    "relative_bias": f":{[[0.1] * 4] * 3}",
    "softcap": ":30,approximate=True",
    "t5_bias": f":{[[0.1] * 4] * 32},128,False",
    "table_bias": f":{[[0.1] * 4] * 2},{[[1] * 200] * 200}",
}


def _spec(out: str) -> Spec:
    return Spec.from_text(json.loads(out)["spec"])


@pytest.mark.parametrize("name", masks.__all__)
def test_every_ready_made_mask_has_its_name(command: RunCommand, name: str) -> None:
    result = command(*SMALL, "--mask", name + MASK_ARGUMENTS[name], "--backward", "--json")
    assert result.code == ExitCode.OK, result.err
    spec = _spec(result.out)
    assert spec.mask_graph is not None and spec.score_graph is None
    assert spec.gradients


@pytest.mark.parametrize(
    "name", sorted({*mods.__all__} - {"alibi_slopes", "t5_buckets", "compose"})
)
def test_every_ready_made_mod_has_its_name(command: RunCommand, name: str) -> None:
    result = command(*SMALL, "--mod", name + MOD_ARGUMENTS[name], "--json")
    assert result.code == ExitCode.OK, result.err
    spec = _spec(result.out)
    assert spec.score_graph is not None and spec.mask_graph is None


def test_names_that_are_repeated_are_combined(command: RunCommand) -> None:
    def graph(field: str, *arguments: str) -> str:
        return str(getattr(_spec(command(*SMALL, *arguments, "--json").out), field))

    causal, documents = ("--mask", "causal"), ("--mask", "document_offsets:[0,60,200]")
    assert (
        len({graph("mask_graph", *line) for line in (causal, documents, causal + documents)}) == 3
    )
    alibi, cap = ("--mod", "alibi"), ("--mod", "softcap:30")
    orders = (alibi, cap, alibi + cap, cap + alibi)
    assert len({graph("score_graph", *line) for line in orders}) == 4


def test_a_mask_of_several_batch_entries_and_heads(command: RunCommand) -> None:
    shapes = ("explain", "--q", "2x4x1x16", "--kv", "2x4x300x16", "--mask", "causal:[12,200]")
    result = command(*shapes, "--mask", "causal_window:[16,32,64,128],offset=250")
    assert result.code == ExitCode.OK, result.err


def test_unused_options_are_listed_and_not_warned_of(
    command: RunCommand, recwarn: pytest.WarningsRecorder
) -> None:
    result = command(*SMALL, "--option", "BLOCK_M=64", "--json")
    assert json.loads(result.out)["unused_options"] == ["BLOCK_M"]
    result = command(*SMALL, "--option", "BACKEND=FLASH")
    assert "unused    BACKEND (of torch's kernels)\n" in result.out
    assert not recwarn.list


def test_why_the_others_do_not_take_it(command: RunCommand) -> None:
    register("cpu", ForwardOnly)
    result = command(*SMALL, "--backward")
    assert result.code == ExitCode.OK
    assert "cpu" in result.out and "the gradient of q is not supported" in result.out


def test_a_forced_backend_that_refuses_is_not_run(command: RunCommand) -> None:
    register("cpu", ForwardOnly)
    result = command(*SMALL, "--backward", "--backend", "cpu")
    assert result.code == ExitCode.NOT_RUN
    # Other backends take it: only the forced one is reported to refuse.
    assert result.out.startswith("the call fails: backend='cpu' is refused. ")
    assert "These take the call: reference." in result.out
    assert "the gradient of q is not supported" in result.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain",), "give FILE.py::function or --q"),
        (("explain", "--q", "1x4x200"), "must be four numbers"),
        ((*SMALL, "--mask", "diagonal"), "no 'diagonal' in anyflex.masks; known: block_causal,"),
        ((*SMALL, "--mod", "compose"), "no 'compose' in anyflex.mods; known: alibi,"),
        (
            (*SMALL, "--mask", "causal_window"),
            "causal_window(size, offset=0): missing a required argument: 'size'",
        ),
        ((*SMALL, "--mask", "causal:1,2"), "causal(offset=0): too many positional arguments"),
        ((*SMALL, "--mask", "causal:x=2"), "causal(offset=0): got an unexpected keyword"),
        ((*SMALL, "--mask", "causal:len"), "takes numbers as Python writes them, and lists"),
        ((*SMALL, "--mask", "causal:1)+(2"), "takes numbers as Python writes them, and lists"),
        ((*SMALL, "--mask", "causal:,"), "takes numbers as Python writes them, and lists"),
        ((*SMALL, "--mask", "causal:['a']"), "takes numbers as Python writes them, and lists"),
        ((*SMALL, "--mask", "causal_window:2.5"), "causal_window: size must be an int"),
        ((*SMALL, "--mask", "document:[0,1]"), "outside"),
        ((*SMALL, "--mod", "softcap:-1"), "softcap: cap must be positive"),
        ((*SMALL, "--option", "BLOCK_M"), "must be KEY=VALUE"),
        ((*SMALL, "--option", "BLOK_M=64"), "BLOCK_M"),
        ((*SMALL, "--kv", "1x3x200x16"), "multiple"),
        ((*SMALL, "--backend", "referense"), "did you mean 'reference'"),
        (("explain", "call.py"), "expected FILE.py::function"),
        (("explain", "missing.py::call"), "there is no file missing.py"),
    ],
)
def test_wrong_usage_says_what_is_wrong(
    command: RunCommand, arguments: tuple[str, ...], says: str
) -> None:
    result = command(*arguments)
    assert result.code == ExitCode.USAGE, result.out
    assert says in result.err


USERS = """
import torch
import anyflex
from beside import LENGTH

def call():
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16).unbind(0)
    return {"query": q, "key": k, "value": v, "score_mod": lambda s, b, h, i, j: s + h}

def tuple_instead():
    return 1, 2, 3

def without_value():
    return {"query": 1, "key": 2}

def raises():
    return 1 / 0

def leaves():
    raise SystemExit(9)

def unknown_key():
    return {**call(), "qery": 1}

def number_as_key():
    return {**call(), 1: 1}
"""


@pytest.fixture
def users_file(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("LENGTH = 100\n")
    path = tmp_path / "json.py"
    path.write_text(USERS)
    return str(path)


def test_a_function_in_a_file_gives_the_call(command: RunCommand, users_file: str) -> None:
    register("cpu", Right)
    result = command("explain", f"{users_file}::call", "--json")
    assert result.code == ExitCode.OK, result.err
    facts = json.loads(result.out)
    assert facts["backend"] == "cpu"
    assert Spec.from_text(facts["spec"]).score_graph is not None
    forced = command("explain", f"{users_file}::call", "--backend", "reference", "--json")
    assert json.loads(forced.out)["backend"] == "reference"


@pytest.mark.parametrize(
    ("function", "extra", "says"),
    [
        ("cal", (), "it has: call, leaves, number_as_key, raises, tuple_instead"),
        ("tuple_instead", (), "it returned an object of type tuple"),
        ("without_value", (), "a dict with the keys 'query', 'key'"),
        ("unknown_key", (), "got an unexpected keyword argument 'qery'"),
        ("number_as_key", (), "keywords must be strings"),
        ("call", ("--mask", "causal"), "--mask: the function in"),
    ],
)
def test_what_the_function_must_be(
    command: RunCommand, users_file: str, function: str, extra: tuple[str, ...], says: str
) -> None:
    result = command("explain", f"{users_file}::{function}", *extra)
    assert result.code == ExitCode.USAGE
    assert says in result.err


def test_an_exception_of_the_user_s_own_shows_their_line(
    command: RunCommand, users_file: str
) -> None:
    result = command("explain", f"{users_file}::raises")
    assert result.code == ExitCode.BROKEN
    assert "return 1 / 0" in result.err
    assert "ZeroDivisionError" in result.err
    assert "user_function.py" not in result.err


def test_an_exit_of_the_user_s_own_is_no_exit_status_of_anyflex(
    command: RunCommand, users_file: str
) -> None:
    result = command("explain", f"{users_file}::leaves")
    assert result.code == ExitCode.BROKEN
    assert "raise SystemExit(9)" in result.err


def test_a_file_name_that_is_too_long_is_wrong_usage(command: RunCommand) -> None:
    result = command("explain", "x" * 300 + ".py::call")
    assert result.code == ExitCode.USAGE
    assert "there is no file xxx" in result.err


class _OfContract2(Right):
    contract = 2


class _AnswersNothing(Right):
    def supports(self, spec: Spec) -> Decision:
        return None  # type: ignore[return-value]


class _AnswersNonsense(Right):
    def supports(self, spec: Spec) -> Decision:
        return Accepted(backward="nonsense")  # type: ignore[arg-type]


class _CompilesNothing(Right):
    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        return None  # type: ignore[return-value]


class _CannotCompile(Right):
    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        raise OSError("no assembler")


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (_OfContract2, "written for contract 2"),
        (_AnswersNothing, "supports(spec) must return Accepted()"),
        (_AnswersNonsense, "Accepted(backward=...) must be 'own' or 'core', got 'nonsense'"),
        (_CompilesNothing, "compile() must return an anyflex.plugin.Kernel"),
        (_CannotCompile, "raised OSError: no assembler"),
    ],
)
def test_a_forced_backend_that_is_broken_has_the_status_of_a_broken_plugin(
    command: RunCommand, backend: type[Backend], says: str
) -> None:
    register("cpu", backend)
    result = command(*SMALL, "--backend", "cpu", "--json")
    assert result.code == ExitCode.BROKEN
    facts = json.loads(result.out)
    assert facts["broken"] and says in facts["problem"]
    assert command(*SMALL, "--backend", "reference").code == ExitCode.OK


class _RefusesLate(Right):
    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        raise BackendRefused("no registers left")


@pytest.mark.parametrize(
    ("backend", "outcome", "says"),
    [
        (_RefusesLate, "refuses", "no registers left"),
        (_CannotCompile, "broken", "compile() raised OSError: no assembler"),
    ],
)
def test_a_backend_that_can_not_compile_is_not_told_as_the_chosen_one(
    command: RunCommand, backend: type[Backend], outcome: str, says: str
) -> None:
    register("cpu", backend)
    q = torch.zeros(1, 4, 200, 16)
    for _ in range(2):
        facts = json.loads(command(*SMALL, "--json").out)
        assert facts["backend"] == "reference" and facts["variant"]
        answers = {line["backend"]: line for line in facts["trace"]}
        assert answers["cpu"]["outcome"] == outcome and says in answers["cpu"]["reason"]
        assert answers["reference"]["outcome"] == "chosen"
        # Afterwards the same with the decision of a real call.
        anyflex.flex_attention(q, q, q)


def test_a_forced_backend_that_refuses_late_is_not_told_as_the_chosen_one(
    command: RunCommand,
) -> None:
    register("cpu", _RefusesLate)
    result = command(*SMALL, "--backend", "cpu", "--json")
    assert result.code == ExitCode.NOT_RUN
    facts = json.loads(result.out)
    assert facts["trace"][0]["distribution"]
    assert facts["backend"] is None and "no registers left" in facts["problem"]
    assert [line["outcome"] for line in facts["trace"]] == ["refuses", "accepts"]


def test_an_option_at_the_wrong_level_is_told_as_the_command_line_writes_it(
    command: RunCommand,
) -> None:
    register("cpu", Right)
    result = command(*SMALL, "--option", "SPLITS=2")
    assert result.code == ExitCode.USAGE
    assert "--option 'BACKEND={\"NAME\": VALUE}'" in result.err
    assert command(*SMALL, "--option", 'cpu={"SPLITS": 2}').code == ExitCode.OK


def test_an_empty_device_is_none(command: RunCommand) -> None:
    result = command(*SMALL, "--device", "")
    assert result.code == ExitCode.USAGE
    assert "torch knows no such device type" in result.err


@pytest.mark.parametrize("argument", [("--mask", "document_offsets:[]"), ("--mod", "alibi:[[]]")])
def test_an_empty_list_is_no_tensor(command: RunCommand, argument: tuple[str, str]) -> None:
    result = command(*SMALL, *argument)
    assert result.code == ExitCode.USAGE
    assert "]: a list must hold numbers" in result.err


def test_sizes_that_no_tensor_has_are_wrong_usage(command: RunCommand) -> None:
    result = command("explain", "--q", "1x4x30000000000000000000x128")
    assert result.code == ExitCode.USAGE
    assert "less than 2^63 bytes" in result.err


def test_a_call_that_does_not_fit_this_machine_is_not_run(command: RunCommand) -> None:
    result = command("explain", "--q", "1x4x3000000000000x128")
    assert result.code == ExitCode.NOT_RUN
    assert "not enough memory on cpu for query, key and value" in result.err
