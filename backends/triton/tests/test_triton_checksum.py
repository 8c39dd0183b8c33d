"""Triton's checksum of its own files, told by its wheel's list of them."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no Triton whose checksum to read")

from triton.runtime import cache

from anyflex_triton import triton_checksum
from anyflex_triton.triton_checksum import recorded_checksum, take_recorded_checksum

PROGRAM = """
from triton.runtime import cache
from anyflex_triton.triton_checksum import recorded_checksum, take_recorded_checksum

computed = cache.triton_key()
assert recorded_checksum() == computed
take_recorded_checksum()
assert cache.triton_key() == computed
assert cache.triton_key.cache_info().hits == 0
# Once more: it isn't Triton's own function any more.
assert recorded_checksum() is None
take_recorded_checksum()
assert cache.triton_key() == computed
"""
try:
    WHEEL = distribution("triton").read_text("RECORD")
except PackageNotFoundError:
    WHEEL = None
FILES = ("triton/compiler/compiler.py", "triton/_C/libtriton.so")


@pytest.mark.skipif(
    not hasattr(cache, "triton_key") or WHEEL is None, reason="no wheel of Triton's is installed"
)
def test_it_is_what_triton_computes() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


class Installed:
    """A Triton of two files, and a checksum of them in that order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in FILES:
            path = folder / name
            path.parent.mkdir(parents=True)
            path.write_text(f"content of {name}")
        self.info = folder / "triton-3.6.0.dist-info"
        self.info.mkdir()
        (self.info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: triton\nVersion: 3.6.0\n"
        )
        self.record()

    def record(self, change: Callable[[str], str] = str) -> None:
        lines = []
        for name in FILES:
            content = (self.folder / name).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            lines.append(f"{name},sha256={digest.rstrip('=')},{len(content)}")
        lines.append("triton-3.6.0.dist-info/RECORD,,")
        (self.info / "RECORD").write_text(change("\n".join(lines) + "\n"))

    def key(self) -> Callable[[], str]:
        """As ``triton.runtime.cache.triton_key``."""
        names = {"open": open, "hashlib": hashlib, "FOLDER": self.folder, "FILES": FILES}
        # A function whose names are its module's, as Triton's.
        exec(
            "def key():\n"
            "    with open(FOLDER / FILES[0], 'rb') as f:\n"
            "        contents = [hashlib.sha256(f.read()).hexdigest()]\n"
            "    whole = hashlib.sha256()\n"
            "    with open(FOLDER / FILES[1], 'rb') as f:\n"
            "        while chunk := f.read(4):\n"
            "            whole.update(chunk)\n"
            "    return '3.6.0' + '-'.join([*contents, whole.hexdigest()])\n",
            names,
        )
        return lru_cache(names["key"])  # type: ignore[arg-type]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    found = Installed(tmp_path)
    monkeypatch.setattr(triton_checksum, "distribution", lambda name: Distribution.at(found.info))
    monkeypatch.setattr(cache, "triton_key", found.key(), raising=False)
    return found


def test_its_files_arent_read(installed: Installed) -> None:
    computed = cache.triton_key()
    path = installed.folder / FILES[1]
    facts = path.stat()
    path.write_text("x" * facts.st_size)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert recorded_checksum() == computed


def test_a_changed_triton_has_another(installed: Installed) -> None:
    before = recorded_checksum()
    (installed.folder / FILES[0]).write_text("another compiler")
    installed.record()
    assert recorded_checksum() == installed.key()() != before


def grow(path: Path) -> None:
    facts = path.stat()
    path.write_text("a compiler of another size")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def edit(path: Path) -> None:
    size = path.stat().st_size
    path.write_text("y" * size)
    later = path.stat().st_mtime_ns + 10**10
    os.utime(path, ns=(later, later))


@pytest.mark.parametrize("change", [grow, edit, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_changed_files_are_read(
    installed: Installed, name: str, change: Callable[[Path], None]
) -> None:
    change(installed.folder / name)
    assert recorded_checksum() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda record: "",
        lambda record: record.replace("sha256=", "md5="),
        lambda record: record.replace("compiler.py", "other.py"),
        lambda record: "\n".join(line.split(",")[0] + ",," for line in record.splitlines()),
        lambda record: record.replace(",", "\n"),
        lambda record: record.replace("sha256=", "sha256=" + "A" * 4),
        lambda record: re.sub("sha256=...", "sha256=", record),
        lambda record: re.sub("sha256=..", "sha256=", record),
        lambda record: record.replace("sha256=", "sha256=\N{GREEK SMALL LETTER ALPHA}"),
        lambda record: record.replace("triton-3.6.0.dist-info", "Triton-3.6.0.dist-info"),
        lambda record: record.replace(".dist-info/RECORD", ".dist-info/RECORDS"),
    ],
)
def test_a_list_that_says_less_isnt_taken(
    installed: Installed, change: Callable[[str], str]
) -> None:
    installed.record(change)
    assert recorded_checksum() is None
    before = cache.triton_key
    take_recorded_checksum()
    assert cache.triton_key is before
    assert before.cache_info().currsize == 1  # type: ignore[attr-defined]


def test_without_a_list_it_is_computed(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed.info / "RECORD").unlink()
    assert recorded_checksum() is None

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(triton_checksum, "distribution", missing)
    assert recorded_checksum() is None


def test_bytes_that_are_no_list_arent_taken(installed: Installed) -> None:
    (installed.info / "RECORD").write_bytes(b"\xff\xfe,,\n")
    assert recorded_checksum() is None


def test_what_is_no_files_digest_isnt_taken(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {"hashlib": hashlib}
    exec("def key():\n    return hashlib.sha256(b'3.6.0').hexdigest()\n", names)
    monkeypatch.setattr(cache, "triton_key", lru_cache(names["key"]))
    assert recorded_checksum() is None


def test_another_function_of_tritons_stays(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own() -> str:
        return "a checksum"

    monkeypatch.setattr(cache, "triton_key", own)
    take_recorded_checksum()
    assert cache.triton_key is own
    monkeypatch.delattr(cache, "triton_key")
    take_recorded_checksum()
    assert not hasattr(cache, "triton_key")
