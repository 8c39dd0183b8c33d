"""The entry point: what the portable kernels can do, and whether they can run here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from anyflex.plugin import (
    CONTRACT_1_FIELDS,
    Accepted,
    Artifacts,
    Backend,
    Capabilities,
    Decision,
    Kernel,
    Option,
    Rejected,
    Spec,
)

if TYPE_CHECKING:
    from anyflex_triton.configs import Target

__all__ = ["TritonBackend"]

_TRITONS = ("triton", "pytorch-triton-rocm", "triton-rocm", "triton-xpu", "pytorch-triton-xpu")
"""Distributions that install the module triton."""
_LEAST_SM = 80
_TILES = (16, 32, 64, 128)
_WARPS = (1, 2, 4, 8, 16, 32)
_STAGES = (1, 2, 3, 4, 5)
_OPTIONS = {
    "block_m": Option(int, None, "query rows of a forward tile", _TILES, "BLOCK_M"),
    "block_n": Option(int, None, "keys of a forward tile", _TILES, "BLOCK_N"),
    "num_warps": Option(int, None, "warps of a forward program", _WARPS, "num_warps"),
    "num_stages": Option(int, None, "tiles in flight of forward", _STAGES, "num_stages"),
    "finer_mask": Option(bool, False, "decide a mask's PARTIAL blocks anew, tile by tile"),
    "dkv_block_m": Option(int, None, "query rows of a tile of dK and dV", _TILES, "BLOCK_M1"),
    "dkv_block_n": Option(int, None, "keys of a tile of dK and dV", _TILES, "BLOCK_N1"),
    "dq_block_m": Option(int, None, "query rows of a tile of dQ", _TILES, "BLOCK_M2"),
    "dq_block_n": Option(int, None, "keys of a tile of dQ", _TILES, "BLOCK_N2"),
    "backward_num_warps": Option(int, None, "warps of a backward program", _WARPS),
    "backward_num_stages": Option(int, None, "tiles in flight of backward", _STAGES),
}


class TritonBackend(Backend):
    """Kernels in Triton for NVIDIA (compute capability 8.0 and above) and AMD GPUs."""

    # Kernels for one chip stand above these.
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
        known_fields=CONTRACT_1_FIELDS,
    )  # fmt: skip
    options: ClassVar[Mapping[str, Option]] = _OPTIONS

    def probe(self) -> Decision:
        """Look for a GPU and for Triton, without starting either."""
        if not torch.cuda.is_available():
            return Rejected("torch sees no CUDA device; install its driver and a torch for CUDA")
        if importlib.util.find_spec("triton") is None:
            if torch.version.hip is not None:
                return Rejected(
                    "no Triton is installed; torch's ROCm index has the one for AMD GPUs, "
                    "pytorch-triton-rocm: install torch from there again"
                )
            return Rejected("the package triton is not installed: pip install triton")
        return Accepted()

    def fingerprint(self) -> str:
        """Part of the disk cache's key: what another table has written isn't found."""
        from anyflex_triton import mods

        found = [f"{name} {version}" for name in _TRITONS if (version := _version(name))]
        sources = inspect.getsource(mods).encode()
        return f"{', '.join(found) or 'triton unknown'}, mods {zlib.crc32(sources):x}"

    def target(self) -> Target:
        """Which of the config table's targets the current device is."""
        if not torch.cuda.is_available():
            # CPU tensors stand in for a GPU's: nothing but the interpreter can run there.
            return "interpreter"
        if torch.version.hip is not None:
            return "amd"
        major, _ = torch.cuda.get_device_capability()
        # 12 is Blackwell for workstations, with an Ampere's shared memory.
        return "hopper" if major == 9 else "blackwell" if major == 10 else "ampere"

    def supports(self, spec: Spec) -> Decision:
        """As declared, on GPUs that Triton compiles for."""
        decision = super().supports(spec)
        if isinstance(decision, Rejected) or not spec.arch.startswith("sm_"):
            return decision
        if int(spec.arch[3:]) < _LEAST_SM:
            return Rejected(
                f"a GPU of architecture {spec.arch}; Triton compiles for sm_{_LEAST_SM} and above"
            )
        return decision

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Write the mods; Triton compiles at the first call, when it knows its class."""
        from anyflex_triton.kernel import TritonKernel
        from anyflex_triton.mods import write_source

        stored = artifacts.get("mods.py")
        if stored is None:
            stored = write_source(spec).encode()
            artifacts.put("mods.py", stored)
        return TritonKernel(spec, stored.decode(), self.target(), dict(spec.options))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
