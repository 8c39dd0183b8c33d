"""Entry points of torch's flex attention as backends: declarations, and probes of this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Mapping
from typing import ClassVar

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
from anyflex_torch_flex import mods

__all__ = ["TorchFlexCpu", "TorchFlexCuda"]

_CAPTURED = frozenset({torch.bool, torch.int32, torch.int64, torch.float32})


class _TorchFlex(Backend):
    # Installed for comparison: it must not be chosen by itself.
    priority = -100
    block_multiple: ClassVar[int] = 1

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Write the mods; torch compiles at the first call, when it sees the tensors."""
        # Not at the top: importing a backend is cheap, and torch's compiler isn't.
        from anyflex_torch_flex.kernel import TorchFlexKernel

        given = dict(spec.options)
        chosen = {"BACKEND": str(given["kernels"])} if "kernels" in given else {}
        make_mods = mods.load_source(mods.write_source(spec))
        return TorchFlexKernel(spec, make_mods, chosen, self.block_multiple)


class TorchFlexCpu(_TorchFlex):
    """torch's C++ template: forward only, without auxiliary outputs."""

    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dim_max=256,
        different_value_head_dim=True,
        gqa=True,
        scattered=True,
        captured_dtypes=_CAPTURED,
        operations=mods.TORCH_FLEX.operations(),
        known_fields=CONTRACT_1_FIELDS,
    )

    def probe(self) -> Decision:
        """Look for what torch's CPU template needs: AVX2, and a C++ compiler."""
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return Rejected(
                f"torch's flex attention on the CPU needs AVX2; this is a {platform.machine()}: "
                "use another backend"
            )
        if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
            return Rejected(
                "torch's flex attention on the CPU needs AVX2, which this processor lacks or "
                "ATEN_CPU_CAPABILITY turns off: use another backend"
            )
        compilers = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
        if not any(shutil.which(compiler) for compiler in compilers if compiler):
            return Rejected(
                "torch compiles flex attention by a C++ compiler, and there is none; install g++, "
                "or name yours in CXX"
            )
        return Accepted()

    def supports(self, spec: Spec) -> Decision:
        """Accept as declared, except an lse that is kept for a backward, which doesn't exist
        here."""
        decision = super().supports(spec)
        if isinstance(decision, Accepted) and spec.needs_lse:
            return Rejected("auxiliary output lse is not supported")
        return decision


class TorchFlexCuda(_TorchFlex):
    """torch's Triton templates, or with ``kernels="FLASH"`` FlashAttention-4."""

    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dim_min=16,
        head_dim_max=256,
        head_dim_multiple=16,
        different_value_head_dim=True,
        gqa=True,
        aux=frozenset({"lse", "max_scores"}),
        gradients=frozenset({"q", "k", "v", "lse"}),
        captured_dtypes=_CAPTURED,
        operations=mods.TORCH_FLEX.operations(),
        known_fields=CONTRACT_1_FIELDS,
    )
    # The largest tile of the Triton templates.
    block_multiple = 128
    options: ClassVar[Mapping[str, Option]] = {
        "kernels": Option(
            str,
            "AUTO",
            "which kernels torch generates: AUTO picks Triton's, those for decoding where the "
            "query is short; FLASH needs the package flash-attn-4",
            choices=("AUTO", "TRITON", "FLASH"),
        )
    }

    def probe(self) -> Decision:
        """Look for a CUDA device and for Triton, without starting either."""
        if not torch.cuda.is_available():
            return Rejected("torch sees no CUDA device; install its driver and a torch for CUDA")
        if importlib.util.find_spec("triton") is None:
            return Rejected("torch compiles flex attention by Triton: pip install triton")
        return Accepted()
