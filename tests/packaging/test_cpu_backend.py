"""The wheel of anyflex-cpu: built with a compiler and CMake alone, and without a compiler."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.packaging.conftest import CURRENT_PIP, ROOT
from tests.packaging.interpreters import Environment, make_environment

pytestmark = pytest.mark.packaging

BACKEND = ROOT / "backends" / "cpu"
COMPILER = shutil.which("g++")
# What gcc starts, and what CMake does.
TOOLS = "cmake make ninja gcc g++ cc c++ as ld ar ranlib nm objcopy strip uname sh".split()
DOCTOR = "from anyflex.cli.main import main; raise SystemExit(main(['doctor']))"
ANSWER = """
import torch, anyflex, anyflex_cpu
from anyflex.plugin import BackendRefused
print(anyflex_cpu.__file__)
q = k = torch.randn(1, 1, 4, 4)
try:
    print(anyflex.flex_attention(q, k, torch.ones(1, 1, 4, 4), backend="cpu").sum().item())
except BackendRefused as refusal:
    print(refusal)
"""


def copy_backend(folder: Path) -> Path:
    """Copy what git holds, or would: neither a build nor a library."""
    ignore = shutil.ignore_patterns("__pycache__", "build", "*.so", ".pytest_cache")
    shutil.copytree(BACKEND, folder, ignore=ignore)
    return folder


def with_tools(environment: Environment, folder: Path, *tools: str) -> Environment:
    """The same environment, in which these programs are all that pip finds on its path."""
    folder.mkdir()
    for tool in tools:
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    return replace(environment, variables={"PATH": str(folder), "CC": "", "CXX": ""})


def wheel_facts(folder: Path) -> tuple[Path, list[str], str]:
    (wheel,) = folder.glob("anyflex_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (text,) = [each for each in names if each.endswith(".dist-info/WHEEL")]
        return wheel, names, archive.read(text).decode()


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_a_wheel_builds_with_gcc_and_cmake_alone_and_computes(
    checkout: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    folder = tmp_path / "wheels"
    source = copy_backend(tmp_path / "cpu")
    builder = with_tools(environment, tmp_path / "tools", *TOOLS)
    builder.wheel(str(source), str(folder), cwd=tmp_path)
    wheel, names, text = wheel_facts(folder)
    # One for every Python, for this platform.
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert "Root-Is-Purelib: false" in text
    assert "anyflex_cpu/libanyflex_cpu.so" in names
    assert not [name for name in names if name.endswith((".cpp", ".h", ".o"))]
    environment.install("--find-links", str(folder), "--no-deps", str(checkout), cwd=tmp_path)
    environment.install("--no-deps", str(wheel), cwd=tmp_path)
    # The torch of this folder is a stub; the real one comes from the running environment.
    printed = environment.evaluate(ANSWER, PYTHONPATH=real_packages(tmp_path))
    origin, total = printed.splitlines()
    assert Path(origin).is_relative_to(tmp_path / "venv")
    assert float(total) == pytest.approx(16.0)
    doctor = environment.evaluate(DOCTOR, PYTHONPATH=real_packages(tmp_path))
    assert "kernels of: native library of ABI" in doctor and "All checks passed." in doctor
    library = next((tmp_path / "venv").glob("lib/python*/site-packages/anyflex_cpu/*.so"))
    needed = libraries(library)
    assert not [name for name in needed if "gomp" in name or "torch" in name or "python" in name]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_without_a_compiler_it_installs_and_says_what_is_missing(
    checkout: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    folder = tmp_path / "wheels"
    source = copy_backend(tmp_path / "cpu")
    builder = with_tools(environment, tmp_path / "tools", "cmake", "make", "ninja", "uname", "sh")
    builder.wheel(str(source), str(folder), cwd=tmp_path)
    wheel, names, _ = wheel_facts(folder)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith(".so")]
    environment.install("--no-deps", str(checkout), str(wheel), cwd=tmp_path)
    real = {"PYTHONPATH": real_packages(tmp_path), "ANYFLEX_CACHE_DIR": str(tmp_path / "cache")}
    printed = environment.evaluate(ANSWER, **real)
    assert "installed without its native library" in printed
    assert "install gcc (or clang) and anyflex-cpu again" in printed
    doctor = environment.evaluate(DOCTOR, **real)
    assert len([each for each in doctor.splitlines() if "native library" in each]) == 1
    assert "All checks passed." in doctor and "self-test on cpu" in doctor
    assert "the reference computes" in doctor


def test_the_sdist_holds_the_sources_and_nothing_built(
    pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    environment.install("scikit-build-core", cwd=tmp_path)
    source = copy_backend(tmp_path / "cpu")
    program = "from scikit_build_core.build import build_sdist; build_sdist('dist')"
    subprocess.run([environment.python, "-c", program], cwd=source, check=True)
    (sdist,) = source.glob("dist/*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"native/CMakeLists.txt", "native/include/anyflex_cpu.h", "LICENSE"} <= names
    assert "src/anyflex_cpu/backend.py" in names
    assert not [name for name in names if name.endswith((".so", ".o")) or "build/" in name]


def real_packages(folder: Path) -> str:
    """A folder for PYTHONPATH with the running environment's torch, and no anyflex of its."""
    real = folder / "real"
    if not real.is_dir():
        real.mkdir()
        # torch may be that of another environment, which this one reuses.
        paths = [Path(sysconfig.get_path("purelib")), Path(torch.__file__).parents[1]]
        for path in dict.fromkeys(paths):
            for each in path.iterdir():
                if not each.name.lower().startswith(("anyflex", "_anyflex", "__editable__")):
                    target = real / each.name
                    if not target.exists() and each.suffix != ".pth":
                        target.symlink_to(each)
    return str(real)


def libraries(path: Path) -> list[str]:
    """What a shared library asks the loader for."""
    tool = shutil.which("readelf")
    if tool is None:
        return []
    printed = subprocess.run([tool, "-d", str(path)], capture_output=True, text=True, check=True)
    return [line for line in printed.stdout.splitlines() if "NEEDED" in line]
