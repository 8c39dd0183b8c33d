"""Kernels that travel compiled in a package: which are found, and what doctor says of them."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from anyflex.plugin import ArgumentError
from anyflex_triton import ReadyKernels, compiling_for, ready_kernels, write_ready_kernels
from anyflex_triton.absent_gpu import in_force

KERNELS = {"kernel-b.zip": b"b" * 1000, "kernel-a.zip": b"a"}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "ready.zip"
    write_ready_kernels(path, "triton 3.6.0, sources 1", KERNELS)
    return path


def test_a_kernel_is_found_by_its_name(archive: Path) -> None:
    ready = ReadyKernels(archive, "triton 3.6.0, sources 1")
    assert {name: ready.get(name) for name in KERNELS} == KERNELS
    assert ready.get("kernel-c.zip") is None
    assert ready.note().startswith("2 kernels came compiled")


def test_no_kernel_of_other_sources_or_another_triton_is_found(archive: Path) -> None:
    ready = ReadyKernels(archive, "triton 3.7.0, sources 1")
    assert ready.get("kernel-a.zip") is None
    assert "are for triton 3.6.0, sources 1; here is triton 3.7.0, sources 1" in ready.note()


def test_an_installation_without_an_archive_compiles(tmp_path: Path) -> None:
    ready = ReadyKernels(tmp_path / "none.zip", "")
    assert ready.get("kernel-a.zip") is None
    assert "no kernels came compiled" in ready.note()


@pytest.mark.parametrize("at", [0, 40, -30])
def test_a_damaged_archive_is_reported_and_not_used(
    archive: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    content = archive.read_bytes()
    archive.write_bytes(content[:at] + b"????????" + content[at:][8:])
    ready = ReadyKernels(archive, "triton 3.6.0, sources 1")
    with caplog.at_level(logging.WARNING):
        found = [ready.get(name) for name in KERNELS]
    assert None in found
    assert set(found) <= {None, *KERNELS.values()}
    assert "can't be read" in caplog.text


def test_equal_kernels_make_equal_archives(archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.zip"
    write_ready_kernels(other, "triton 3.6.0, sources 1", dict(reversed(KERNELS.items())))
    assert other.read_bytes() == archive.read_bytes()


@pytest.mark.parametrize("arch", ["", "90", "gfx942", "sm_90a"])
def test_kernels_are_compiled_ahead_for_architectures_of_nvidia_s(arch: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with (
        pytest.raises(ArgumentError, match="arch must be an architecture of NVIDIA's"),
        compiling_for(arch),
    ):
        pass
    assert in_force() is None


def test_a_python_without_lzma_has_the_kernels_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lzma", None)
    given = importlib.util.spec_from_file_location("without_lzma", ready_kernels.__file__)
    assert given is not None and given.loader is not None
    module = importlib.util.module_from_spec(given)
    given.loader.exec_module(module)
    assert module.ReadyKernels(Path("nowhere.zip"), "").get("kernel") is None
