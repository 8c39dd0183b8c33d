"""anyflex's artifacts in ``torch.compiler.save_cache_artifacts``: a bundle's content, and that no
bundle can do harm."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

from anyflex.contract.artifacts import Artifacts
from anyflex.registry import register
from anyflex.runtime import disk_cache, torch_bundle
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.stubs import make_spec, make_stub
from tests.soak import only_in_soak

KEY = "0" * 64


@pytest.fixture(autouse=True)
def _a_manager_of_its_own() -> Iterator[None]:
    with CacheArtifactManager.with_fresh_cache():
        yield


def artifacts(**changes: Any) -> Artifacts:
    facts: dict[str, Any] = {
        "plugin": "cpu",
        "package": "anyflex-cpu",
        "version": "0.1",
        "fingerprint": "avx2",
        "spec_digest": "d" * 64,
    }
    return disk_cache.artifacts_for(**{**facts, **changes})


def saved() -> tuple[bytes, list[str]]:
    """A bundle and anyflex's keys in it."""
    found = torch.compiler.save_cache_artifacts()
    assert found is not None
    return found[0], found[1].artifacts["anyflex"]


def member(name: str = "code") -> str:
    return f"anyflex-cpu-0.1/{KEY}/{name}"


def populate(key: str, content: bytes) -> None:
    CacheArtifactFactory.create("anyflex", key, content).populate_cache()


def kept(name: str = "code") -> bytes | None:
    return disk_cache.store().get("anyflex-cpu-0.1", KEY, name)


def test_a_bundle_brings_what_was_compiled_to_an_empty_cache() -> None:
    artifacts().put("code", b"machine code")
    bundle, keys = saved()
    assert [key.rsplit("/", 1)[1] for key in keys] == ["code"]
    disk_cache.store().clear()
    assert artifacts().get("code") is None
    info = torch.compiler.load_cache_artifacts(bundle)
    assert info is not None and info.artifacts["anyflex"] == keys
    assert artifacts().get("code") == b"machine code"


def test_a_process_that_compiled_nothing_saves_what_it_has_read() -> None:
    artifacts().put("code", b"1")
    artifacts().put("unread", b"2")
    disk_cache.forget()
    CacheArtifactManager.clear()
    assert artifacts().get("code") == b"1"
    assert [key.rsplit("/", 1)[1] for key in saved()[1]] == ["code"]


def test_nothing_is_saved_where_nothing_was_compiled_or_what_was_loaded_was_not_used() -> None:
    assert torch.compiler.save_cache_artifacts() is None
    populate(member(), disk_cache.seal("code", b"1"))
    assert torch.compiler.save_cache_artifacts() is None
    assert kept() == b"1"
    assert len(saved()[1]) == 1


def test_a_recorded_kernel_is_no_second_copy_in_memory() -> None:
    artifacts().put("code", b"x" * 100_000)
    (recorded,) = CacheArtifactManager._new_cache_artifacts["anyflex"]
    held = [value for value in vars(recorded).values() if isinstance(value, (bytes, str))]
    assert held and max(map(len, held)) < 300
    assert len(recorded.content) > 100_000


def test_a_table_that_has_changed_is_saved_as_it_is_now() -> None:
    artifacts().put("table", b"old")
    saved()
    artifacts().put("table", b"new")
    bundle, _ = saved()
    disk_cache.store().clear()
    torch.compiler.load_cache_artifacts(bundle)
    assert artifacts().get("table") == b"new"


def test_a_kernel_whose_file_is_gone_is_missed_aloud_and_the_rest_is_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    artifacts().put("code", b"1")
    artifacts().put("gone", b"2")
    next(disk_cache.cache_folder().rglob("gone")).unlink()
    with caplog.at_level(logging.WARNING, "anyflex"):
        bundle, _ = saved()
    assert "gone is gone from the cache: the bundle lacks it" in caplog.text
    disk_cache.store().clear()
    torch.compiler.load_cache_artifacts(bundle)
    assert artifacts().get("code") == b"1" and artifacts().get("gone") is None


def test_a_backend_registered_in_the_process_is_in_no_bundle() -> None:
    stub = make_stub()
    plain = stub.compile

    def keep(self: Any, spec: Any, kept: Artifacts) -> Any:
        kept.put("code", b"1")
        return plain(self, spec, kept)

    stub.compile = keep  # type: ignore[method-assign]
    register("cpu", stub)
    assert kernel_for(make_spec(), (), None, ()).backend.name == "cpu"
    assert stub.compiled
    assert torch.compiler.save_cache_artifacts() is None


SEALED = disk_cache.seal("code", b"machine code")


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        (member(), SEALED[:-1], "it is damaged"),
        (member(), SEALED[:20], "it is damaged"),
        (member(), b"", "it is damaged"),
        (member(), SEALED.replace(b"machine", b"Machine"), "it is damaged"),
        (member("other"), SEALED, "it is damaged"),
        (member(), SEALED.replace(b"artifact 1", b"artifact 2"), "of another layout"),
        ("../../evil/" + KEY + "/code", SEALED, "its name is no artifact's"),
        ("/etc/code", SEALED, "its name is no artifact's"),
        ("", SEALED, "its name is no artifact's"),
    ],
)
def test_what_cannot_be_loaded_costs_one_line_and_nothing_else(
    key: str, content: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    populate(member(), disk_cache.seal("code", b"before"))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "anyflex"):
        CacheArtifactManager.populate_caches(
            {
                "anyflex": [
                    CacheArtifactFactory.create("anyflex", key, content),
                    CacheArtifactFactory.create(
                        "anyflex", member("next"), disk_cache.seal("next", b"1")
                    ),
                ]
            }
        )
    (line,) = caplog.messages
    assert repr(key) in line and message in line
    assert kept() == b"before" and kept("next") == b"1"
    assert {path.name for path in disk_cache.cache_folder().rglob("*") if path.is_file()} == {
        "code", "next",
    }  # fmt: skip


@pytest.mark.parametrize("warnings_are", ["always", "error"])
def test_a_full_disk_raises_nothing(
    warnings_are: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_cache, "_write_beside", full)
    with warnings.catch_warnings(record=True) as told, caplog.at_level(logging.WARNING, "anyflex"):
        warnings.simplefilter(warnings_are)
        populate(member(), SEALED)
        populate(member("next"), disk_cache.seal("next", b"1"))
    assert len(told) + len(caplog.messages) == 1
    assert "No space left" in (caplog.text or str(told[0].message))
    assert kept("next") is None


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_a_folder_that_others_can_write_gets_nothing() -> None:
    folder = disk_cache.cache_folder() / disk_cache.FOLDER
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="lets others write"):
        populate(member(), SEALED)
    assert kept() is None
    assert list(folder.rglob("*")) == []


def test_the_module_can_be_loaded_again() -> None:
    try:
        importlib.reload(torch_bundle)
        artifacts().put("code", b"1")
        assert len(saved()[1]) == 1
    finally:
        importlib.reload(torch_bundle)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@only_in_soak("it starts two processes for what torch does, and not anyflex")
def test_a_bundle_is_lost_whole_where_anyflex_is_not_imported(tmp_path: pathlib.Path) -> None:
    """torch does this, which is why the docs say: import anyflex before."""
    artifacts().put("code", b"1")
    (tmp_path / "bundle").write_bytes(saved()[0])
    load = f"torch.compiler.load_cache_artifacts(open({str(tmp_path / 'bundle')!r}, 'rb').read())"
    assert run(f"import torch; print({load})") == "None"
    assert "CacheInfo" in run(f"import torch, anyflex; print({load})")
