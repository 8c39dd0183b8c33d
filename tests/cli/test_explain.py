"""``anyflex explain``: calls made from names, calls from a file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anyflex.cli.exit_codes import ExitCode
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


@pytest.mark.parametrize("mask", ["none", "causal", "window:16", "document"])
@pytest.mark.parametrize("mod", ["none", "alibi", "softcap:30"])
def test_every_name_makes_its_graph(command: RunCommand, mask: str, mod: str) -> None:
    result = command(*SMALL, "--mask", mask, "--mod", mod, "--backward", "--json")
    assert result.code == ExitCode.OK, result.err
    facts = json.loads(result.out)
    spec = dict(part.split("=", 1) for part in facts["spec"].split("|"))
    assert (spec["mask_graph"] == "None") == (mask == "none")
    assert (spec["score_graph"] == "None") == (mod == "none")
    assert spec["gradients"] != "()"
    assert [line["backend"] for line in facts["trace"]][-1] == "reference"


def test_unused_options_are_listed_and_not_warned_of(
    command: RunCommand, recwarn: pytest.WarningsRecorder
) -> None:
    result = command(*SMALL, "--option", "BLOCK_M=64", "--json")
    assert json.loads(result.out)["unused_options"] == ["BLOCK_M"]
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
    assert "nobody takes this call" in result.out
    assert "the gradient of q is not supported" in result.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain",), "give FILE.py::function or --q"),
        (("explain", "--q", "1x4x200"), "must be four numbers"),
        ((*SMALL, "--mask", "diagonal"), "there is no 'diagonal'"),
        ((*SMALL, "--mask", "window"), "window needs a positive number"),
        ((*SMALL, "--mask", "window:2.5"), "SIZE must be a whole number"),
        ((*SMALL, "--mask", "causal:2"), "causal takes no number"),
        ((*SMALL, "--mod", "softcap:-1"), "softcap needs a positive number"),
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
    assert "score_graph=g:" in facts["spec"]
    forced = command("explain", f"{users_file}::call", "--backend", "reference", "--json")
    assert json.loads(forced.out)["backend"] == "reference"


@pytest.mark.parametrize(
    ("function", "extra", "says"),
    [
        ("cal", (), "it has: call, raises, tuple_instead, without_value"),
        ("tuple_instead", (), "it returned an object of type tuple"),
        ("without_value", (), "a dict with the keys 'query', 'key'"),
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
