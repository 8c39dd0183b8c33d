"""A wheel folder, two pips and copies of the checkout for the packaging tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.soak import SOAK

ROOT = Path(__file__).resolve().parents[2]
OLD_PIP = "23.2.1"
CURRENT_PIP = "26.3"
PIPS = [OLD_PIP, CURRENT_PIP] if SOAK else [CURRENT_PIP]
"""Versions of pip that install each distribution."""
# Requirements of `anyflex[test]` that these tests don't run: empty wheels stand in for them.
STUBS = {"torch": "2.13.0", "pytest": "9.0", "hypothesis": "6.170", "numpy": "2.2"}


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels: hatchling with what it needs, two pips, and stubs of third parties."""
    folder = tmp_path_factory.mktemp("house")
    hatchling = f"hatchling=={version('hatchling')}"
    download(folder, hatchling, "editables~=0.3", "pluggy", "scikit-build-core")
    # hatchling needs it on Python 3.10.
    download(folder, "tomli", "--no-deps", "--only-binary=:all:", "--python-version", "3.10")
    for each in (OLD_PIP, CURRENT_PIP):
        download(folder, f"pip=={each}", "--no-deps")
    for name, number in STUBS.items():
        write_stub_wheel(folder, name, number)
    return folder


def download(folder: Path, *arguments: str) -> None:
    line = [sys.executable, "-m", "pip", "download", "-qq", "-d", str(folder), *arguments]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        message = f"needs a package index for {arguments[0]}: {done.stderr}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def write_stub_wheel(folder: Path, name: str, number: str) -> None:
    info = f"{name}-{number}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{number}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            f"{info}/RECORD",
            f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
        )


@pytest.fixture(scope="session")
def pips(house: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Version -> unpacked pip, run as `python FOLDER`."""
    folders = {}
    for number in (OLD_PIP, CURRENT_PIP):
        folder = tmp_path_factory.mktemp(f"pip-{number}")
        with zipfile.ZipFile(house / f"pip-{number}-py3-none-any.whl") as wheel:
            wheel.extractall(folder)
        folders[number] = folder / "pip"
    return folders


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a checkout installs from, in a folder with a space in its name."""
    return copy_checkout(tmp_path / "a check out")


def copy_checkout(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("core", "plugins/example"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def checkout_with_backends(checkout: Path) -> Path:
    """A copy of the checkout with made-up backends `cpu` and `mps`."""
    for name in ("cpu", "mps"):
        folder = checkout / "backends" / name
        # A real folder of that name gives way to the made-up one.
        shutil.rmtree(folder, ignore_errors=True)
        package = folder / "src" / f"anyflex_{name}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("", encoding="utf-8")
        (folder / "pyproject.toml").write_text(MADE_UP_BACKEND.format(name=name), encoding="utf-8")
    return checkout


MADE_UP_BACKEND = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "anyflex-{name}"
version = "0.1.0"
dependencies = ["anyflex>=0.1,<0.2"]
[project.optional-dependencies]
jit = ["numpy"]
[project.entry-points."anyflex.backends.v1"]
{name} = "anyflex_{name}:MadeUpBackend"
[tool.hatch.build.targets.wheel]
packages = ["src/anyflex_{name}"]
"""
