"""Metadata hook: the extras, and their requirements in a checkout and in a release."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

CONFIG: dict[str, Any] = {
    "index-range": ">=0.1,<0.2",
    "tools": {"test": ["pytest>=8"]},
    "folders": {
        "anyflex-cpu": "backends/cpu",
        "anyflex-triton": "backends/triton",
        "anyflex-cuda": "backends/cuda",
        "anyflex-mps": "backends/mps",
    },
    "backends": {
        "cpu": ["anyflex-cpu[jit]"],
        "cuda": ["anyflex-cuda", "anyflex-triton"],
        "rocm": ["anyflex-triton"],
        "mps": ["anyflex-mps"],
    },
    "unions": {"all": ["cpu", "mps"]},
}


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkout(root: Path, *backends: str) -> Path:
    for name in backends:
        folder = root / "backends" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").touch()
    return root


def test_an_extra_without_its_folder_is_left_out(hook: ModuleType, tmp_path: Path) -> None:
    extras = hook.make_extras(CONFIG, checkout(tmp_path), release=False)
    assert extras == {"test": ["pytest>=8"]}


def test_a_checkout_names_its_own_folders_by_absolute_uri(
    hook: ModuleType, tmp_path: Path
) -> None:
    root = checkout(tmp_path / "a folder", "cpu")
    extras = hook.make_extras(CONFIG, root, release=False)
    uri = f"file://{tmp_path.resolve()}/a%20folder/backends/cpu"
    assert extras["cpu"] == [f"anyflex-cpu[jit] @ {uri}"]
    assert extras["all"] == extras["cpu"]


def test_an_extra_of_two_packages_waits_for_both_folders(hook: ModuleType, tmp_path: Path) -> None:
    extras = hook.make_extras(CONFIG, checkout(tmp_path / "one", "cuda"), release=False)
    assert "cuda" not in extras and "rocm" not in extras
    root = checkout(tmp_path / "two", "cuda", "triton")
    extras = hook.make_extras(CONFIG, root, release=False)
    assert [line.split(" @ ")[0] for line in extras["cuda"]] == ["anyflex-cuda", "anyflex-triton"]
    assert all(" @ file://" in line for line in extras["cuda"] + extras["rocm"])
    assert "all" not in extras


def test_a_union_holds_each_requirement_once(hook: ModuleType, tmp_path: Path) -> None:
    config = {**CONFIG, "unions": {"all": ["cuda", "rocm", "cpu", "mps"]}}
    extras = hook.make_extras(config, checkout(tmp_path, "cuda", "triton", "mps"), release=True)
    index = ">=0.1,<0.2"
    assert extras["all"] == [f"anyflex-{name}{index}" for name in ("cuda", "triton", "mps")]


def test_a_release_names_versions_and_no_folder(hook: ModuleType, tmp_path: Path) -> None:
    root = checkout(tmp_path, "cpu", "mps")
    extras = hook.make_extras(CONFIG, root, release=True)
    assert extras["all"] == ["anyflex-cpu[jit]>=0.1,<0.2", "anyflex-mps>=0.1,<0.2"]
    assert not any("@" in line for lines in extras.values() for line in lines)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads TOML")
@pytest.mark.parametrize("release", [True, False])
def test_the_extra_all_of_this_checkout_brings_llvmlite_and_what_needs_no_gpu_package(
    hook: ModuleType, release: bool
) -> None:
    import tomllib

    ours = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config = ours["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    extras = hook.make_extras(config, ROOT, release=release)
    (cpu,), (mps,) = extras["cpu"], extras["mps"]
    assert extras["all"] == [cpu, mps]
    assert cpu.startswith("anyflex-cpu[jit]") and mps.startswith("anyflex-mps")
    assert ("file://" in cpu) is ("file://" in mps) is not release
    backend = tomllib.loads((ROOT / "backends/cpu/pyproject.toml").read_text(encoding="utf-8"))
    assert backend["project"]["optional-dependencies"]["jit"] == ["llvmlite>=0.45"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads TOML")
@pytest.mark.parametrize("release", [True, False])
def test_the_extras_of_triton_devices_bring_no_triton(hook: ModuleType, release: bool) -> None:
    import tomllib

    def project(folder: str) -> Any:
        return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))

    config = project(".")["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    extras = hook.make_extras(config, ROOT, release=release)
    mark = ">=" if release else " @ file://"
    names = {
        extra: [line.partition(mark)[0] for line in extras[extra]]
        for extra in ("rocm", "xpu", "xpu-ipex")
    }
    assert names == {
        "rocm": ["anyflex-triton"],
        "xpu": ["anyflex-xpu", "anyflex-triton"],
        "xpu-ipex": ["anyflex-xpu[ipex]", "anyflex-triton"],
    }
    for folder in ("backends/triton", "backends/xpu"):
        facts = project(folder)["project"]
        optional = facts["optional-dependencies"]
        # Three flavours install into one folder; torch has brought the right one.
        wanted = [facts["dependencies"], *optional.values()]
        names_of = [line.partition(">")[0] for lines in wanted for line in lines]
        assert "anyflex" in names_of and "triton" not in names_of
    assert optional["ipex"] == ["intel-extension-for-pytorch>=2.8,<2.9"]


def test_a_package_without_a_folder_in_the_table_is_refused(
    hook: ModuleType, tmp_path: Path
) -> None:
    config = {**CONFIG, "backends": {"npu": ["anyflex-npu"]}}
    with pytest.raises(ValueError, match=r"extra 'npu' names \['anyflex-npu'\]"):
        hook.make_extras(config, tmp_path, release=False)
    with pytest.raises(ValueError, match=r"union 'all' names \['tpu'\]"):
        hook.make_extras({**CONFIG, "unions": {"all": ["tpu"]}}, tmp_path, release=False)
