"""Backends of GPUs, installed for real: the packages that come with them, and those that stay."""

from __future__ import annotations

import shutil
import zipfile
from ast import literal_eval
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.packaging.conftest import CURRENT_PIP, PIPS, ROOT, write_stub_wheel
from tests.packaging.interpreters import Environment, make_environment
from tests.soak import SOAK, only_in_soak

pytestmark = pytest.mark.packaging

INSTALLS = only_in_soak("it installs what test_extras.py reads, as other tests here do")
IPEX = "intel-extension-for-pytorch"
INSTALLED = """
from importlib.metadata import distributions, entry_points
print({d.metadata["Name"]: d.version for d in distributions()})
print({e.name: e.value for e in entry_points(group="anyflex.backends.v1")})
"""
BACKENDS = {
    "reference": "anyflex.reference.backend:ReferenceBackend",
    "cuda.triton": "anyflex_triton.backend:TritonBackend",
    "xpu": "anyflex_xpu.backend:XpuBackend",
}


@pytest.fixture
def checkout_of_both(checkout: Path) -> Path:
    """A copy of the checkout with these two backends."""
    for name in ("triton", "xpu"):
        copy_backend(checkout, name)
    return checkout


def copy_backend(checkout: Path, name: str) -> Path:
    """Copy a backend of this repository into a checkout; return its folder there."""
    folder, ignore = checkout / "backends" / name, shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "backends" / name, folder, ignore=ignore)
    return folder


@pytest.fixture(scope="module")
def stocked(house: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel folder with stubs of IPEX and of Triton's flavours."""
    folder = tmp_path_factory.mktemp("stocked")
    for wheel in house.glob("*"):
        shutil.copy(wheel, folder)
    for name, version in ((IPEX, "2.8.0"), ("triton", "3.6.0"), ("triton-xpu", "3.7.2")):
        write_stub_wheel(folder, name.replace("-", "_"), version)
    return folder


def installed(environment: Environment) -> tuple[dict[str, str], dict[str, str]]:
    """Name -> version of each distribution, name -> class of each backend."""
    names, backends = environment.evaluate(INSTALLED).splitlines()
    versions = {name.replace("_", "-"): number for name, number in literal_eval(names).items()}
    return versions, literal_eval(backends)


@INSTALLS
@pytest.mark.parametrize("pip", PIPS)
def test_the_extra_xpu_brings_both_packages_and_no_triton(
    pip: str, checkout_of_both: Path, pips: dict[str, Path], stocked: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[pip], stocked)
    environment.install("triton-xpu", cwd=tmp_path)
    environment.install(f"{checkout_of_both}[xpu]", cwd=tmp_path)
    versions, backends = installed(environment)
    assert backends == BACKENDS
    assert versions["triton-xpu"] == "3.7.2"
    assert "triton" not in versions and IPEX not in versions


@INSTALLS
def test_the_extra_rocm_brings_the_portable_backend_alone(
    checkout_of_both: Path, pips: dict[str, Path], stocked: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], stocked)
    environment.install(f"{checkout_of_both}[rocm]", cwd=tmp_path)
    versions, backends = installed(environment)
    assert backends == {name: value for name, value in BACKENDS.items() if name != "xpu"}
    assert "triton" not in versions and "anyflex-xpu" not in versions


@INSTALLS
def test_the_extra_cuda_brings_both_packages_and_triton(
    checkout_of_both: Path, pips: dict[str, Path], stocked: Path, tmp_path: Path
) -> None:
    copy_backend(checkout_of_both, "cuda")
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], stocked)
    environment.install(f"{checkout_of_both}[cuda]", cwd=tmp_path)
    versions, backends = installed(environment)
    wanted = {name: value for name, value in BACKENDS.items() if name != "xpu"}
    assert backends == {**wanted, "cuda": "anyflex_cuda.backend:CudaBackend"}
    assert versions["triton"] == "3.6.0" and "anyflex-xpu" not in versions


@INSTALLS
@pytest.mark.parametrize("there", [None, "2.8.10+xpu"])
def test_the_extra_xpu_ipex_keeps_an_ipex_that_is_there(
    there: str | None, checkout_of_both: Path, pips: dict[str, Path], stocked: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], stocked)
    if there is not None:
        write_stub_wheel(tmp_path, IPEX.replace("-", "_"), there)
        (wheel,) = tmp_path.glob("intel*.whl")
        environment.install(str(wheel), cwd=tmp_path)
    environment.install(f"{checkout_of_both}[xpu-ipex]", cwd=tmp_path)
    versions, backends = installed(environment)
    assert versions[IPEX] == (there or "2.8.0")
    assert backends == BACKENDS and "triton" not in versions


@INSTALLS
def test_the_packages_install_editable_beside_core(
    checkout_of_both: Path, pips: dict[str, Path], stocked: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], stocked)
    folders = [".[test]", "./backends/triton", "./backends/xpu"]
    environment.install(*(word for each in folders for word in ("-e", each)), cwd=checkout_of_both)
    assert installed(environment)[1] == BACKENDS


@INSTALLS
def test_the_extra_mps_installs_without_an_apple_gpu_and_brings_no_triton(
    checkout: Path, pips: dict[str, Path], house: Path, tmp_path: Path
) -> None:
    copy_backend(checkout, "mps")
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], house)
    environment.install(f"{checkout}[mps]", cwd=tmp_path)
    versions, backends = installed(environment)
    assert backends == {
        "reference": BACKENDS["reference"], "mps": "anyflex_mps.backend:MpsBackend"
    }  # fmt: skip
    assert not [name for name in versions if "triton" in name or "cuda" in name]


@pytest.mark.parametrize("name", ["triton", *(["xpu", "mps"] if SOAK else [])])
def test_a_wheel_has_its_types_and_licence_and_requires_no_triton(
    name: str, checkout: Path, pips: dict[str, Path], stocked: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "venv", pips[CURRENT_PIP], stocked)
    folder = copy_backend(checkout, name)
    environment.wheel(str(folder), str(tmp_path / "wheels"), cwd=tmp_path, release=True)
    (wheel,) = tmp_path.glob(f"wheels/anyflex_{name}-0.1.0-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (metadata,) = [each for each in files if each.endswith(".dist-info/METADATA")]
        fields = HeaderParser().parsestr(archive.read(metadata).decode())
    package = f"anyflex_{name}"
    sources = {f"{package}/{each.name}" for each in folder.glob(f"src/{package}/*.py")}
    assert files >= sources | {f"{package}/py.typed"}
    assert any(each.endswith("/licenses/LICENSE") for each in files)
    assert not any(each.startswith("tests") for each in files)
    lines = [str(line) for line in fields.get_all("Requires-Dist", [])]
    assert not [line for line in lines if "@" in line or line.startswith(("triton", "torch"))]
    assert [line for line in lines if line.startswith("anyflex<0.2,>=0.1")]
