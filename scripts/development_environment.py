"""Makes a make target's virtual environment: `python3 scripts/development_environment.py PART...`.

Parts: `test` and `lint` (the checks' tools), `docs`, `demo`, and `apple`, which compiles nothing.
A part is installed once and again when something that it depends on changes; otherwise this costs
a few milliseconds. anyflex itself is installed editable.

Which torch: the environment variable TORCH if set (a requirement for pip, for example
`torch==2.11.0`, a wheel's path, or `newest` for the newest of the index), else the torch of the
invoking Python if it has one that is new enough, else the one pinned in constraints-dev.txt. With
WITHOUT_CUDA=1 a torch for CUDA is made to run without (scripts/torch_without_cuda.py).

The environment's folder is `.venv`, or what the variable VENV says.

The CPU backend's library is compiled where there is a C++ compiler; where there is none the
backend installs without it, and the reference computes.

A torch that asks for a Triton of its own has brought it, and it stays: all flavours install into
the same folder. Beside a torch without one the tests get the pinned one, where it exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / os.environ.get("VENV", ".venv")
CONSTRAINTS = ROOT / "constraints-dev.txt"
WITHOUT_CUDA = ROOT / "scripts" / "torch_without_cuda.py"
CPU_BACKEND = "./backends/cpu[jit]"
# Projects of this repository too, installed in one command with their requirements.
MPS_BACKEND = "./backends/mps"
GPU_BACKENDS = ["./backends/triton", "./backends/xpu", MPS_BACKEND]
# Projects that require the index's Triton, which would overwrite the one of torch for AMD or
# Intel.
CUDA_BACKEND = "./backends/cuda"
TRITON = "triton; platform_system == 'Linux'"
TRANSFORMERS = "transformers; python_version >= '3.11'"
# Tools that build this repository's projects: pip would install it anew for each of them.
BUILD_TOOLS = ["hatchling>=1.26", "editables", "scikit-build-core>=0.11"]
TEST_TOOLS = [".[test,serving]", "pytest-xdist", TRANSFORMERS]
PARTS = {
    "test": [*TEST_TOOLS, CPU_BACKEND, *GPU_BACKENDS, CUDA_BACKEND, TRITON],
    "lint": [".", "ruff", "mypy", "import-linter"],
    "docs": [".[docs]"],
    "demo": [".[demo]", CPU_BACKEND, *GPU_BACKENDS],
    "apple": [".[test]", MPS_BACKEND],
}
COMPILERS = ("c++", "g++", "clang++")
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)

# Program for the interpreter in question; it finds torch without importing it.
FACTS_PROGRAM = """
import json, re, sys, sysconfig
from importlib.util import find_spec
try:
    from importlib.metadata import requires, version
    torch = version("torch") if find_spec("torch") else None
    asks = [line for line in requires("torch") or [] if "extra ==" not in line] if torch else []
    names = [re.match("[A-Za-z0-9_.-]+", line)[0].lower() for line in asks]
    brings_triton = next((name for name in names if "triton" in name), None)
except Exception:
    torch, brings_triton = None, None
print(json.dumps({"prefix": sys.prefix, "venv": sys.prefix != sys.base_prefix, "torch": torch,
                  "brings_triton": brings_triton,
                  "base": getattr(sys, "_base_executable", sys.executable),
                  "version": sys.version_info[:3], "packages": sysconfig.get_path("purelib"),
                  "platform_packages": sysconfig.get_path("platlib")}))
"""


def interpreter_facts(python: str) -> dict:
    printed = subprocess.run(
        [python, "-c", FACTS_PROGRAM], check=True, stdout=subprocess.PIPE, cwd=str(ROOT.parent)
    ).stdout
    return json.loads(printed)


def new_enough(torch_version: str) -> bool:
    return tuple(int(part) for part in torch_version.split(".")[:2]) >= OLDEST_TORCH


def choose_torch(facts: dict) -> tuple[str, list[str], bool]:
    """Return (words for the user, pip's arguments, whether the invoking Python's is reused)."""
    asked = os.environ.get("TORCH", "").strip()
    if asked == "newest":
        asked = f"torch=={newest_torch()}"
    if asked:
        return asked, shlex.split(asked), False
    if facts["torch"] is not None and new_enough(facts["torch"]):
        return f"torch {facts['torch']} of {facts['prefix']}", [f"torch=={facts['torch']}"], True
    pinned = next(line for line in constraint_lines() if line.startswith("torch=="))
    return pinned, [pinned], False


def newest_torch() -> str:
    """Return the version of the index's newest torch, whatever a site-wide constraint allows."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--quiet", "--report", "-", "torch"]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    report = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False)
    if report.returncode != 0:
        raise SystemExit("error: TORCH=newest asks pip for the newest torch, which failed")
    return str(json.loads(report.stdout)["install"][0]["metadata"]["version"])


def constraint_lines() -> list[str]:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def constraints_beside(installed: dict) -> list[str]:
    """Return the pins for an environment with that torch, and with the triton that it brought."""
    replaced = ("torch==", "triton==") if installed["brings_triton"] else ("torch==",)
    lines = [line for line in constraint_lines() if not line.startswith(replaced)]
    return [*lines, f"torch=={installed['torch']}"]


def create_venv(facts: dict, reuse: bool) -> None:
    command = [facts["base"] if facts["venv"] else sys.executable, "-m", "venv", "--clear"]
    if reuse:
        command.append("--system-site-packages")
    if subprocess.run([*command, str(VENV)], check=False).returncode != 0:
        raise SystemExit(
            "error: `python3 -m venv` failed. On Debian and Ubuntu it needs the package "
            "python3-venv; another interpreter is chosen by PYTHON=..."
        )
    if reuse and facts["venv"]:
        # --system-site-packages shows the base installation only, and the torch to reuse lives
        # in a virtual environment of its own.
        ours = interpreter_facts(str(venv_python()))["packages"]
        seen = dict.fromkeys([facts["packages"], facts["platform_packages"]])
        Path(ours, "reused_torch.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")


def venv_python() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def start_pip(*arguments: str) -> subprocess.Popen:
    command = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check"]
    # Python compiles what is imported; all of torch's and transformers' files take pip longer.
    command += ["--no-compile", *arguments]
    environment = dict(os.environ)
    if environment.get("TORCH"):
        # A site-wide constraint may cap torch below the one that was asked for.
        environment["PIP_CONSTRAINT"] = os.devnull
    if any(map(shutil.which, COMPILERS)):
        # Makes a library that doesn't compile an error, not a reason to leave it out.
        environment["ANYFLEX_CPU_REQUIRE_LIBRARY"] = "1"
        environment["AF_THIS_PROCESSOR"] = "1"
    # A quiet pip can't ask for a password.
    stdin = subprocess.DEVNULL if "-qq" in arguments else None
    return subprocess.Popen(command, stdin=stdin, cwd=str(ROOT), env=environment)


def pip(*arguments: str) -> None:
    # pip prints the reason for conflicting requirements only where it is not quiet.
    if start_pip("-qq", *arguments).wait() != 0 and start_pip(*arguments).wait() != 0:
        raise SystemExit(f"error: pip install {shlex.join(arguments)} failed (see above)")


def digest(*facts: object) -> str:
    names = ["pyproject.toml", "hatch_build.py", "constraints-dev.txt"]
    files = [ROOT / name for name in names]
    cpu = ROOT / "backends" / "cpu"
    files += [cpu / "pyproject.toml", *sorted((cpu / "native").rglob("*"))]
    files += [ROOT / folder / "pyproject.toml" for folder in [*GPU_BACKENDS, CUDA_BACKEND]]
    content = b"".join(each.read_bytes() for each in files if each.is_file())
    own = Path(__file__).read_bytes()
    return hashlib.sha256(content + own + repr(facts).encode()).hexdigest()


def main(parts: list[str]) -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise SystemExit("error: Python 3.10 or newer is needed; choose one by PYTHON=...")
    if not parts or any(part not in PARTS for part in parts):
        raise SystemExit(f"usage: development_environment.py PART...; parts: {', '.join(PARTS)}")
    facts = interpreter_facts(sys.executable)
    if Path(facts["prefix"]).resolve() == VENV:
        facts = interpreter_facts(facts["base"])
    words, torch_requirement, reuse = choose_torch(facts)

    state_file = VENV / "anyflex-state.json"
    without_cuda = os.environ.get("WITHOUT_CUDA") == "1" and not reuse
    base = repr(
        (str(VENV), facts["version"], facts["base"], torch_requirement, reuse, without_cuda)
    )
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = {}
    if state.get("base") != base:
        state = {"base": base, "parts": {}}
        version = ".".join(str(number) for number in facts["version"])
        print(
            f"setting up {VENV.name}: Python {version}, {words} "
            "(once, some minutes: it compiles the CPU backend)",
            flush=True,
        )
        if VENV.exists():
            shutil.rmtree(VENV)
        create_venv(facts, reuse)
        if without_cuda:
            command = [sys.executable, str(WITHOUT_CUDA), str(venv_python()), *torch_requirement]
            if subprocess.run(command, check=False).returncode != 0:
                raise SystemExit(f"error: {WITHOUT_CUDA.name} failed (see above)")
        else:
            pip(*torch_requirement)

    wanted = digest(base)
    missing = [part for part in parts if state["parts"].get(part) != wanted]
    if missing:
        print(f"installing what {', '.join(missing)} needs", flush=True)
        # The installed torch stays, whatever constraints-dev.txt says.
        installed = interpreter_facts(str(venv_python()))
        lines = constraints_beside(installed)
        constraints = VENV / "constraints.txt"
        constraints.write_text("\n".join(lines) + "\n", encoding="utf-8")
        requirements = list(dict.fromkeys(line for part in missing for line in PARTS[part]))
        if installed["brings_triton"]:
            requirements = [line for line in requirements if line != TRITON]
            if installed["brings_triton"] != "triton":
                requirements = [line for line in requirements if line != CUDA_BACKEND]
        build = [*BUILD_TOOLS, *(name for name in ("cmake", "ninja") if not shutil.which(name))]
        pip("-c", str(constraints), *build)
        others = [line for line in requirements if line != CPU_BACKEND]
        editable = [each for line in others if line.startswith(".") for each in ("-e", line)]
        plain = [line for line in others if not line.startswith(".")]
        rest = ["-c", str(constraints), "--no-build-isolation", *editable, *plain]
        if others == requirements:
            pip(*rest)
        else:
            # Its library compiles while pip, which uses one core, gets the rest.
            alone = ["--no-build-isolation", "--no-deps", "-e", CPU_BACKEND]
            with start_pip("-qq", *alone) as library:
                pip(*rest)
            if library.returncode != 0:
                pip(*alone)
            # The package is there: pip gets what its extra requires.
            pip("-c", str(constraints), "anyflex-cpu[jit]")
        state["parts"].update(dict.fromkeys(missing, wanted))
        state_file.write_text(json.dumps(state), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
