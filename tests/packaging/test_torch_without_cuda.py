"""A torch for CUDA on a machine without: the omitted parts, and their stand-ins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.torch_without_cuda import (
    missing_functions,
    needed_at_import,
    owner,
    put_empty_library,
    take_requirements,
)

METADATA = """Metadata-Version: 2.4
Name: torch
Requires-Dist: sympy>=1.13.3
Requires-Dist: cuda-toolkit[cublas,cudart]==13.2.2; platform_system == "Linux"
Requires-Dist: nvidia-nccl-cu13==2.30.7; platform_system == "Linux"
Requires-Dist: triton~=3.9.0; platform_system == "Linux"

Requires-Dist: nvidia-like text of the description
"""


def test_what_nvidia_publishes_is_no_longer_required(tmp_path: Path) -> None:
    folder = tmp_path / "torch-2.15.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    taken = take_requirements(tmp_path)
    assert [line.split("=")[0] for line in taken[:2]] == [
        "cuda-toolkit[cublas,cudart]",
        "nvidia-nccl-cu13",
    ]
    left = (folder / "METADATA").read_text()
    assert "sympy" in left and "triton" in left
    assert "cuda-toolkit" not in left and "nccl" not in left
    assert take_requirements(tmp_path) == []


@pytest.mark.parametrize(
    ("requirements", "needed"),
    [
        (
            ["cuda-toolkit[cudart]==13.2.2; platform_system == 'Linux'"],
            ["nvidia-cuda-runtime>=13,<14", "nvidia-cuda-cupti>=13,<14"],
        ),
        (
            ["nvidia-cublas-cu12==12.8.4.1", "nvidia-cuda-runtime-cu12==12.8.90; os == 'Linux'"],
            ["nvidia-cuda-runtime-cu12==12.8.90"],
        ),
    ],
)
def test_what_runs_at_import_is_installed(requirements: list[str], needed: list[str]) -> None:
    assert needed_at_import(requirements) == needed


@pytest.mark.parametrize(
    ("function", "library"),
    [
        ("cublasLtMatmul", "libcublasLt"),
        ("cublasGemmEx", "libcublas"),
        ("cuLaunchKernel", "libcuda"),
        ("cudaMalloc", "libcudart"),
        ("malloc", None),
    ],
)
def test_a_function_belongs_to_the_library_of_its_longest_prefix(
    function: str, library: str | None
) -> None:
    assert owner(function) == library


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_an_empty_library_takes_the_place_of_one_that_is_linked(tmp_path: Path) -> None:
    """torch is a library here that links one with functions of two versions, which then goes."""
    packages = tmp_path / "torch" / "lib"
    packages.mkdir(parents=True)
    linked = packages / "libcudnn.so.9"
    functions = {"": {"cudnnCreate"}, "libcudnn.so.9": {"cudnnDestroy"}}
    put_empty_library(linked, functions)
    source = tmp_path / "torch.c"
    source.write_text(
        "void cudnnCreate(void); void cudnnDestroy(void); int answer(void) { return 42; }"
        "void never(void) { cudnnCreate(); cudnnDestroy(); }"
    )
    ours = packages / "libtorch_cuda.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(ours), str(source), str(linked)]
    subprocess.run(command, check=True)
    linked.unlink()
    found = missing_functions(packages)
    assert found == {"libcudnn.so.9": functions}
    put_empty_library(linked, found["libcudnn.so.9"])
    program = f"import ctypes; print(ctypes.CDLL({str(ours)!r}).answer())"
    environment = {"LD_LIBRARY_PATH": str(packages), "LD_BIND_NOW": "1"}
    printed = subprocess.run(
        [shutil.which("python3") or "python3", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == "42"
