"""Environment variables: one table, read once, with errors that name the allowed values."""

from __future__ import annotations

import pathlib
import re

import pytest

from anyflex.errors import ArgumentError
from anyflex.registry import environment, isolated
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.stubs import make_spec

__all__: list[str] = []

READERS = {
    "ANYFLEX_BACKEND": environment.backend_names,
    "ANYFLEX_DISABLE": environment.disabled,
    "ANYFLEX_PLUGINS": environment.plugins,
    "ANYFLEX_STRICT": environment.strict,
    "ANYFLEX_FALLBACK": environment.fallback,
    "ANYFLEX_CACHE_DIR": environment.cache_dir,
    "ANYFLEX_CHECK_INDICES": environment.check_indices,
    "ANYFLEX_TORCH": environment.torch_devices,
}


def test_every_variable_has_a_reader() -> None:
    assert {variable.name for variable in environment.VARIABLES} == set(READERS)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ANYFLEX_BACKEND", None, ()),
        ("ANYFLEX_BACKEND", " cuda.triton , cpu,", ("cuda.triton", "cpu")),
        ("ANYFLEX_DISABLE", "cpu,dist:x", ("cpu", "dist:x")),
        ("ANYFLEX_PLUGINS", None, None),
        ("ANYFLEX_PLUGINS", "", None),
        ("ANYFLEX_PLUGINS", "none", ()),
        ("ANYFLEX_PLUGINS", "cpu", ("cpu",)),
        ("ANYFLEX_STRICT", None, False),
        ("ANYFLEX_STRICT", "1", True),
        ("ANYFLEX_FALLBACK", "", "warn"),
        ("ANYFLEX_FALLBACK", "quiet", "quiet"),
        ("ANYFLEX_CACHE_DIR", "/var/x", pathlib.Path("/var/x")),
        ("ANYFLEX_CHECK_INDICES", "0", False),
        ("ANYFLEX_TORCH", None, None),
        ("ANYFLEX_TORCH", "0", None),
        ("ANYFLEX_TORCH", "1", ()),
        ("ANYFLEX_TORCH", "cpu, npu", ("cpu", "npu")),
    ],
)
def test_values_are_parsed_and_empty_means_unset(
    name: str, text: str | None, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.reset()
    if text is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, text)
    assert READERS[name]() == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("ANYFLEX_STRICT", "yes", "0 or 1"),
        ("ANYFLEX_CHECK_INDICES", "2", "0 or 1"),
        ("ANYFLEX_FALLBACK", "ignore", "error, warn or quiet"),
        ("ANYFLEX_CACHE_DIR", "relative/path", "an absolute path"),
        ("ANYFLEX_TORCH", ",", "device types, comma-separated"),
    ],
)
def test_a_value_that_is_not_allowed_names_variable_value_and_what_is(
    name: str, text: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.reset()
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=f"{name}='{re.escape(text)}'.*allowed: .*{allowed}"):
        READERS[name]()
    row = next(row for row in environment.in_force() if row.name == name)
    assert row.problem is not None and allowed in row.problem


def test_a_misspelt_variable_is_found_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYFLEX_BACKENDS", "cpu")
    monkeypatch.setenv("ANYFLEX_RELEASE", "1")
    assert environment.unknown_variables() == [("ANYFLEX_BACKENDS", "ANYFLEX_BACKEND")]


def test_the_documentation_has_a_row_for_each_variable() -> None:
    lines = environment.markdown_table().splitlines()
    assert len(lines) == 2 + len(environment.VARIABLES)
    assert all(line.count("|") == 6 for line in lines)
    assert lines[2].startswith("| `ANYFLEX_BACKEND` |")


def test_no_other_variable_is_read_in_core() -> None:
    core = pathlib.Path(environment.__file__).parents[1]
    names = set()
    for path in core.rglob("*.py"):
        if path != pathlib.Path(environment.__file__):
            text = path.read_text()
            names |= set(re.findall(r"(?:environ|getenv)[^\n]*[\"'](ANYFLEX_\w+)", text))
    assert names == set()


@pytest.mark.parametrize(("name", "text"), [("ANYFLEX_STRICT", "7"), ("ANYFLEX_FALLBACK", "no")])
def test_the_first_call_that_selects_a_backend_reads_them(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    environment.reset()
    with isolated(), pytest.raises(ArgumentError, match=name):
        kernel_for(make_spec(), (), None, ())


def test_variables_of_backends_that_are_set_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFLEX_CUDA_BLACKWELL", "1")
    monkeypatch.setenv("ANYFLEX_XPU_IPEX", "")
    assert ("ANYFLEX_CUDA_BLACKWELL", "1") in environment.variables_of_others()
    assert "ANYFLEX_XPU_IPEX" not in dict(environment.variables_of_others())
