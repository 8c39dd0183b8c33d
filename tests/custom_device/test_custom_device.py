"""A device that torch's flex_attention refuses, and a plugin for it: each test of `on_pocket`.

They share a subprocess, because PrivateUse1 is renamed once in a process and for good.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from tests.registry.packages import install

__all__: list[str] = []

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
SCENARIOS = re.findall(r"^def (test_\w+)", (HERE / "on_pocket.py").read_text(), re.MULTILINE)

_registration = importlib.util.find_spec("torch.utils.backend_registration")
_source = pathlib.Path(_registration.origin or "").read_text() if _registration else ""

pytestmark = pytest.mark.skipif(
    "_setup_privateuseone_for_python_backend" not in _source,
    reason=f"torch {torch.__version__} can't register a device from Python alone",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a test -> what failed, "" where nothing did."""
    folder = tmp_path_factory.mktemp("custom_device")
    install(
        folder,
        "anyflex-pocket",
        """
        [anyflex.backends.v1]
        pocket = tests.custom_device.pocket_plugin:PocketBackend
        """,
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ANYFLEX_")}
    path = [str(folder), str(ROOT / "core"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    environment["ANYFLEX_CACHE_DIR"] = str(folder / "cache")
    result = folder / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + [str(HERE / "on_pocket.py"), f"--junitxml={result}"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.exists(), done.stdout + done.stderr
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(result).getroot().iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        problems = [problem.text or "" for problem in case if problem.tag != "properties"]
        outcomes[name] = outcomes.get(name, "") + "\n".join(problems)
    assert outcomes, done.stdout + done.stderr
    return outcomes


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_pocket(scenario: str, report: dict[str, str]) -> None:
    assert report.get(scenario, "it did not run") == ""
