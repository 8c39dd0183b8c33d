"""``anyflex warm``: compiles what calls need, and each failure has its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anyflex.contract.spec import Spec
from anyflex.registry import isolated
from tests.cli.conftest import RunCommand

library = pytest.importorskip("anyflex_cpu.library", reason="anyflex-cpu is not installed")
pytest.importorskip("llvmlite", reason="llvmlite is not installed")
pytestmark = pytest.mark.skipif(library.find() is None, reason="no native library here")

CALLS = """
import torch
import anyflex

TABLE = torch.randn(40, 7, requires_grad=True)
BIAS = torch.randn(5)


def rows(batch, heads, length, dim, learns=True):
    return torch.randn(batch, heads, length, dim, requires_grad=learns)


def training():
    q, k, v = rows(2, 4, 40, 32), rows(1, 2, 40, 32), rows(1, 2, 40, 16)
    mask = anyflex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40)
    score = lambda s, b, h, i, j: s + TABLE[i, h] * 0.5
    out, aux = anyflex.flex_attention(
        q, k, v, score, mask, enable_gqa=True, return_aux=anyflex.AuxRequest(lse=True)
    )
    (out.sum() + aux.lse.sum()).backward()


def decoding():
    q, k, v = (rows(1, 2, length, 24, learns=False) for length in (1, 30, 30))
    for n in (3, 4):
        anyflex.flex_attention(q, k, v, lambda s, b, h, i, j: s + BIAS[h] - n * 0.25)
    strange = k.transpose(2, 3).contiguous().transpose(2, 3)
    anyflex.flex_attention(q, strange, v[..., 1:], lambda s, b, h, i, j: torch.tanh(s))


def arguments():
    q = rows(1, 2, 20, 32)
    return {"query": q, "key": q, "value": q, "score_mod": lambda s, b, h, i, j: s * s}


def nothing():
    pass


def raising():
    def broken(score, b, h, q_idx, kv_idx):
        raise ValueError("a mistake of the user's")

    return {**arguments(), "score_mod": broken}


def dying():
    import os

    os._exit(9)


def refused():
    q = rows(1, 2, 20, 32)
    anyflex.flex_attention(q, q, q, backend="cuda")
"""


@pytest.fixture
def calls(tmp_path: Path) -> str:
    path = tmp_path / "calls.py"
    path.write_text(CALLS)
    return str(path)


def compiled(folder: Path) -> set[str]:
    """The artifacts in a cache."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_specs_that_were_listed_are_warmed_to_what_their_calls_had_compiled(
    calls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: RunCommand
) -> None:
    targets = [f"{calls}::{name}" for name in ("training", "decoding", "arguments")]
    done = command("warm", *targets, "--jobs", "2", "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (facts["targets"], facts["warmed"], facts["failed"]) == (3, 3, [])
    assert facts["kernels"] >= 4
    first = compiled(tmp_path / "cache")
    assert sum(name.endswith(".o") for name in first) >= 4

    listed = command("cache", "specs").out
    (tmp_path / "specs.txt").write_text(listed)
    assert len(listed.splitlines()) >= 4
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path / "second"))
    with isolated():
        warmed = command("warm", str(tmp_path / "specs.txt"), "--jobs", "1")
    assert warmed.code == 0, warmed.err
    assert warmed.out.startswith(f"warmed {len(listed.splitlines())} of ")
    assert compiled(tmp_path / "second") == first


def test_each_failure_is_named_with_its_reason(calls: str, command: RunCommand) -> None:
    # One process: each task from the one that dies on gets another.
    names = ("nothing", "refused", "raising", "absent", "dying", "arguments")
    targets = [f"{calls}::{name}" for name in names]
    done = command("warm", *targets, "--json", "--jobs", "1")
    assert done.code == 1
    facts = json.loads(done.out)
    assert facts["warmed"] == 1
    reasons = {failed["target"].rpartition(":")[2]: failed["reason"] for failed in facts["failed"]}
    assert reasons.keys() == {"nothing", "refused", "raising", "dying", "absent"}
    assert "ValueError: a mistake of the user's" in reasons["raising"]
    assert reasons["dying"] == "its process died"
    assert "made no call of anyflex" in reasons["nothing"]
    assert "BackendRefused: backend='cuda' computes on cuda tensors" in reasons["refused"]
    assert "has no function 'absent'" in reasons["absent"]
    for failed in facts["failed"]:
        assert f"anyflex warm: {failed['target']}: " in done.err


def line(**changes: Any) -> str:
    import torch

    facts: dict[str, Any] = {
        "device_type": "cpu", "arch": "", "dtype": torch.float32, "head_dim": 8,
        "value_head_dim": 8,
    }  # fmt: skip
    backend = changes.pop("backend", "cpu")
    return json.dumps({"backend": backend, "spec": Spec(**{**facts, **changes}).to_text()})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "xpu", "backend": "xpu"}, "torch sees no device of type 'xpu' here"),
        ({"arch": "sm_90"}, "it is for cpu sm_90, here is "),
        ({"opaque": True}, "its mods could not be traced"),
        ({"index_width": 64}, "it is for tensors beyond 2^31 bytes"),
    ],
)
def test_a_spec_that_cannot_be_called_here_is_not_run(
    changes: dict[str, Any], reason: str
) -> None:
    from anyflex.errors import BackendRefused
    from anyflex.runtime.warming import warm_spec

    facts = json.loads(line(**changes))
    with pytest.raises(BackendRefused, match=reason.replace("^", r"\^")):
        warm_spec(Spec.from_text(facts["spec"]), facts["backend"])


def test_a_device_that_is_absent_is_status_3(tmp_path: Path, command: RunCommand) -> None:
    path = tmp_path / "specs.txt"
    path.write_text(line(device_type="xpu", backend="xpu") + "\n")
    done = command("warm", str(path))
    assert done.code == 3
    assert f"{path}:1 (xpu: " in done.err and "no device of type 'xpu'" in done.err


@pytest.mark.parametrize("text", ["junk", "{}", '{"backend": "cpu", "spec": "a=b"}', "[1]"])
def test_a_file_of_something_else_is_wrong_usage(
    text: str, tmp_path: Path, command: RunCommand
) -> None:
    path = tmp_path / "specs.txt"
    path.write_text(f"{line()}\n\n{text}\n")
    outcome = command("warm", str(path))
    assert outcome.code == 2
    assert f"{path}:3: must be a line of `anyflex cache specs`" in outcome.err


def test_a_file_that_is_absent_and_no_jobs_are_wrong_usage(
    tmp_path: Path, command: RunCommand
) -> None:
    assert "must be FILE.py::function or a file" in command("warm", str(tmp_path / "no")).err
    assert command("warm", "a.py::f", "--jobs", "0").code == 2


def test_a_cache_that_cannot_be_used_warms_nothing(
    calls: str, tmp_path: Path, command: RunCommand
) -> None:
    (tmp_path / "cache").write_text("no folder")
    with pytest.warns(RuntimeWarning, match="can't be used"):
        outcome = command("warm", f"{calls}::arguments")
    assert outcome.code != 0 and "nothing else would keep what is warmed" in outcome.err
