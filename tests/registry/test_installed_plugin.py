"""Plugin packages installed by pip: found, selected, forced, refused, and broken in nine ways.

All are installed into one folder, so that broken ones must leave the good one working.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from tests.registry.packages import HEADER

__all__: list[str] = []

GOOD = HEADER + "class Mine(Good):\n    priority = 50\n"

# distribution -> (group, entry-point name, source of its module)
PLUGINS = {
    "good-plugin": ("anyflex.backends.v1", "cpu.good", GOOD),
    "import-error": (
        "anyflex.backends.v1",
        "cpu.imports",
        "import a_module_that_nobody_has\n",
    ),
    "system-exit": ("anyflex.backends.v1", "cpu.exits", "raise SystemExit('driver too old')\n"),
    "wrong-hook": (
        "anyflex.hooks.v1",
        "listener",
        "from anyflex.plugin import hookimpl\n"
        "@hookimpl\n"
        "def anyflex_launched(spec, backend, kernel_name):\n"
        "    pass\n",
    ),
    "other-contract": ("anyflex.backends.v2", "cpu.newer", "raise AssertionError('imported')\n"),
    "twin-one": ("anyflex.backends.v1", "cpu.twin", GOOD),
    "twin-two": ("anyflex.backends.v1", "cpu.twin", GOOD),
    "probe-raises": (
        "anyflex.backends.v1",
        "cpu.probe",
        HEADER + "class Mine(Good):\n    def probe(self):\n        raise OSError('no driver')\n",
    ),
    "supports-raises": (
        "anyflex.backends.v1",
        "cpu.supports",
        HEADER + "class Mine(Good):\n    priority = 90\n"
        "    def supports(self, spec):\n        raise KeyError('sm_90')\n",
    ),
    "compile-raises": (
        "anyflex.backends.v1",
        "cpu.compile",
        HEADER + "class Mine(Good):\n    priority = 80\n"
        "    def compile(self, spec, artifacts):\n        raise RuntimeError('ptxas failed')\n",
    ),
    "kernel-raises": (
        "anyflex.backends.v1",
        "cpu.kernel",
        HEADER + "class Raising(Kernel):\n"
        "    def forward(self, call, out):\n        raise RuntimeError('illegal address')\n"
        "class Mine(Good):\n    priority = 10\n"
        "    def compile(self, spec, artifacts):\n        return Raising()\n",
    ),
}

SCRIPT = """
import json, logging, sys, warnings
import torch
import anyflex
from anyflex.registry.doctor_report import backend_rows, hook_rows

torch.set_num_threads(1)
assert "good_plugin_module" not in sys.modules, "a plugin was imported"
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("anyflex").addHandler(handler)

def call(backend=None, head_dim=16, **more):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, head_dim) for _ in range(3))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = anyflex.flex_attention(q, k, v, backend=backend, **more)
    except anyflex.AnyflexError as error:
        cause = repr(error.__cause__) if error.__cause__ else None
        return {"error": type(error).__name__, "message": str(error), "cause": cause,
                "distribution": getattr(error, "distribution", None)}
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return {"sevens": bool((out == 7).all()), "right": torch.allclose(out, right, atol=1e-5),
            "warnings": [str(item.message) for item in caught]}

results = {"automatic": call(), "automatic again": call(), "wide": call(head_dim=96),
           "wide forced": call("cpu.good", head_dim=96), "reference": call("reference")}
for name in ("good", "imports", "exits", "newer", "twin", "probe", "supports", "compile",
             "kernel"):
    results[name] = call(f"cpu.{name}")
results["good at the end"] = call("cpu.good", kernel_options={"BLOCK_M": 16})
results["log"] = lines
results["rows"] = {f"{r.name} {r.distribution}": r.state for r in backend_rows()}
results["hooks"] = {r.name: r.reason for r in hook_rows()}
print(json.dumps(results))
"""


def write_wheel(
    folder: pathlib.Path, distribution: str, group: str, name: str, source: str
) -> str:
    """Write a wheel by hand, so that nothing is fetched or built; return its path."""
    module = distribution.replace("-", "_") + "_module"
    info = f"{distribution.replace('-', '_')}-1.2.dist-info"
    files = {
        f"{module}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{group}]\n{name} = {module}"
        + ("" if "hooks" in group else ":Mine")
        + "\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    wheel = folder / f"{distribution.replace('-', '_')}-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return str(wheel)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("wheels")
    target = tmp_path_factory.mktemp("target")
    wheels = [write_wheel(folder, name, *facts) for name, facts in PLUGINS.items()]
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *wheels],
        check=True,
    )
    core = pathlib.Path(__file__).parents[2] / "core"
    environment = {n: v for n, v in os.environ.items() if not n.startswith("ANYFLEX_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(target), str(core)))
    environment["ANYFLEX_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    # It would take the calls that the plugins refuse.
    environment["ANYFLEX_DISABLE"] = "cpu"
    script = folder / "script.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_it_is_found(results: Any) -> None:
    assert results["rows"]["cpu.good good-plugin"] == "usable"
    assert results["rows"]["reference anyflex"] == "usable"


def test_it_is_selected_by_itself_though_nine_others_are_broken(results: Any) -> None:
    assert results["automatic"]["sevens"]
    assert results["automatic again"] == {"sevens": True, "right": False, "warnings": []}


def test_it_is_forced(results: Any) -> None:
    assert results["good"]["sevens"] and results["good"]["warnings"] == []
    assert results["good at the end"]["sevens"]


def test_it_refuses_with_its_reason_and_the_reference_takes_over(results: Any) -> None:
    assert results["wide"]["right"]
    assert any(
        "backend cpu.good (good-plugin 1.2) is passed over, reference computes the call: head dim "
        "E = 96 is not supported" in text
        for text in results["wide"]["warnings"]
    )
    refused = results["wide forced"]
    assert refused["error"] == "BackendRefused"
    assert "backend='cpu.good' is refused. cpu.good: head dim E = 96" in refused["message"]
    assert "These take the call: reference." in refused["message"]


@pytest.mark.parametrize(
    ("name", "error", "distribution", "message", "cause"),
    [
        (
            "imports",
            "PluginError",
            "import-error 1.2",
            "importing import_error_module raised ModuleNotFoundError: No module named "
            "'a_module_that_nobody_has'",
            "ModuleNotFoundError",
        ),
        (
            "exits",
            "PluginError",
            "system-exit 1.2",
            "importing system_exit_module raised SystemExit: driver too old",
            "SystemExit",
        ),
        (
            "newer",
            "PluginError",
            "other-contract 1.2",
            "it is written for contract 2, this is 1; upgrade anyflex",
            None,
        ),
        (
            "twin",
            "BackendConflict",
            "twin-one 1.2 and twin-two 1.2",
            "ANYFLEX_DISABLE=dist:twin-one or ANYFLEX_DISABLE=dist:twin-two",
            None,
        ),
        ("probe", "PluginError", "probe-raises 1.2", "probe() raised OSError: no driver", "OSErr"),
        (
            "supports",
            "PluginError",
            "supports-raises 1.2",
            "supports(spec) raised KeyError: 'sm_90'",
            "KeyError",
        ),
        (
            "compile",
            "PluginError",
            "compile-raises 1.2",
            "raised RuntimeError: ptxas failed",
            "RuntimeError",
        ),
        (
            "kernel",
            "PluginError",
            "kernel-raises 1.2",
            "its kernel for cpu float32 E=16 Ev=16 q short raised RuntimeError: illegal address",
            "RuntimeError",
        ),
    ],
)
def test_a_broken_one_that_is_forced_says_what_is_wrong(
    name: str, error: str, distribution: str, message: str, cause: str | None, results: Any
) -> None:
    result = results[name]
    assert (result["error"], result["distribution"]) == (error, sorted_words(distribution, result))
    assert message in result["message"]
    assert result["cause"] is None if cause is None else result["cause"].startswith(cause)


def sorted_words(distribution: str, result: Any) -> str:
    """Two distributions come in the order of the folder's listing."""
    if " and " in distribution:
        return " and ".join(
            sorted(distribution.split(" and "), key=str(result["distribution"]).index)
        )
    return distribution


def test_each_broken_one_is_logged_once(results: Any) -> None:
    log = results["log"]
    for text in (
        "plugin 'cpu.imports' of import-error 1.2 is broken",
        "plugin 'cpu.exits' of system-exit 1.2 is broken",
        "plugin 'cpu.probe' of probe-raises 1.2 is broken",
        "plugin 'cpu.supports' of supports-raises 1.2 is broken",
        "plugin 'cpu.compile' of compile-raises 1.2 is broken",
        "backend 'cpu.twin' is registered by 2 distributions",
        "plugin 'listener' of wrong-hook 1.2 is broken: Plugin 'listener' for hook "
        "'anyflex_launched'",
    ):
        assert sum(text in line for line in log) == 1, (text, log)


def test_each_is_listed_with_its_state(results: Any) -> None:
    states = {
        "cpu.imports import-error": "broken",
        "cpu.exits system-exit": "broken",
        "cpu.newer other-contract": "incompatible",
        "cpu.twin twin-one": "conflict",
        "cpu.twin twin-two": "conflict",
        "cpu.probe probe-raises": "broken",
        "cpu.supports supports-raises": "usable",
        "cpu.compile compile-raises": "usable",
        "cpu.kernel kernel-raises": "usable",
    }
    assert {name: results["rows"][name] for name in states} == states
    assert "for hook 'anyflex_launched'" in results["hooks"]["listener"]
    assert results["reference"]["right"]
