"""A plugin begun with an installed anyflex, installed editable and tested, offline."""

from __future__ import annotations

import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import CURRENT_PIP, PIPS, ROOT
from tests.packaging.interpreters import make_environment
from tests.soak import only_in_soak

pytestmark = pytest.mark.packaging

EXAMPLE = ROOT / "plugins" / "example"
BEGIN = """
from anyflex.cli.main import main
arguments = ["warp", "--device", "cpu", "--variant", "warp", "--into", {folder!r}]
raise SystemExit(main(["new-plugin", *arguments]))
"""
TEST = """
import pytest, anyflex, anyflex_warp
CHOICE = "(float32 or test_mods) and not TestConformance or TestConformance and decode"
print(anyflex.__file__, anyflex_warp.__file__, sep="\\n")
arguments = ["-q", "-p", "no:cacheprovider", "-k", CHOICE, {plugin!r}]
raise SystemExit(pytest.main(arguments))
"""


@pytest.mark.parametrize("pip", PIPS)
def test_a_new_plugin_installs_editable_and_its_tests_pass(
    pip: str, checkout: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[pip], house)
    environment.install(str(checkout), cwd=tmp_path)
    # The torch and the pytest of this folder are stubs; the real ones are the running ones.
    real = {"PYTHONPATH": sysconfig.get_path("purelib"), "ANYFLEX_CACHE_DIR": str(tmp_path / "c")}
    environment.evaluate(BEGIN.format(folder=str(tmp_path)), **real)
    plugin = tmp_path / "anyflex-warp"
    environment.install("-e", ".[test]", cwd=plugin)
    printed = environment.evaluate(TEST.format(plugin=str(plugin)), **real)
    core, own = printed.splitlines()[:2]
    assert Path(core).is_relative_to(tmp_path / "venv")
    assert Path(own).is_relative_to(plugin)
    assert " passed" in printed and "failed" not in printed


@only_in_soak("test_install.py finds the template in an installed wheel")
@pytest.mark.parametrize("release", [True, False])
def test_the_wheel_holds_the_template_and_nothing_that_tools_left(
    release: bool, checkout: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    for clutter in ("dist/a.whl", "src/__pycache__/a.pyc", ".venv/a.py"):
        (checkout / "plugins" / "example" / clutter).parent.mkdir(exist_ok=True)
        (checkout / "plugins" / "example" / clutter).touch()
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    environment.wheel(str(checkout), str(tmp_path / "wheels"), cwd=tmp_path, release=release)
    (wheel,) = (tmp_path / "wheels").glob("anyflex-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("anyflex/templates/")]
    found = {name.removeprefix("anyflex/templates/plugin/") for name in names}
    wanted = {
        str(path.relative_to(EXAMPLE))
        for folder in ("src", "tests")
        for path in (EXAMPLE / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == wanted | {"pyproject.toml", "README.md"}
