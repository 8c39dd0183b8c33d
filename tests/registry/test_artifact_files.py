"""`anyflex.save_artifacts` and `load_artifacts`: loaded, omitted and refused artifacts."""

from __future__ import annotations

import io
import logging
import pathlib
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import anyflex
from anyflex.cli.main import main
from anyflex.contract.artifacts import Artifacts
from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.registry import backend_table, register
from anyflex.runtime import disk_cache
from anyflex.runtime.artifact_origin import write_origin
from anyflex.runtime.cache_archive import Loaded
from tests.registry.stubs import make_spec, make_stub

FACTS = {"plugin": "cpu", "package": "stub", "version": "1.0"}


@pytest.fixture(autouse=True)
def _backend() -> None:
    """A backend that is installed: ``stub 1.0``, which keeps what it compiles on disk."""
    stub = make_stub()
    stub.fingerprint = lambda self: "avx2"  # type: ignore[method-assign]
    register("cpu", stub)
    entry = backend_table.current().get("cpu")
    assert entry is not None
    entry.package, entry.version, entry.distribution = "stub", "1.0", "stub 1.0"


def artifacts(
    *, fingerprint: str = "avx2", plugin: str = "cpu", version: str = "1.0", **of_spec: Any
) -> Artifacts:
    """Artifacts as `anyflex.runtime.kernel_cache` makes them."""
    spec = make_spec(**of_spec)
    return disk_cache.artifacts_for(
        plugin=plugin,
        package="stub",
        version=version,
        fingerprint=fingerprint,
        spec_digest=spec.digest(),
        origin=write_origin(plugin, "stub", version, fingerprint, spec),
    )


def in_an_empty_cache(source: Any) -> Loaded:
    disk_cache.store().clear()
    return anyflex.load_artifacts(source)


def test_bytes_and_files_hold_the_same_and_bring_it_back(tmp_path: pathlib.Path) -> None:
    artifacts().put("code", b"1")
    content = anyflex.save_artifacts()
    path = anyflex.save_artifacts(str(tmp_path / "a.zip"))
    assert path == tmp_path / "a.zip" and path.read_bytes() == content
    for source in (content, path, str(path), memoryview(content)):
        # The code, and its origin.
        assert in_an_empty_cache(source) == Loaded(2, 0, ())
        assert artifacts().get("code") == b"1"


def test_an_empty_cache_is_saved_and_loaded() -> None:
    assert anyflex.load_artifacts(anyflex.save_artifacts()) == Loaded(0, 0, ())


def other_anyflex(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.setattr("anyflex.runtime.artifact_origin.VERSION", "9.9")
        there.setattr("anyflex.runtime.disk_cache.VERSION", "9.9")
        artifacts(head_dim=8).put("code", b"2")


def other_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.setattr(torch, "__version__", "2.99.0")
        there.setattr("anyflex.mod_graph.torch_derivatives.IN_FORCE", "none at all")
        there.setattr("anyflex.runtime.artifact_origin.IN_FORCE", "none at all")
        artifacts(head_dim=8).put("code", b"2")


def other_triton(_: pytest.MonkeyPatch) -> None:
    artifacts(fingerprint="triton 9.9").put("code", b"2")


def other_backend(_: pytest.MonkeyPatch) -> None:
    artifacts(plugin="warp").put("code", b"2")


def other_version(_: pytest.MonkeyPatch) -> None:
    artifacts(version="2.0").put("code", b"2")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (other_anyflex, "made for anyflex 9.9, here is "),
        (other_torch, "made for torch 2.99.0, which differentiates otherwise"),
        (other_triton, "made for triton 9.9, here is avx2"),
        (other_backend, "made by backend 'warp' of stub 1.0, which isn't installed"),
        (other_version, "made by backend 'cpu' of stub 2.0, here is stub 1.0"),
    ],
)
def test_what_no_call_here_would_find_is_left_out_with_its_reason(
    made: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts().put("code", b"1")
    made(monkeypatch)
    content = anyflex.save_artifacts()
    with caplog.at_level(logging.WARNING, "anyflex"):
        loaded = in_an_empty_cache(content)
    assert (loaded.artifacts, loaded.skipped) == (2, 2)
    (said,) = loaded.reasons
    assert said.startswith(f"2 artifacts {reason}")
    assert said in caplog.text
    assert artifacts().get("code") == b"1"
    assert len(disk_cache.store().items()) == 2


@pytest.mark.parametrize("initialized", [True, False])
def test_kernels_for_another_gpu_are_told_where_one_is_in_use(
    initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr("anyflex.runtime.artifact_origin.architecture", lambda device: "sm_80")
    artifacts(device_type="cuda", arch="sm_90").put("code", b"1")
    artifacts(device_type="cuda", arch="sm_80").put("code", b"2")
    loaded = in_an_empty_cache(anyflex.save_artifacts())
    if initialized:
        assert loaded == Loaded(2, 2, ("2 artifacts made for cuda sm_90, here is sm_80",))
    else:
        # Asking would start the device, in a process that may fork: nothing else finds them.
        assert loaded == Loaded(4, 0, ())


def test_the_command_says_what_was_left_out_and_fails_where_that_is_all(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = str(tmp_path / "a.zip")
    artifacts(plugin="warp").put("code", b"2")
    anyflex.save_artifacts(archive)
    assert main(["cache", "load", archive]) == 1
    assert "has nothing for this environment: 2 artifacts made by" in capsys.readouterr().err
    artifacts().put("code", b"1")
    anyflex.save_artifacts(archive)
    assert main(["cache", "load", archive]) == 0
    out = capsys.readouterr().out
    assert "loaded 2 artifacts into" in out and "skipped 2 artifacts made by backend 'warp'" in out


def test_a_backend_may_not_write_where_its_artifacts_are_from() -> None:
    with pytest.raises(anyflex.PluginError, match="'origin.json' is core's own"):
        artifacts().put("origin.json", b"1")


def test_the_command_lists_each_spec_with_its_backend(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    artifacts().put("code", b"1")
    artifacts().put("more", b"1")
    artifacts(head_dim=8).put("code", b"2")
    assert main(["cache", "specs"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(line["spec"] for line in lines) == sorted(
        [make_spec().to_text(), make_spec(head_dim=8).to_text()]
    )
    assert {line["backend"] for line in lines} == {"cpu"}


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda archive: archive[: len(archive) // 2], "can't be read"),
        (lambda archive: b"", "can't be read"),
        (lambda archive: b"junk" * 100, "can't be read"),
        (
            lambda archive: archive.replace(
                b"anyflex cache artifacts-1", b"anyflex cache artifacts-2"
            ),
            "no anyflex cache archive of layout 'artifacts-1'",
        ),
        (lambda archive: foreign(), "no anyflex cache archive"),
    ],
    ids=["truncated", "empty", "junk", "newer", "foreign"],
)
def test_what_is_no_whole_archive_of_this_layout_loads_nothing(damaged: Any, message: str) -> None:
    artifacts().put("code", b"1")
    archive = anyflex.save_artifacts()
    artifacts().put("code", b"before")
    with pytest.raises(ArgumentError, match=message):
        anyflex.load_artifacts(damaged(archive))
    assert artifacts().get("code") == b"before"


def foreign() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.txt", "hello")
    return stream.getvalue()


def test_a_flipped_byte_anywhere_is_found_or_harmless() -> None:
    artifacts().put("code", b"machine code" * 30)
    archive = anyflex.save_artifacts()
    before = sorted(
        (item.path.name, item.path.read_bytes()) for item in disk_cache.store().items()
    )
    refused = 0
    for place in range(len(archive)):
        flipped = bytearray(archive)
        flipped[place] ^= 0x40
        try:
            anyflex.load_artifacts(bytes(flipped))
        except ArgumentError:
            refused += 1
        found = sorted(
            (item.path.name, item.path.read_bytes()) for item in disk_cache.store().items()
        )
        # A member under another distribution or key at most, where nothing finds it.
        assert set(before) <= set(found)
        for name, file in found:
            assert disk_cache.unseal(name, file) is not None
    assert refused > len(archive) // 2


def test_an_unknown_source_is_a_type_error() -> None:
    with pytest.raises(ArgumentTypeError, match="takes a path or the bytes of save_artifacts"):
        anyflex.load_artifacts(5)  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_used_refuses_both() -> None:
    artifacts().put("code", b"1")
    archive = anyflex.save_artifacts()
    disk_cache.store().clear()
    folder = disk_cache.cache_folder()
    for path in (folder / disk_cache.FOLDER, folder):
        if path.exists():
            path.rmdir()
    folder.write_text("no folder")
    disk_cache.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ArgumentError, match="can't be used"):
            anyflex.load_artifacts(archive)
        with pytest.raises(ArgumentError, match="can't be used"):
            anyflex.save_artifacts()


def test_two_loaders_at_once_leave_every_artifact_whole() -> None:
    contents = {f"code{i}": bytes([i]) * 5000 for i in range(20)}
    for name, content in contents.items():
        artifacts().put(name, content)
    archive = anyflex.save_artifacts()
    disk_cache.store().clear()
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(anyflex.load_artifacts, [archive] * 8))
    assert loaded == [Loaded(21, 0, ())] * 8
    assert {name: artifacts().get(name) for name in contents} == contents
