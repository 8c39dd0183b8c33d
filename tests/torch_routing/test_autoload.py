"""ANYFLEX_TORCH through torch's entry points, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import SOAK, only_in_soak

__all__: list[str] = []

ROOT = Path(__file__).parents[2]
TRAINS = """
import sys, torch
print("anyflex" in sys.modules, "torch.nn.attention.flex_attention" in sys.modules)
from torch.nn.attention.flex_attention import flex_attention
query = torch.ones(1, 1, 4, 8, requires_grad=True)
flex_attention(query, query, query).sum().backward()
print("trained", query.grad is not None)
loader = sys.modules[flex_attention.__module__].__loader__
print(type(loader).__name__, *sorted(vars(loader)))
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages that offers the entry point of pyproject.toml to torch."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'\[project\.entry-points\."torch\.backends"\]\n(\w+ = )"(.+)"\n', text)
    assert found is not None
    # It hides an installed anyflex, which would offer the same once more.
    information = tmp_path / "anyflex-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: anyflex\nVersion: 1\n")
    lines = ["[torch.backends]", f"{found[1]}{found[2]}"]
    (information / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def run(
    program: str, installed: Path, **variables: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process, with variables of the environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ANYFLEX_TORCH")}
    environment["PYTHONPATH"] = os.pathsep.join([str(installed), *filter(None, sys.path)])
    environment.update({name: str(value) for name, value in variables.items()})
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=installed,
    )


def test_unless_it_is_set_torch_is_untouched(installed: Path) -> None:
    done = run(TRAINS, installed)
    assert done.stdout == "False False\n"
    assert "NotImplementedError: FlexAttention does not support backward on CPU" in done.stderr


def test_set_it_waits_for_torch_s_module_and_unmodified_code_trains(installed: Path) -> None:
    done = run(TRAINS, installed, ANYFLEX_TORCH="cpu")
    wanted = ["False False", "trained True", "SourceFileLoader name path"]
    assert done.stdout.splitlines() == wanted, done.stderr


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"ANYFLEX_TORCH": "npux"}, "ArgumentError: devices: torch knows no device type 'npux'"),
        (
            {"ANYFLEX_TORCH": "1", "ANYFLEX_PLUGINS": "none"},
            "BackendRefused: reroute_torch(): no backend but the reference is usable here",
        ),
    ][: 2 if SOAK else 1],
)
def test_a_failure_is_raised_by_each_import_of_torch_s_module_and_never_by_torch(
    variables: dict[str, str], told: str, installed: Path
) -> None:
    program = """
import torch
print(torch.ones(1).item())
for _ in range(2):
    try:
        import torch.nn.attention.flex_attention
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""
    done = run(program, installed, **variables)
    first, *errors = done.stdout.splitlines()
    assert first == "1.0"
    assert len(errors) == 2 and all(told in error for error in errors), done


def test_where_torch_s_module_is_imported_first_nothing_is_raised(installed: Path) -> None:
    program = """
import os, warnings, torch, torch.nn.attention.flex_attention
import anyflex_autoload
from anyflex.registry import environment
from anyflex.torch_routing.rerouting import rerouted_devices
for devices in ("npux", "cpu"):
    os.environ["ANYFLEX_TORCH"] = devices
    environment.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        anyflex_autoload.autoload()
    print(rerouted_devices(), *[str(warning.message)[:53] for warning in caught])
"""
    done = run(program, installed)
    told = "ANYFLEX_TORCH: torch is not re-routed: ArgumentError("
    assert done.stdout == f"() {told}\n('cpu',)\n", done.stderr


@pytest.mark.parametrize(
    ("variables", "devices", "problem"),
    [
        ({"ANYFLEX_TORCH": "cpu"}, ["cpu"], "None"),
        ({"ANYFLEX_TORCH": ","}, [], "without a device type"),
        (
            {"ANYFLEX_TORCH": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            [],
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        ),
    ][: 3 if SOAK else 1],
)
def test_doctor_tells_whether_it_is_on(
    variables: dict[str, str], devices: list[str], problem: str, installed: Path
) -> None:
    program = """
from anyflex.cli import doctor, doctor_facts
facts = doctor_facts._torch_routing()
print(facts["devices"], doctor._torch_routing(facts), facts["problem"], sep="|")
"""
    done = run(program, installed, **variables)
    found, text, told = done.stdout.strip().split("|")
    assert found == str(devices), done.stderr
    assert text == str([f"goes to anyflex on: {devices[0]}" if devices else "is torch's own"])
    assert problem in told


@only_in_soak("torch compiles its C++ kernel; graphs are compared in test_switch")
def test_no_warm_cache_of_inductor_confuses_the_two(installed: Path, tmp_path: Path) -> None:
    program = """
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention
inputs = torch.linspace(-1, 1, 3 * 2048).reshape(3, 1, 1, 128, 16).unbind(0)
call = torch.compile(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s * 2))
call(*inputs)
with torch.profiler.profile() as profile:
    call(*inputs)
names = {event.key for event in profile.key_averages()}
print("anyflex::flex_attention" in names, counters["inductor"]["fxgraph_cache_hit"])
"""
    cache = tmp_path / "inductor"
    found = [
        run(program, installed, TORCHINDUCTOR_CACHE_DIR=cache, ANYFLEX_TORCH=value).stdout.split()
        for value in ("0", "cpu", "0", "cpu")
    ]
    # In the second process nothing is found although the first has filled the cache.
    assert found == [["False", "0"], ["True", "0"], ["False", "1"], ["True", "1"]]
