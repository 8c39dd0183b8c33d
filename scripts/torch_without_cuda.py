"""Installs a torch whose wheel is for CUDA on a machine without CUDA.

    python3 scripts/torch_without_cuda.py VENV/bin/python torch==2.15.0

The index has no CPU-only wheel of some releases, and a CUDA wheel brings 4 GB of NVIDIA's
libraries that a CPU never runs. Here the wheel is installed without them. Empty
libraries, whose functions all trap, take the places of those that torch links, but for two small
ones that run when torch is imported. torch computes on the CPU and says that CUDA is not
available. The installed metadata no longer asks for what was left out, so that pip doesn't bring
it later. Needs gcc and binutils (readelf, nm); takes half a minute and the download.

A wheel without requirements of NVIDIA's is installed unchanged.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NEEDED_AT_IMPORT = ("nvidia-cuda-runtime", "nvidia-cuda-cupti")
SYSTEM = re.compile(
    r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp)\.so|ld-linux|libc10|libtorch|libshm|libcaffe2"
)
"""Libraries that the machine or torch itself provides."""

PREFIXES = {
    "cu": "libcuda",
    "cublas": "libcublas",
    "cublasLt": "libcublasLt",
    "cuda": "libcudart",
    "__cuda": "libcudart",
    "cudnn": "libcudnn",
    "cuFile": "libcufile",
    "cufft": "libcufft",
    "cupti": "libcupti",
    "curand": "libcurand",
    "cusolver": "libcusolver",
    "cusparse": "libcusparse",
    "cusparseLt": "libcusparseLt",
    "nccl": "libnccl",
    "pnccl": "libnccl",
    "nvJitLink": "libnvJitLink",
    "nvml": "libnvidia-ml",
    "nvrtc": "libnvrtc",
    "nvshmem": "libnvshmem_host",
}
"""Beginning of a function's name -> the library that has it. The longest prefix counts."""


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def pip(python: str, *arguments: str) -> None:
    # A site-wide constraint may cap torch.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL)


def is_nvidia(requirement: str) -> bool:
    return requirement.startswith(("nvidia-", "cuda-"))


def take_requirements(packages: Path) -> list[str]:
    """Remove NVIDIA's packages from the installed torch's metadata; return the removed
    requirements."""
    (metadata,) = packages.glob("torch-*.dist-info/METADATA")
    taken, kept = [], []
    for line in metadata.read_text(encoding="utf-8").splitlines(keepends=True):
        name, _, requirement = line.partition(": ")
        if name == "Requires-Dist" and is_nvidia(requirement):
            taken.append(requirement.strip())
        else:
            kept.append(line)
    metadata.write_text("".join(kept), encoding="utf-8")
    return taken


def needed_at_import(requirements: list[str]) -> list[str]:
    """Return the requirements of the two libraries whose functions are called at import."""
    plain = [requirement.partition(";")[0].strip() for requirement in requirements]
    named = [each for each in plain if each.startswith(NEEDED_AT_IMPORT)]
    if named:
        return named
    # cuda-toolkit asks for them, in versions of the same major.
    (toolkit,) = [each for each in plain if each.startswith("cuda-toolkit")]
    major = int(toolkit.partition("==")[2].split(".")[0])
    return [f"{name}>={major},<{major + 1}" for name in NEEDED_AT_IMPORT]


def missing_functions(library: Path) -> dict[str, dict[str, set[str]]]:
    """Return the functions that torch's libraries in the folder link and no library has: file ->
    version of its functions ("" for none) -> their names."""
    needed: set[str] = set()
    functions: dict[str, set[str]] = defaultdict(set)
    for path in library.glob("*.so*"):
        if path.is_symlink():
            continue
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+?)\]", output("readelf", "-d", path)))
        listed = output("nm", "-D", "--undefined-only", "--with-symbol-versions", path)
        for line in listed.splitlines():
            name, _, version = line.split()[-1].partition("@")
            functions[version.lstrip("@")].add(name)
    present = output("ldconfig", "-p")
    present += " ".join(path.name for path in library.parents[1].glob("nvidia/**/*.so*"))
    missing = {}
    for name in needed:
        if SYSTEM.match(name) or (library / name).exists() or name in present:
            continue
        stem = name.split(".so")[0]
        missing[name] = {
            version: mine
            for version, every in functions.items()
            if (mine := {f for f in every if version.startswith(f"{stem}.") or owner(f) == stem})
        }
    return missing


def owner(function: str) -> str | None:
    prefixes = [prefix for prefix in PREFIXES if function.startswith(prefix)]
    return PREFIXES[max(prefixes, key=len)] if prefixes else None


def put_empty_library(file: Path, functions: dict[str, set[str]]) -> None:
    """Compile a library whose functions trap."""
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "empty.c"), Path(folder, "empty.map")
        names = sorted(set().union(*functions.values()))
        bodies = [f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names]
        source.write_text("int stands_in;\n" + "".join(bodies), encoding="utf-8")
        versions = [
            f"{version} {{ global: {'; '.join(sorted(some))}; }};\n"
            for version, some in functions.items()
            if version
        ]
        script.write_text("".join(versions), encoding="utf-8")
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{file.name}", "-o", str(file)]
        if versions:
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, str(source)], check=True)


def main(python: str, *requirement: str) -> None:
    pip(python, "--no-deps", *requirement)
    find = "import sysconfig; print(sysconfig.get_path('platlib'))"
    packages = Path(output(python, "-c", find).strip())
    taken = take_requirements(packages)
    if taken:
        pip(python, "--no-deps", *needed_at_import(taken))
        library = packages / "torch" / "lib"
        for name, functions in missing_functions(library).items():
            put_empty_library(library / name, functions)
    # Installs torch's remaining requirements.
    pip(python, *requirement)
    say = "import torch; print('torch', torch.__version__, 'CUDA:', torch.cuda.is_available())"
    subprocess.run([python, "-c", say], check=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("usage: torch_without_cuda.py PYTHON REQUIREMENT...")
    main(*sys.argv[1:])
