"""Real installations from a checkout and from wheels, with an old and a current pip, offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.packaging.conftest import CURRENT_PIP, OLD_PIP, PIPS, ROOT
from tests.packaging.interpreters import find_interpreter, make_environment
from tests.soak import SOAK, only_in_soak

pytestmark = pytest.mark.packaging

EACH_PIP = pytest.mark.parametrize("pip", PIPS)
INSTALLED = """
from importlib.metadata import distributions, entry_points
print(sorted(d.metadata["Name"].lower() for d in distributions()))
print(sorted((e.name, e.value) for e in entry_points(group="anyflex.backends.v1")))
"""
HOOK = """
from importlib.metadata import entry_points
print([e.value for e in entry_points(group="torch.backends") if e.load()() is None])
"""
REFERENCE = ("reference", "anyflex.reference.backend:ReferenceBackend")


def wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(archive.read(name).decode())


def requirements(wheel: Path) -> list[str]:
    return [str(line) for line in wheel_metadata(wheel).get_all("Requires-Dist", [])]


@EACH_PIP
@pytest.mark.parametrize("spelling", ["relative", "absolute"] if SOAK else ["relative"])
def test_the_test_extra_installs_from_any_directory(
    pip: str, spelling: str, checkout: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[pip], house)
    if spelling == "relative":
        environment.install(".[test]", cwd=checkout)
    else:
        environment.install(f"{checkout}[test]", cwd=tmp_path)
    names, backends = environment.evaluate(INSTALLED).splitlines()
    for name in ("anyflex", "torch", "pluggy", "pytest", "hypothesis", "numpy"):
        assert f"'{name}'" in names
    assert backends == str([REFERENCE])
    assert environment.evaluate(HOOK).strip() == "['anyflex_autoload:autoload']"


@EACH_PIP
def test_a_backend_extra_installs_the_backend_of_this_checkout(
    pip: str, checkout_with_backends: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[pip], house)
    environment.install(f"{checkout_with_backends}[all,test]", cwd=tmp_path)
    names, backends = environment.evaluate(INSTALLED).splitlines()
    assert "'anyflex-cpu'" in names and "'anyflex-mps'" in names
    made_up = [(name, f"anyflex_{name}:MadeUpBackend") for name in ("cpu", "mps")]
    assert backends == str([*made_up, REFERENCE])


@only_in_soak("`make setup` installs them so")
def test_core_and_a_backend_install_editable_together(
    checkout_with_backends: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    environment.install("-e", ".[test]", "-e", "backends/cpu", cwd=checkout_with_backends)
    origin = environment.evaluate("import anyflex_cpu; print(anyflex_cpu.__file__)")
    assert Path(origin).is_relative_to(checkout_with_backends)
    assert environment.evaluate(HOOK).strip() == "['anyflex_autoload:autoload']"


# The oldest knows the least syntax.
@pytest.mark.parametrize("python", ["3.10", *(["3.11", "3.12", "3.13"] if SOAK else [])])
def test_the_package_builds_installs_and_compiles_on(
    python: str, checkout: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    interpreter = find_interpreter(python)
    if interpreter is None:
        pytest.skip(f"no Python {python} on this machine")
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house, interpreter)
    environment.install("--no-deps", "--no-compile", str(checkout), cwd=tmp_path)
    (package,) = (tmp_path / "venv").glob("lib/python*/site-packages/anyflex")
    # A warning here is an escape sequence or a comparison that a later Python refuses.
    subprocess.run(
        [environment.python, "-W", "error", "-m", "compileall", "-q", package], check=True
    )
    assert len(list(package.rglob("*.pyc"))) == len(list(package.rglob("*.py")))
    core = checkout / "core"
    sources = {path.relative_to(core) for path in (core / "anyflex").rglob("*.py")}
    example, template = checkout / "plugins" / "example", Path("anyflex", "templates", "plugin")
    sources |= {template / path.relative_to(example) for path in example.rglob("*.py")}
    assert {path.relative_to(package.parent) for path in package.rglob("*.py")} == sources
    assert (package / "py.typed").is_file()


def test_release_wheels_carry_no_url(
    checkout_with_backends: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    folder = str(tmp_path / "wheels")
    environment.wheel(str(checkout_with_backends), folder, cwd=tmp_path, release=True)
    (wheel,) = Path(folder).glob("anyflex-*.whl")
    lines = requirements(wheel)
    assert not [line for line in lines if "@" in line or "file:" in line]
    cpu = [line for line in lines if re.search(r"extra == .cpu.", line)]
    assert [line.split(";")[0].strip() for line in cpu] == ["anyflex-cpu[jit]<0.2,>=0.1"]
    assert set(wheel_metadata(wheel).get_all("Provides-Extra", [])) >= {"cpu", "mps", "all"}


def test_an_sdist_is_refused_while_it_would_name_a_folder(checkout_with_backends: Path) -> None:
    done = build_sdist(checkout_with_backends, release=False)
    assert done.returncode != 0
    assert "build the sdist with ANYFLEX_RELEASE=1" in done.stderr


@only_in_soak("another test builds a release wheel, of the checkout")
def test_a_wheel_made_from_a_release_sdist_keeps_the_extras_without_url(
    checkout_with_backends: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    done = build_sdist(checkout_with_backends, release=True)
    assert done.returncode == 0, done.stderr
    (sdist,) = checkout_with_backends.glob("dist/anyflex-*.tar.gz")
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    environment.wheel(str(sdist), str(tmp_path / "wheels"), cwd=tmp_path)
    (wheel,) = tmp_path.glob("wheels/anyflex-*.whl")
    assert not [line for line in requirements(wheel) if "@" in line]
    assert set(wheel_metadata(wheel).get_all("Provides-Extra", [])) >= {"cpu", "mps", "all"}


def build_sdist(checkout: Path, *, release: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist"],
        cwd=checkout,
        env=os.environ | {"ANYFLEX_RELEASE": "1" if release else "0"},
        capture_output=True,
        text=True,
    )


def test_anyflex_installs_offline_from_a_wheel_folder_and_computes(
    checkout: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[OLD_PIP], house)
    folder = tmp_path / "wheels"
    environment.wheel(str(checkout), str(folder), cwd=tmp_path, release=True)
    environment.install("--find-links", str(folder), "anyflex[test]", cwd=tmp_path)
    # The torch of this folder is a stub; the real one comes from the running environment.
    printed = environment.evaluate(FIRST_USE, PYTHONPATH=sysconfig.get_path("purelib"))
    origin, total = printed.splitlines()
    assert Path(origin).is_relative_to(tmp_path / "venv")
    assert float(total) == pytest.approx(16.0)


FIRST_USE = """
import torch
import anyflex
print(anyflex.__file__)
q = k = torch.randn(1, 1, 4, 4)
print(anyflex.flex_attention(q, k, torch.ones(1, 1, 4, 4)).sum().item())
"""


def test_the_version_is_written_the_same_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.*)"$', text, flags=re.MULTILINE)
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    import anyflex

    assert anyflex.__version__ == version
