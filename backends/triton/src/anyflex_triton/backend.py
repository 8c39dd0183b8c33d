"""Entry point of the portable kernels: their capabilities, and whether they can run here."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from anyflex.plugin import (
    CONTRACT_1_FIELDS,
    Accepted,
    ArgumentError,
    Artifacts,
    Backend,
    Capabilities,
    Decision,
    Kernel,
    Option,
    Rejected,
    Spec,
)
from anyflex_triton import absent_gpu
from anyflex_triton.options import OPTIONS

if TYPE_CHECKING:
    from anyflex_triton.configs import Target
    from anyflex_triton.kernel_signatures import KernelInputs
    from anyflex_triton.ready_kernels import ReadyKernels

__all__ = ["TRIED", "TritonBackend", "checksum_of", "untried_triton"]

_TRITONS = ("triton", "pytorch-triton-rocm", "triton-rocm", "triton-xpu", "pytorch-triton-xpu")
"""Distributions that install the module triton."""
_LEAST_SM, _LEAST_FP8_SM = 80, 89
_OLDEST, _NEWEST = (3, 6), (3, 9)
TRIED = "3.6 to 3.9"
"""Versions of Triton that the kernels were tried with. The oldest has run, and compiles in the
tests as the newest does. With 3.7.1 and 3.8.0 the tests of Hopper's and Blackwell's compiled
kernels were run by hand. Kernels in Gluon are refused for other versions: Gluon isn't stable, and
changes names."""


class TritonBackend(Backend):
    """Kernels in Triton for NVIDIA (compute capability 8.0 and above) and AMD GPUs."""

    # Backends for one chip have a higher priority.
    priority = -10
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        different_value_head_dim=True,
        gqa=True,
        kv_broadcast=True,
        scattered=True,
        aux=frozenset({"lse", "max_scores"}),
        gradients=frozenset({"q", "k", "v", "captured", "lse"}),
        deterministic=True,
        captured_dtypes=frozenset(
            {
                torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                torch.float16, torch.bfloat16, torch.float32,
            }
        ),
        known_fields=CONTRACT_1_FIELDS
        | set("dropout sinks q_layout kv_layout page_size kv_storage batch_invariant".split()),
    )  # fmt: skip
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def probe(self) -> Decision:
        """Look for a GPU and for Triton, without starting either."""
        if not torch.cuda.is_available():
            if torch.version.hip is not None:
                return Rejected("torch sees no AMD GPU; install AMD's driver for it, amdgpu")
            return Rejected(
                "torch sees no CUDA device; install its driver and a torch for CUDA (for an AMD "
                "GPU one for ROCm)"
            )
        if importlib.util.find_spec("triton") is None:
            if torch.version.hip is not None:
                return Rejected(
                    "no Triton is installed; torch's ROCm index has the one for AMD GPUs, "
                    "pytorch-triton-rocm: install torch from there again"
                )
            return Rejected("the package triton is not installed: pip install triton")
        return Accepted()

    def notes(self) -> list[str]:
        """Return what doctor says beside the state: which Tritons the kernels were tried with."""
        installed = _installed_tritons()
        here = f"; here is {', '.join(installed)}" if installed else ""
        return [f"tried with Triton {TRIED}{here}"]

    def saved_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """See `TritonKernel.saved_outputs`."""
        return (0 if dtype is torch.float32 else dtype.itemsize, 8)

    def fingerprint(self) -> str:
        """Return a part of the disk cache's key: kernels of other sources, and configs tuned for
        them, aren't found."""
        sources = checksum_of(Path(__file__).parent)
        return f"{', '.join(_installed_tritons()) or 'triton unknown'}, sources {sources:x}"

    def target(self) -> Target:
        """Return the current device's target in the config table."""
        if (absent := absent_gpu.in_force()) is not None:
            major = absent.generation // 10
        elif not torch.cuda.is_available():
            # CPU tensors stand in for a GPU's: nothing but the interpreter can run there.
            return "interpreter"
        elif torch.version.hip is not None:
            return "amd"
        else:
            major, _ = torch.cuda.get_device_capability()
        # Major version 12 is Blackwell for workstations, with Ampere's amount of shared memory.
        return "hopper" if major == 9 else "blackwell" if major == 10 else "ampere"

    def milliseconds(self, launch: Callable[[], None]) -> float:
        """Time a launch on the current device, for autotuning."""
        from anyflex_triton.launch import milliseconds

        return milliseconds(launch)

    def supports(self, spec: Spec) -> Decision:
        """Accept the declared capabilities, on GPUs that Triton compiles for."""
        decision = super().supports(spec)
        if isinstance(decision, Rejected) or not spec.arch.startswith("sm_"):
            return decision
        generation = int(spec.arch[3:])
        if generation < _LEAST_SM:
            return Rejected(
                f"a GPU of architecture {spec.arch}; Triton compiles for sm_{_LEAST_SM} and above"
            )
        if spec.kv_storage == "fp8_e4m3" and generation < _LEAST_FP8_SM:
            return Rejected(
                f"keys in float8_e4m3fn on a GPU of architecture {spec.arch}; Triton converts "
                f"them on sm_{_LEAST_FP8_SM} and above. int8 is taken"
            )
        return decision

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Write the mods; Triton compiles at the first call, when the arguments' class is
        known."""
        from anyflex_triton.compiled_files import CompiledFiles
        from anyflex_triton.mods import write_source
        from anyflex_triton.tuning import Tuner
        from anyflex_triton.warm_up import begin_warm_up

        files = CompiledFiles(artifacts, self.ready_kernels())
        stored = artifacts.get("mods.py")
        # No launcher is needed where CPU tensors stand in for the device's.
        if torch.get_device_module(spec.device_type).is_available() and torch.version.cuda:
            files.give_modules()
            begin_warm_up(compiles=stored is None)
        if stored is None:
            stored = write_source(spec).encode()
            artifacts.put("mods.py", stored)
        tuner = None
        if dict(spec.options).get("autotune"):
            if spec.batch_invariant:
                raise ArgumentError(
                    f"kernel_options[{self.name!r}]['autotune'] finds a config for each size of "
                    "calls, and batch_invariant=True asks for one of all sizes: leave one of them "
                    "out"
                )
            tuner = Tuner(artifacts, self.name, self.milliseconds)
        # Imported when the warm-up has begun.
        from anyflex_triton.kernel_signatures import KernelInputs

        options = dict(spec.options)
        given = KernelInputs(spec, stored.decode(), self.target(), options, tuner, files)
        return self.kernel(given)

    def ready_kernels(self) -> ReadyKernels | None:
        """Return the kernels that come compiled with the package, or None where none do."""
        return None

    def kernel(self, given: KernelInputs) -> Kernel:
        """Return what `compile` returns."""
        from anyflex_triton.kernel import TritonKernel

        return TritonKernel(given)


@functools.cache
def checksum_of(folder: Path) -> int:
    """Return a checksum of a package's sources."""
    checksum = 0
    for file in sorted(folder.glob("*.py")):
        checksum = zlib.crc32(file.read_bytes(), checksum)
    return checksum


def untried_triton(version: str) -> str | None:
    """Return a note that a version of Triton is untried, or None.

    Args:
        version: as in ``"3.6.0"``; only the first two numbers count.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return None
    return f"Triton {version}, and they were tried with {TRIED}"


def _installed_tritons() -> list[str]:
    """Return each distribution that installs a Triton, with its version."""
    return [f"{name} {version}" for name in _TRITONS if (version := _version(name))]


def _version(distribution: str) -> str | None:
    try:
        # Damaged metadata has no version.
        return importlib.metadata.version(distribution) or "of no version"
    except importlib.metadata.PackageNotFoundError:
        return None
