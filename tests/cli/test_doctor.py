"""``anyflex doctor``: its facts, and when it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

import anyflex
from anyflex.cli import doctor_facts, self_test
from anyflex.cli.exit_codes import ExitCode
from anyflex.contract.capabilities import CONTRACT_1_FIELDS
from anyflex.contract.decision import Decision, Rejected
from anyflex.contract.spec import Spec
from anyflex.registry import isolated, register
from anyflex.registry.install_hints import install_line
from anyflex.runtime import disk_cache
from anyflex.tensors import torch_versions
from tests.cli.backends import (
    DefaultScaleInDecoding,
    FirstHeadInDecoding,
    ForwardOnly,
    Right,
    WrongBackward,
    WrongForward,
    broken,
)
from tests.cli.conftest import RunCommand


def test_a_healthy_machine_passes(command: RunCommand) -> None:
    result = command("doctor")
    assert result.code == ExitCode.OK, result.out
    assert f"anyflex {anyflex.__version__}" in result.out
    assert f"torch {torch.__version__}" in result.out
    assert "reference  usable" in result.out
    assert "self-test on cpu, float32, forward and backward: PASS" in result.out
    assert "All checks passed." in result.out


def test_a_torch_that_no_test_ran_with_is_told_and_no_failure(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, newest = torch_versions.TESTED
    assert f"torch {torch.__version__} (tested: {oldest} to {newest})" in command("doctor").out
    monkeypatch.setattr(torch_versions, "TESTED", ("2.1", "2.2"))
    result = command("doctor")
    assert f"torch {torch.__version__} (not tested; tested: 2.1 to 2.2)" in result.out
    assert result.code == ExitCode.OK


def test_json_has_the_same_facts(command: RunCommand, tmp_path: Path) -> None:
    facts = json.loads(command("doctor", "--json").out)
    assert facts["failures"] == []
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["devices"][0]["type"] == "cpu"
    assert facts["cache"]["folder"].startswith(str(tmp_path / "cache"))
    (reference,) = facts["backends"]
    assert (reference["name"], reference["state"]) == ("reference", "usable")
    tests = [test for test in reference["self_tests"] if test["device"] == "cpu"]
    assert [test["what"] for test in tests] == [
        "forward and backward",
        "decoding with GQA and a scale",
    ]
    assert all(test["passed"] and test["error"] < 1e-5 for test in tests)


def test_a_device_without_its_backend_gets_the_install_line(command: RunCommand) -> None:
    assert install_line("cpu") in command("doctor").out


def test_a_device_whose_backend_is_rejected_is_named_where_all_passes(command: RunCommand) -> None:
    class Refusing(Right):
        def probe(self) -> Decision:
            return Rejected("environment variable MINE: 'x' is no level")

    register("cpu", Refusing)
    result = command("doctor")
    assert result.code == ExitCode.OK, result.out
    assert "environment variable MINE: 'x' is no level" in result.out
    assert result.out.endswith("All checks passed; on cpu the reference computes, see cpu.\n")
    register("cpu.other", Right)
    assert command("doctor").out.endswith("All checks passed.\n")


def test_a_usable_backend_shows_its_options_and_no_hint(command: RunCommand) -> None:
    register("cpu", Right)
    result = command("doctor")
    assert result.code == ExitCode.OK, result.out
    assert "cpu  usable" in result.out
    assert "option SPLITS: int = 4, one of 1, 2, 4. Parts that a row is cut into." in result.out
    assert install_line("cpu") not in result.out


def test_it_says_what_a_backend_s_kernels_are_made_for(command: RunCommand) -> None:
    class Named(Right):
        def fingerprint(self) -> str:
            return "level 7, compiler 3"

    register("cpu", Named)
    assert "  kernels of: level 7, compiler 3" in command("doctor").out
    (named, _) = json.loads(command("doctor", "--json").out)["backends"]
    assert named["fingerprint"] == "level 7, compiler 3"


def test_a_fingerprint_that_raises_is_told(command: RunCommand) -> None:
    class Nameless(Right):
        def fingerprint(self) -> str:
            raise OSError("no compiler")

    register("cpu", Nameless)
    out = command("doctor").out
    assert f"kernels of: fingerprint() raised OSError: no compiler ({__file__}:" in out
    # Its kernels aren't available either; the expected lines of doctor follow.
    (told, *below) = out[out.index("self-test on cpu") :].splitlines()
    assert "`anyflex doctor` shows the traceback" in told
    assert below[0].strip().startswith(f'File "{__file__}"')
    assert "OSError: no compiler" in [line.strip() for line in below[:4]]


def test_notes_that_raise_are_told_with_their_place(command: RunCommand) -> None:
    class Raising(Right):
        def notes(self) -> list[str]:
            raise OSError("no driver")

    register("cpu", Raising)
    assert f"note: notes() raised OSError: no driver ({__file__}:" in command("doctor").out


def test_backends_stand_in_the_order_in_which_they_are_asked(command: RunCommand) -> None:
    class Last(Right):
        priority = -1

    class First(Right):
        priority = 7

    class Refusing(First):
        def probe(self) -> Decision:
            return Rejected("no abacus")

    register("cpu.a", Last)
    register("xpu.a", Refusing)
    register("cpu.b", Refusing)
    register("cpu.c", Right)
    register("cpu.d", First)
    facts = json.loads(command("doctor", "--json").out)
    names = [backend["name"] for backend in facts["backends"]]
    assert names == ["cpu.d", "cpu.c", "cpu.a", "cpu.b", "xpu.a", "reference"]
    assert facts["devices"][0]["backends"] == ["cpu.d", "cpu.c", "cpu.a"]


def test_what_takes_long_is_named_on_stderr(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()

    class Slow(Right):
        def probe(self) -> Decision:
            # Ends as soon as the line is there.
            assert told.wait(60)
            return super().probe()

    monkeypatch.setattr(doctor_facts, "SLOW_S", 0.01)
    write = sys.stderr.write

    def tell(text: str) -> int:
        if "backend cpu: importing and probing it takes more than" in text:
            told.set()
        return write(text)

    register("cpu", Slow)
    monkeypatch.setattr(sys.stderr, "write", tell)
    assert command("doctor").code == ExitCode.OK


def test_it_prints_a_backend_s_notes_whatever_its_probe_said(command: RunCommand) -> None:
    class Noting(Right):
        def notes(self) -> list[str]:
            return [f"seen beside {self.name}"]

    class Refusing(Noting):
        def probe(self) -> Decision:
            return Rejected("no such unit; plug one in")

    register("cpu", Noting)
    register("cpu.refusing", Refusing)
    result = command("doctor")
    assert result.code == ExitCode.OK
    assert "  note: seen beside cpu\n" in result.out
    assert "  note: seen beside cpu.refusing\n" in result.out


def test_notes_that_raise_are_told(command: RunCommand) -> None:
    class Broken(Right):
        def notes(self) -> list[str]:
            raise OSError("no metadata")

    register("cpu", Broken)
    result = command("doctor")
    assert "no metadata" in result.out and result.code == ExitCode.OK


@pytest.mark.parametrize("backend", [WrongForward, WrongBackward])
def test_wrong_numbers_fail_the_self_test(command: RunCommand, backend: type[Right]) -> None:
    register("cpu", backend)
    result = command("doctor")
    assert result.code == ExitCode.CHECK_FAILED
    assert "FAIL: backend cpu: self-test on cpu" in result.out
    facts = json.loads(command("doctor", "--json").out)
    (cpu,) = [backend for backend in facts["backends"] if backend["name"] == "cpu"]
    assert cpu["self_tests"][0]["passed"] is False


@pytest.mark.parametrize("backend", [DefaultScaleInDecoding, FirstHeadInDecoding])
def test_wrong_numbers_of_decoding_alone_fail_its_self_test(
    command: RunCommand, backend: type[Right]
) -> None:
    register("cpu", backend)
    result = command("doctor")
    assert "self-test on cpu, float32, forward and backward: PASS" in result.out
    assert "FAIL: backend cpu: self-test on cpu, float32, decoding with GQA and a" in result.out


def test_a_backend_without_gqa_refuses_the_self_test_of_decoding(command: RunCommand) -> None:
    class NoGroups(Right):
        capabilities = dataclasses.replace(Right.capabilities, gqa=False)

    register("cpu", NoGroups)
    result = command("doctor")
    assert result.code == ExitCode.OK, result.out
    assert "decoding with GQA and a scale: not run, BackendRefused: " in result.out


def test_layouts_that_a_backend_takes_as_they_are_are_told(command: RunCommand) -> None:
    class Packs(Right):
        capabilities = dataclasses.replace(
            Right.capabilities, known_fields=CONTRACT_1_FIELDS | {"q_layout", "sinks"}
        )

    register("cpu", Packs)
    told = "takes as they are, without core: packed sequences, sinks\n"
    assert command("doctor").out.count(told) == 1


def test_a_forward_only_backend_is_tested_forward(command: RunCommand) -> None:
    register("cpu", ForwardOnly)
    result = command("doctor")
    assert result.code == ExitCode.OK, result.out
    assert "self-test on cpu, float32, forward: PASS" in result.out


def test_a_backend_without_mods_is_tested_without(command: RunCommand) -> None:
    class NoMods(Right):
        capabilities = dataclasses.replace(
            Right.capabilities,
            known_fields=CONTRACT_1_FIELDS - {"score_graph", "mask_graph", "mask_kind"},
        )

    register("cpu", NoMods)
    result = command("doctor")
    assert result.code == ExitCode.OK, result.out
    assert "self-test on cpu, float32, forward and backward, without mods: PASS" in result.out


def test_a_backend_that_refuses_the_self_test_is_no_failure(command: RunCommand) -> None:
    class Refuses(Right):
        def supports(self, spec: Spec) -> Decision:
            return Rejected("only on Mondays")

    register("cpu", Refuses)
    result = command("doctor")
    assert result.code == ExitCode.OK, result.out
    assert "without mods: not run, BackendRefused: " in result.out
    assert "only on Mondays" in result.out


def test_a_broken_backend_shows_where_it_raised(command: RunCommand) -> None:
    register("cpu", broken())
    result = command("doctor")
    assert result.code == ExitCode.CHECK_FAILED
    assert "cpu  broken" in result.out
    assert "OSError: libvendor.so.1: cannot open shared object file" in result.out
    assert "in probe" in result.out
    assert "self-test on cpu, float32, forward and backward: PASS" in result.out, "the reference"


def test_a_conflict_names_both_and_the_cure(command: RunCommand) -> None:
    register("cpu", broken("one_package.backend"))
    register("cpu", broken("two_package.backend"))
    result = command("doctor")
    assert result.code == ExitCode.CHECK_FAILED
    assert result.out.count("cpu  conflict") == 2
    assert result.out.count("FAIL: backend cpu is registered by two distributions") == 1
    assert "ANYFLEX_DISABLE=dist:one_package" in result.out


def test_a_backend_that_rejects_the_machine_is_no_failure(command: RunCommand) -> None:
    class NotHere(Right):
        def probe(self) -> Decision:
            return Rejected("needs AVX-1024; use a newer processor")

    register("cpu", NotHere)
    result = command("doctor")
    assert result.code == ExitCode.OK
    assert "cpu  rejected" in result.out
    assert "needs AVX-1024; use a newer processor" in result.out


def test_a_backend_of_another_contract_is_listed_unloaded(
    command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "anyflex-future", "[anyflex.backends.v9]\ncpu.next = no_module:X\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with isolated(scan=True):
        result = command("doctor")
    assert "cpu.next  incompatible  (anyflex-future 1.0, contract 9)" in result.out
    assert "FAIL: backend cpu.next is written for contract 9, this is 1; upgrade any" in result.out
    assert "All checks passed" not in result.out
    assert result.code == ExitCode.CHECK_FAILED


def test_a_backend_that_serves_two_contracts_is_no_failure(
    command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = ("[anyflex.backends.v1]\ncpu.both = ", "[anyflex.backends.v9]\ncpu.both = none_such:")
    points = f"{groups[0]}tests.cli.backends:Right\n{groups[1]}X\n"
    _install(tmp_path, "anyflex-both", points)
    monkeypatch.syspath_prepend(str(tmp_path))
    with isolated(scan=True):
        result = command("doctor")
    assert "cpu.both  incompatible" in result.out and "cpu.both  usable" in result.out
    assert "FAIL: backend cpu.both" not in result.out


def test_an_import_error_is_told_once(
    command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "anyflex-lost", "[anyflex.backends.v1]\ncpu.lost = no_such_module_of:X\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with isolated(scan=True):
        result = command("doctor")
    assert result.out.count("No module named 'no_such_module_of'") == 1


def test_how_long_a_slow_self_test_took_stands_in_its_line(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert " after " not in command("doctor").out
    monkeypatch.setattr(self_test, "SLOW_S", 0.0)
    out = command("doctor").out
    assert re.search(r"self-test on cpu, float32, .*: PASS after \d+ s \(error ", out)


def test_hook_plugins_are_listed_with_their_state(
    command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "good": "def anyflex_compiled(seconds): pass",
        "raises": "def anyflex_launched(spec): raise KeyError('no such counter')",
        "wrong": "def anyflex_compiled(minutes): pass",
        "off": "exit(1)",
    }
    for name, source in names.items():
        (tmp_path / f"doctor_{name}.py").write_text(
            f"from anyflex.plugin import hookimpl\n@hookimpl\n{source}\n"
        )
        _install(tmp_path, name, f"[anyflex.hooks.v1]\n{name} = doctor_{name}\n")
    _install(tmp_path, "newer", "[anyflex.hooks.v2]\nnewer = no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ANYFLEX_DISABLE", "off")
    with isolated(scan=True):
        result = command("doctor")
    assert "good  usable  (good 1.0)" in result.out
    assert "raises  broken  (raises 1.0)" in result.out, "the self-test called it"
    assert "KeyError: 'no such counter'" in result.out
    assert "wrong  broken  (wrong 1.0)" in result.out
    assert "off  disabled  (off 1.0)\n    it is disabled by ANYFLEX_DISABLE=off" in result.out
    assert "newer  incompatible  (newer 1.0)" in result.out
    assert result.code == ExitCode.CHECK_FAILED
    failures = sorted(line for line in result.out.splitlines() if line.startswith("FAIL"))
    assert len(failures) == 2
    assert "plugin 'raises'" in failures[0] and "plugin 'wrong'" in failures[1]


def test_a_stale_copy_is_shown(
    command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path / "new", "anyflex-twice", "[anyflex.backends.v1]\ncpu.a = no_module:X\n")
    _install(tmp_path / "old", "anyflex-twice", "")
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    monkeypatch.syspath_prepend(str(tmp_path / "old"))
    result = command("doctor")
    assert "anyflex-twice is installed 2 times" in result.out
    assert f"not used: {tmp_path / 'old'}" in result.out


def test_variables_are_shown_with_what_is_wrong(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYFLEX_FALLBACK", "perhaps")
    monkeypatch.setenv("ANYFLEX_BACKND", "reference")
    result = command("doctor")
    assert result.code == ExitCode.CHECK_FAILED
    assert "FAIL: ANYFLEX_FALLBACK=perhaps: not error, warn or quiet" in result.out
    assert "did you mean ANYFLEX_BACKEND?" in result.out


def _install(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_cache_folder_that_can_not_be_used_fails(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", os.devnull)
    disk_cache.forget()
    result = command("doctor")
    assert result.code == ExitCode.CHECK_FAILED
    assert "FAIL: ANYFLEX_CACHE_DIR: " in result.out
    assert "kernels are kept in memory only" in result.out


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ANYFLEX_CACHE_DIR", "beside", "not an absolute path"),
        ("ANYFLEX_CACHE_DIR", "~no-such-user/x", "unknown user"),
        ("ANYFLEX_BACKEND", "nope", "there is no backend 'nope'"),
    ],
)
def test_a_variable_that_calls_would_refuse_fails(
    name: str, value: str, says: str, command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    disk_cache.forget()
    result = command("doctor")
    assert result.code == ExitCode.CHECK_FAILED
    assert f"FAIL: {name}={value}" in result.out
    assert says in result.out


def test_variables_of_backends_are_shown(
    command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYFLEX_XPU_IPEX", "1")
    assert "  ANYFLEX_XPU_IPEX=1" in command("doctor").out
