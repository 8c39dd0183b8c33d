"""Finds interpreters, and makes the virtual environments that packaging tests install in."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Environment", "find_interpreter", "make_environment"]


@dataclass(frozen=True)
class Environment:
    """A virtual environment without a pip of its own.

    Args:
        python: its interpreter.
        pip: the unpacked pip to use with it, a folder with `__main__.py`.
        house: the only place that pip may take wheels from.
        variables: environment variables for pip, instead of the running process's.
    """

    python: Path
    pip: Path
    house: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def install(self, *arguments: str, cwd: Path) -> None:
        """Run `pip install` in `cwd`."""
        self.run_pip("install", *arguments, cwd=cwd)

    def wheel(self, source: str, folder: str, *, cwd: Path, release: bool = False) -> None:
        """Build the wheel of a checkout or an sdist into `folder`, as for a release or not."""
        arguments = ["--no-deps", "--wheel-dir", folder, source]
        self.run_pip("wheel", *arguments, cwd=cwd, release=release)

    def run_pip(self, command: str, *arguments: str, cwd: Path, release: bool = False) -> None:
        """Run pip offline, with nothing of the user's configuration."""
        environment = {name: text for name, text in os.environ.items() if name[:4] != "PIP_"}
        for name in ("ANYFLEX_RELEASE", "PYTHONPATH"):
            environment.pop(name, None)
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        # Through the environment, because the pip that builds in isolation must see it too.
        environment |= self.variables
        environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.house)}
        # As pip's option `compile`: Python compiles what is imported, and pip would compile all.
        environment["PIP_NO_COMPILE"] = "0"
        if release:
            environment["ANYFLEX_RELEASE"] = "1"
        line = [str(self.python), str(self.pip), command, "--no-cache-dir", *arguments]
        done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line} in {cwd}:\n{done.stdout}\n{done.stderr}"

    def evaluate(self, program: str, **variables: str) -> str:
        """Return what the program prints, run away from any checkout."""
        environment = {
            name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")
        }
        done = subprocess.run(
            [str(self.python), "-c", program],
            cwd=self.python.parent,
            env=environment | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def make_environment(
    folder: Path, pip: Path, house: Path, interpreter: str = sys.executable
) -> Environment:
    """Make a virtual environment in `folder` (0.2 s: it gets no pip)."""
    subprocess.run([interpreter, "-m", "venv", "--without-pip", str(folder)], check=True)
    return Environment(folder / "bin" / "python", pip, house)


@functools.cache
def find_interpreter(version: str) -> str | None:
    """Return the path of a working Python of that version ("3.12"), or None."""
    for candidate in _candidates(version):
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([candidate, "-c", program], capture_output=True, text=True)
        except OSError:
            continue
        # A version manager's shim exits non-zero for a version that is not switched on.
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[str]:
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield sys.executable
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    managed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for folder in sorted(managed.glob(f"{version}.*"), reverse=True):
        yield str(folder / "bin" / "python")
