"""The disk cache: atomic, checked, per user, and never the reason for a failure."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pathlib
import sys
import threading
import tracemalloc
import warnings
import zipfile
from typing import Any

import pytest

from anyflex.cli.exit_codes import ExitCode
from anyflex.cli.main import main
from anyflex.contract.artifacts import Artifacts
from anyflex.errors import ArgumentError, PluginError
from anyflex.registry import environment, register
from anyflex.runtime import cache_archive, disk_cache
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.stubs import make_spec, make_stub

__all__: list[str] = []


def artifacts(**changes: Any) -> Artifacts:
    facts: dict[str, Any] = {
        "plugin": "cpu",
        "package": "anyflex-cpu",
        "version": "0.1",
        "fingerprint": "avx2",
        "spec_digest": "d" * 64,
    }
    return disk_cache.artifacts_for(**{**facts, **changes})


def files() -> list[pathlib.Path]:
    return [path for path in disk_cache.cache_folder().rglob("*") if path.is_file()]


def again() -> None:
    """Restore the state of a new process."""
    disk_cache.forget()


def test_what_is_put_is_got_back_in_a_new_process() -> None:
    artifacts().put("kernel.cubin", b"\x00machine code\n")
    again()
    assert artifacts().get("kernel.cubin") == b"\x00machine code\n"
    assert artifacts().get("other.cubin") is None
    artifacts().put("kernel.cubin", b"")
    assert artifacts().get("kernel.cubin") == b""


@pytest.mark.parametrize(
    "change",
    [
        {"plugin": "cpu.other"},
        {"package": "other"},
        {"version": "0.2"},
        {"fingerprint": "avx512"},
        {"spec_digest": "e" * 64},
    ],
)
def test_every_part_of_the_key_separates(change: dict[str, str]) -> None:
    artifacts().put("a", b"1")
    assert artifacts(**change).get("a") is None


def test_another_version_of_core_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts().put("a", b"1")
    monkeypatch.setattr("anyflex.runtime.disk_cache.VERSION", "9.9")
    assert artifacts().get("a") is None


def test_a_torch_that_differentiates_otherwise_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifacts().put("a", b"1")
    monkeypatch.setattr("anyflex.mod_graph.torch_derivatives.IN_FORCE", "other rules")
    assert artifacts().get("a") is None


def test_parts_of_the_key_cannot_run_into_each_other() -> None:
    artifacts(package="ab", version="c").put("a", b"1")
    assert artifacts(package="a", version="bc").get("a") is None


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_the_folder_is_closed_to_others() -> None:
    previous = os.umask(0)
    try:
        artifacts().put("a", b"1")
    finally:
        os.umask(previous)
    folder = disk_cache.cache_folder()
    for path in (folder, folder / disk_cache.FOLDER):
        assert path.stat().st_mode & 0o777 == 0o700
    assert files()[0].stat().st_mode & 0o077 == 0


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_a_folder_that_others_can_write_is_not_trusted() -> None:
    artifacts().put("a", b"1")
    (disk_cache.cache_folder() / disk_cache.FOLDER).chmod(0o777)
    again()
    with pytest.warns(RuntimeWarning, match="mode 777 lets others write; chmod 700"):
        assert artifacts().get("a") is None


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_a_folder_of_somebody_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts().put("a", b"1")
    again()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        assert artifacts().get("a") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-3] + b"\xff" + content[-2:],
        lambda content: b"\x7fELF" + content[4:],
        lambda content: content.replace(b"artifact 1", b"artifact 2"),
    ],
)
def test_a_damaged_file_is_compiled_anew_with_one_line_that_names_it(
    damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    artifacts().put("kernel", b"some machine code")
    (path,) = files()
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "anyflex"):
        assert artifacts().get("kernel") is None
        assert artifacts().get("kernel") is None
    assert [r.getMessage() for r in caplog.records] == [
        f"cache file {path} is damaged or foreign; compiled anew"
    ]
    artifacts().put("kernel", b"some machine code")
    assert artifacts().get("kernel") == b"some machine code"


def test_a_file_under_another_name_is_foreign() -> None:
    artifacts().put("a", b"1")
    (path,) = files()
    path.rename(path.with_name("b"))
    assert artifacts().get("b") is None


def test_a_folder_that_cannot_be_written_costs_one_warning_and_no_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    from anyflex.registry import environment

    environment.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        artifacts().put("a", b"1")
        artifacts().put("b", b"2")
        assert (artifacts().get("a"), artifacts().get("b")) == (None, None)
    (warning,) = caught
    assert "in memory only. Set ANYFLEX_CACHE_DIR" in str(warning.message)
    assert str(tmp_path / "file" / "cache") in str(warning.message)


def test_threads_that_give_the_folder_up_together_warn_once(tmp_path: pathlib.Path) -> None:
    store = disk_cache.Store(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # each has looked before the other gave up
            store._give_up("No space left on device")
    assert len(caught) == 1


def test_a_full_disk_costs_one_warning_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        artifacts().put("a", b"1")
    assert artifacts().get("a") is None
    assert files() == []


def test_the_cache_may_be_cleared_while_somebody_writes() -> None:
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            artifacts().put(f"a{number % 20}", b"x" * 100)
            number += 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thread = threading.Thread(target=write)
        thread.start()
        for _ in range(50):
            disk_cache.store().clear()
        stop.set()
        thread.join(20)
    assert disk_cache.store().problem is None


def write_often(me: int) -> None:
    disk_cache.forget()
    for _ in range(40):
        for name in range(4):
            kept = artifacts(spec_digest=str(name))
            data = kept.get("code")
            whole = data is None or (len(data) == 50000 and len(set(data)) == 1)
            assert whole, "a torn artifact"
            kept.put("code", bytes([me]) * 50000)
    assert disk_cache.store().problem is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_eight_processes_write_the_same_entries_at_once() -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(me,)) for me in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert len(files()) == 4
    for name in range(4):
        data = artifacts(spec_digest=str(name)).get("code")
        assert data is not None and len(data) == 50000 and len(set(data)) == 1


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "-x", "a\\b", "x" * 201, 3])
def test_a_name_is_a_file_name(name: Any) -> None:
    with pytest.raises(PluginError, match="a name must be 1 to 200 letters"):
        artifacts().put(name, b"")


def test_data_must_be_bytes() -> None:
    with pytest.raises(PluginError, match="data must be bytes, got str"):
        artifacts().put("a", "text")  # type: ignore[arg-type]


def test_a_version_cannot_lead_out_of_the_folder() -> None:
    artifacts(package="../../evil", version="../x").put("a", b"1")
    assert disk_cache.cache_folder() / disk_cache.FOLDER in files()[0].parents
    assert ".." not in str(files()[0].relative_to(disk_cache.cache_folder()).parts[1])[:2]


def test_a_backend_registered_in_the_process_leaves_nothing_on_disk() -> None:
    stub = make_stub()
    plain = stub.compile

    def keep(self: Any, spec: Any, kept: Artifacts) -> Any:
        kept.put("code", b"1")
        assert kept.get("code") is None
        return plain(self, spec, kept)

    stub.compile = keep  # type: ignore[method-assign]
    register("cpu", stub)
    kernel_for(make_spec(), (), None, ())
    assert stub.compiled and files() == []


def command(*arguments: str) -> int:
    return main(["cache", *arguments])


def test_the_command_shows_saves_clears_and_loads(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifacts().put("code", b"1" * 2000)
    artifacts().put("table", b"2")
    artifacts(version="0.2").put("code", b"3")
    assert command("info", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["artifacts"] == 3 and facts["problem"] is None
    assert facts["builds"]["anyflex-cpu-0.1"]["kernels"] == 1
    assert facts["builds"]["anyflex-cpu-0.1"]["artifacts"] == 2
    assert command("info") == 0
    assert "anyflex-cpu-0.1: 1 kernels, 2 artifacts, 2.1 KiB" in capsys.readouterr().out

    archive = tmp_path / "kernels.zip"
    assert command("save", str(archive), "--json") == 0
    assert json.loads(capsys.readouterr().out)["saved"] == 3
    assert command("clear") == 0
    assert "deleted 3 artifacts" in capsys.readouterr().out
    assert files() == []
    assert command("load", str(archive)) == 0
    assert "loaded 3 artifacts" in capsys.readouterr().out
    again()
    assert artifacts().get("code") == b"1" * 2000
    assert artifacts(version="0.2").get("code") == b"3"


def test_equal_caches_give_equal_archives(tmp_path: pathlib.Path) -> None:
    artifacts().put("code", b"1")
    for name in ("a.zip", "b.zip"):
        cache_archive.save(disk_cache.store(), tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_damaged_entries_are_not_saved(tmp_path: pathlib.Path) -> None:
    artifacts().put("good", b"1")
    artifacts().put("bad", b"2")
    next(path for path in files() if path.name == "bad").write_bytes(b"junk")
    assert cache_archive.save(disk_cache.store(), tmp_path / "a.zip") == 1


KEY = "0" * 64


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("../../evil/" + KEY + "/code", b"1", "no artifact's"),
        ("/etc/" + KEY + "/code", b"1", "no artifact's"),
        ("build/" + KEY + "/../code", b"1", "no artifact's"),
        ("a..b/" + KEY + "/code", b"1", "no artifact's"),
        ("build/short/code", b"1", "no artifact's"),
        ("build/" + KEY + "/.hidden", b"1", "no artifact's"),
        ("build\\" + KEY + "\\code", b"1", "no artifact's"),
        ("build/" + KEY + "/code", None, "is damaged"),
    ],
)
def test_an_archive_that_is_not_whole_and_harmless_loads_nothing(
    member: str, content: bytes | None, message: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = b"anyflex cache artifacts-1"
        archive.writestr(f"build/{KEY}/fine", disk_cache.seal("fine", b"1"))
        name = member.replace("\\", "/").rsplit("/", 1)[1]
        sealed = b"junk" if content is None else disk_cache.seal(name, content)
        archive.writestr(member, sealed)
    with pytest.raises(ArgumentError, match=message):
        cache_archive.load_artifacts(path)
    assert files() == []


@pytest.mark.parametrize("make", ["missing", "text", "other zip"])
def test_what_is_no_archive_is_said_with_exit_code_1(
    make: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.zip"
    if make == "text":
        path.write_text("hello")
    if make == "other zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x", "y")
    assert command("load", str(path)) == 1
    assert str(path) in capsys.readouterr().err


def test_an_archive_that_cannot_be_written_is_wrong_usage(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("save", str(tmp_path / "no" / "folder.zip"), "--json") == ExitCode.USAGE
    captured = capsys.readouterr()
    assert "can't be written" in json.loads(captured.out)["error"]


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with a name")
def test_saving_replaces_a_file_alone_and_follows_a_link(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifacts().put("code", b"1")
    pipe, link, target = (tmp_path / name for name in ("pipe", "link.zip", "target.zip"))
    os.mkfifo(pipe)
    assert command("save", str(pipe)) == ExitCode.USAGE
    assert "what is there is no regular file" in capsys.readouterr().err
    assert pipe.is_fifo()
    folder = tmp_path / "folder"
    folder.mkdir()
    assert command("save", str(folder)) == ExitCode.USAGE
    for _ in range(2):  # a link to nothing, then to a file
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        assert command("save", str(link)) == 0
        assert link.is_symlink() and zipfile.is_zipfile(target)
    assert sorted(path.name for path in tmp_path.glob("*.zip")) == ["link.zip", "target.zip"]
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.skipif(sys.platform == "win32", reason="no umask")
def test_an_archive_is_loaded_one_member_at_a_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for position in range(20):
        disk_cache.store().put("build", KEY, f"code{position}", os.urandom(2**20))
    cache_archive.save(disk_cache.store(), tmp_path / "a.zip")
    disk_cache.store().clear()
    tracemalloc.start()
    try:
        assert cache_archive.load_artifacts(tmp_path / "a.zip").artifacts == 20
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_mode_of_an_archive_is_the_umask_s(tmp_path: pathlib.Path, mask: int) -> None:
    artifacts().put("code", b"1")
    before = os.umask(mask)
    try:
        cache_archive.save(disk_cache.store(), tmp_path / "a.zip")
    finally:
        os.umask(before)
    assert (tmp_path / "a.zip").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("action", ["save", "load"])
def test_a_dash_is_no_archive(
    action: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(action, "-") == ExitCode.USAGE
    assert "must be a file's name, got '-'; a file that is called so is ./-" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("action", [("info",), ("info", "--json"), ("save", "a.zip")])
def test_a_cache_that_cannot_be_used_fails(
    action: tuple[str, ...],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path / "file"))
    environment.reset()
    again()
    assert command(*action) == ExitCode.CHECK_FAILED
    captured = capsys.readouterr()
    assert "File exists" in captured.out + captured.err
    assert not (tmp_path / "a.zip").exists()
