"""anyflex-cpu from its sdist: with a compiler and CMake alone, with a compiler that doesn't know
every level, and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.packaging.conftest import CURRENT_PIP, ROOT
from tests.packaging.interpreters import Environment, make_environment
from tests.soak import only_in_soak

pytestmark = pytest.mark.packaging

BACKEND = ROOT / "backends" / "cpu"
COMPILER = shutil.which("g++")
HAS_AVX2 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
# Programs that gcc starts, and that CMake does.
TOOLS = "cmake make ninja gcc g++ cc c++ as ld ar ranlib nm objcopy strip uname sh".split()
LEFT_OUT = "from anyflex_cpu import library; print(library.load().left_out())"
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
    """Copy the files that git holds, or would: neither a build nor a library."""
    ignore = shutil.ignore_patterns("__pycache__", "build", "*.so", ".pytest_cache")
    shutil.copytree(BACKEND, folder, ignore=ignore)
    return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("scikit_build_core") is None and not os.environ.get("CI"):
        pytest.skip("scikit-build-core isn't installed: `make setup` does it")
    source = copy_backend(tmp_path_factory.mktemp("sdist") / "cpu")
    program = "from scikit_build_core.build import build_sdist; build_sdist('dist')"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True)
    (archive,) = source.glob("dist/*.tar.gz")
    return archive


def copy_tools(folder: Path, *tools: str) -> Path:
    """Make a folder for PATH that has these programs alone."""
    folder.mkdir()
    for tool in tools:
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    return folder


def without_flag(folder: Path, flag: str) -> Path:
    """Put a compiler in the folder that doesn't know this flag, as an older one doesn't."""
    for name in ("g++", "c++"):
        compiler = folder / name
        compiler.unlink(missing_ok=True)
        compiler.write_text(OLDER_COMPILER.format(flag=flag, compiler=COMPILER), encoding="utf-8")
        compiler.chmod(0o755)
    return folder


OLDER_COMPILER = """#!/bin/sh
for argument; do
  if [ "$argument" = {flag} ]; then
    echo "unrecognized command-line option $argument" >&2
    exit 1
  fi
done
# Slow kernels will do, and take a fraction of the time to compile.
exec "{compiler}" "$@" -O0
"""


def with_tools(environment: Environment, tools: Path) -> Environment:
    """The same environment, in which pip finds the programs of this folder alone."""
    return replace(environment, variables={"PATH": str(tools), "CC": "", "CXX": ""})


def wheel_facts(folder: Path) -> tuple[Path, list[str], str]:
    (wheel,) = folder.glob("anyflex_cpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (text,) = [each for each in names if each.endswith(".dist-info/WHEEL")]
        return wheel, names, archive.read(text).decode()


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf, of binutils")
@only_in_soak(
    "`make setup` compiles the library; the sdist is built and installed without it here"
)
def test_a_wheel_builds_with_gcc_and_cmake_alone_and_computes(
    checkout: Path, pips: dict[str, Path], house: Path, sdist: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    folder = tmp_path / "wheels"
    tools = copy_tools(tmp_path / "tools", *TOOLS)
    with_tools(environment, tools).wheel(str(sdist), str(folder), cwd=tmp_path)
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
    left_out = environment.evaluate(LEFT_OUT, PYTHONPATH=real_packages(tmp_path))
    assert left_out.strip() == "()"
    doctor = environment.evaluate(DOCTOR, PYTHONPATH=real_packages(tmp_path))
    assert "kernels of: native library of ABI" in doctor and "All checks passed." in doctor
    library = next((tmp_path / "venv").glob("lib/python*/site-packages/anyflex_cpu/*.so"))
    needed = libraries(library)
    assert needed
    assert not [name for name in needed if "gomp" in name or "torch" in name or "python" in name]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.skipif(not HAS_AVX2, reason="needs a processor with AVX2")
@only_in_soak("it builds the library a second time")
def test_levels_that_the_compiler_does_not_know_are_left_out_and_it_says_so(
    checkout: Path, pips: dict[str, Path], house: Path, sdist: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    folder = tmp_path / "wheels"
    # Every level but portable needs this flag: there is little to build.
    tools = without_flag(copy_tools(tmp_path / "tools", *TOOLS), "-mavx2")
    with_tools(environment, tools).wheel(str(sdist), str(folder), cwd=tmp_path)
    wheel, names, _ = wheel_facts(folder)
    assert "anyflex_cpu/libanyflex_cpu.so" in names
    environment.install("--no-deps", str(checkout), str(wheel), cwd=tmp_path)
    real = {"PYTHONPATH": real_packages(tmp_path)}
    assert float(environment.evaluate(ANSWER, **real).splitlines()[1]) == pytest.approx(16.0)
    doctor = environment.evaluate(DOCTOR, **real)
    assert "level portable" in doctor and "All checks passed." in doctor
    assert "avx2, which this processor can run and the compiler didn't know" in doctor
    refused = environment.evaluate(ANSWER, ANYFLEX_CPU_ISA="avx2", **real)
    assert (
        "'avx2' is an instruction-set level that the native library was built without" in refused
    )
    assert "there are: portable; install a newer compiler" in refused


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.skipif(not HAS_AVX2, reason="needs a processor with AVX2")
@only_in_soak("CMake tries the flags of every level")
def test_a_level_is_left_out_for_its_own_flags_alone(tmp_path: Path) -> None:
    tools = without_flag(copy_tools(tmp_path / "tools", *TOOLS), "-mamx-tile")
    line = ["cmake", "-S", str(BACKEND / "native"), "-B", str(tmp_path / "build")]
    done = subprocess.run(
        line, env={"PATH": str(tools)}, capture_output=True, text=True, check=True
    )
    assert "can't build level amx_bf16: it is left out" in done.stderr
    assert "can't build level avx512:" not in done.stderr


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_without_a_compiler_it_installs_and_says_what_is_missing(
    checkout: Path, pips: dict[str, Path], house: Path, sdist: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    folder = tmp_path / "wheels"
    tools = copy_tools(tmp_path / "tools", "cmake", "make", "ninja", "uname", "sh")
    with_tools(environment, tools).wheel(str(sdist), str(folder), cwd=tmp_path)
    wheel, names, _ = wheel_facts(folder)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith(".so")]
    environment.install("--no-deps", str(checkout), str(wheel), cwd=tmp_path)
    real = {"PYTHONPATH": real_packages(tmp_path), "ANYFLEX_CACHE_DIR": str(tmp_path / "cache")}
    printed, doctor = environment.evaluate(f"{ANSWER}print('====')\n{DOCTOR}", **real).split(
        "====\n"
    )
    assert "installed without its native library: there was no C++ compiler" in printed
    assert "install gcc (or clang) and anyflex-cpu again" in printed
    assert len([each for each in doctor.splitlines() if "native library" in each]) == 1
    assert "All checks passed; on cpu the reference computes, see cpu." in doctor
    assert "self-test on cpu" in doctor


def test_the_sdist_holds_the_sources_and_nothing_built(sdist: Path) -> None:
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
    """Names of the libraries that a shared library asks the loader for."""
    command = ["readelf", "-d", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in printed.stdout.splitlines() if "NEEDED" in line]
