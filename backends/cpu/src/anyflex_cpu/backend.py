"""Entry point of the CPU backend: declarations, the probe of this machine, and compilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from anyflex.plugin import (
    CONTRACT_1_FIELDS,
    DTYPES,
    OPERATIONS,
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
from anyflex_cpu import library

__all__ = ["MOST_CAPTURED", "CpuBackend"]

MOST_CAPTURED = 64
"""The native library's most_captured."""


class CpuBackend(Backend):
    """Native kernels for the processor, forward and backward, with mods on tiles of scores."""

    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        head_dim_max=512,
        different_value_head_dim=True,
        gqa=True,
        kv_broadcast=True,
        scattered=True,
        aux=frozenset({"lse", "max_scores"}),
        gradients=frozenset({"q", "k", "v", "captured", "lse"}),
        captured_dtypes=frozenset(DTYPES.values()),
        deterministic=True,
        operations=frozenset(OPERATIONS),
        known_fields=CONTRACT_1_FIELDS
        | set("dropout sinks q_layout kv_layout page_size kv_storage batch_invariant".split()),
    )
    options: ClassVar[Mapping[str, Option]] = {
        "mods": Option(
            str,
            "auto",
            "how mods run: compiled in the process (jit, which needs llvmlite), interpreted, or "
            "auto: jit where it can be had",
            choices=("auto", "jit", "interpreter"),
        )
    }

    def probe(self) -> Decision:
        """Load the library, a few milliseconds."""
        try:
            library.load()
        except (library.LibraryError, ArgumentError) as error:
            return Rejected(str(error))
        return Accepted()

    def saved_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """`CpuKernel.saved_outputs` in bytes: out before it is rounded."""
        return (0, 0) if dtype is torch.float32 else (4, 0)

    def fingerprint(self) -> str:
        """Versions and processor features that compiled mods depend on. `anyflex doctor` prints
        it."""
        from anyflex_cpu.programs import llvmlite_version, no_jit

        loaded = library.load()
        reason = no_jit()
        mods = f"mods interpreted ({reason})" if reason else f"llvmlite {llvmlite_version()}"
        return f"native library of ABI {library.ABI}, level {loaded.level}, {mods}"

    def notes(self) -> Sequence[str]:
        """Tell of levels that aren't built, and of an llvmlite that is installed and can't be
        used."""
        from anyflex_cpu.programs import no_jit, unusable_jit

        notes = []
        if left_out := _left_out():
            notes.append(
                f"built without {', '.join(left_out)}, which this processor can run and the "
                f"compiler didn't know: {library.NEWER_COMPILER}"
            )
        if not no_jit() and (reason := unusable_jit()):
            notes.append(f"mods are interpreted: {reason}; pip install --force-reinstall llvmlite")
        return notes

    def supports(self, spec: Spec) -> Decision:
        decision = super().supports(spec)
        learned = sum(facts.needs_grad for facts in spec.captured)
        if isinstance(decision, Accepted) and learned and len(spec.captured) > MOST_CAPTURED:
            return Rejected(
                f"gradients of captured tensors are computed where mods read at most "
                f"{MOST_CAPTURED} tensors; these read {len(spec.captured)}, {learned} of which "
                "require grad: stack them into fewer"
            )
        if isinstance(decision, Accepted) and dict(spec.options).get("mods") == "jit":
            from anyflex_cpu.programs import no_jit, unusable_jit

            if reason := no_jit():
                return Rejected(
                    f"option mods='jit' needs llvmlite 0.45 or newer, and there is {reason}: pip "
                    "install -U llvmlite, or leave the option out"
                )
            if reason := unusable_jit():
                return Rejected(
                    f"option mods='jit' needs llvmlite, and {reason}; pip install "
                    "--force-reinstall llvmlite, or leave the option out"
                )
        return decision

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Compile the spec's mods, or assemble them for the interpreter."""
        from anyflex_cpu.kernel import CpuKernel, PackedKernel
        from anyflex_cpu.programs import Programs

        loaded = library.load()
        # A spec holds those options that the user gave.
        mods = str(dict(spec.options).get("mods", "auto"))
        kernel = CpuKernel if spec.q_layout == "dense" else PackedKernel
        return kernel(spec, loaded, Programs(spec, loaded, artifacts, mods))


def _left_out() -> tuple[str, ...]:
    try:
        return library.load().left_out()
    except (library.LibraryError, ArgumentError):
        # `probe` says it.
        return ()
