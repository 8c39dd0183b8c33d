"""Entry point of FlashAttention-4 as a backend: its declarations, and the probe of this
machine."""

from __future__ import annotations

import importlib.util
import os
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
from anyflex_flash4 import mods

__all__ = ["Flash4"]

_INSTALL = "pip install 'flash-attn-4[cu13]'"
_ARCH = "sm_90"


class Flash4(Backend):
    """FlashAttention-4 (CuTe DSL), with mods of its own and block-sparse masks."""

    # Installed for comparison: it must not be chosen by itself.
    priority = -90
    capabilities = Capabilities(
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        # The backward was seen to be wrong for other multiples of 8: 8, 16, 40 and 72.
        head_dim_min=64,
        head_dim_max=128,
        head_dim_multiple=32,
        gqa=True,
        scattered=True,
        aux=frozenset({"lse"}),
        gradients=frozenset({"q", "k", "v", "lse"}),
        captured_dtypes=frozenset(
            {torch.bool, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16}
        ),
        operations=mods.FLASH4.operations(),
        known_fields=CONTRACT_1_FIELDS,
    )
    options: ClassVar[Mapping[str, Option]] = {
        "masks": Option(
            str,
            "auto",
            "auto gives causal and window masks as arguments where they are that; lists never",
            choices=("auto", "lists"),
        )
    }

    def probe(self) -> Decision:
        """Look for the package and for a GPU, without starting either."""
        if not torch.cuda.is_available():
            return Rejected("torch sees no CUDA device; install its driver and a torch for CUDA")
        found = importlib.util.find_spec("flash_attn")
        if found is None:
            return Rejected(f"the package flash-attn-4 is not installed: {_INSTALL}")
        folders = found.submodule_search_locations or ()
        if not any(os.path.isdir(os.path.join(folder, "cute")) for folder in folders):
            return Rejected(
                f"flash_attn has no flash_attn.cute: it is another FlashAttention; {_INSTALL}"
            )
        if importlib.util.find_spec("cutlass") is None:
            return Rejected(
                "flash-attn-4 lacks nvidia-cutlass-dsl (its module cutlass): "
                "pip install 'nvidia-cutlass-dsl[cu13]'"
            )
        # Asking here would start the device; `supports` checks it call by call.
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if started:
            return _arch_decision("sm_{}{}".format(*torch.cuda.get_device_capability()))
        return Accepted()

    def supports(self, spec: Spec) -> Decision:
        """Accept as declared, on a GPU that this was tried on."""
        decision = super().supports(spec)
        if isinstance(decision, Rejected):
            return decision
        on_arch = _arch_decision(spec.arch)
        return on_arch if isinstance(on_arch, Rejected) else decision

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Write the mods; FlashAttention-4 compiles at the first call, when it sees tensors."""
        from anyflex_flash4.cute_mods import CuteMods
        from anyflex_flash4.kernel import Flash4Kernel

        source = mods.write_source(spec)
        reads = mods.reads_call(spec)
        made = CuteMods(source, mods.load_source(source), reads, mods.table_count(spec))
        return Flash4Kernel(spec, made, reads)


def _arch_decision(arch: str) -> Decision:
    # "": torch doesn't know the architecture.
    if arch not in (_ARCH, ""):
        return Rejected(
            f"a GPU of architecture {arch}; cuda.flash4 was tried on {_ARCH} "
            "(Hopper) only: use another backend"
        )
    return Accepted()
