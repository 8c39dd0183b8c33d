"""Entry point: capabilities, and whether Metal kernels can run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from anyflex.plugin import (
    CONTRACT_1_FIELDS,
    DTYPES,
    Accepted,
    ArgumentError,
    Artifacts,
    Backend,
    BackendRefused,
    Capabilities,
    Decision,
    Kernel,
    Option,
    Rejected,
    Spec,
)
from anyflex_mps.options import OPTIONS, wants_mpp
from anyflex_mps.refusals import option_refusal, refusal
from anyflex_mps.targets import cores, machine

if TYPE_CHECKING:
    from anyflex_mps.self_test import SelfTest
    from anyflex_mps.shaders import CompileShader

__all__ = ["MpsBackend"]

_TYPES = frozenset(DTYPES.values()) - {torch.float64}
"""Types of scalars that Metal has."""


class MpsBackend(Backend):
    """Kernels in Metal for Apple GPUs."""

    options: ClassVar[Mapping[str, Option]] = OPTIONS
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        different_value_head_dim=True,
        gqa=True,
        kv_broadcast=True,
        scattered=True,
        aux=frozenset({"lse", "max_scores"}),
        gradients=frozenset({"q", "k", "v", "captured", "lse"}),
        deterministic=True,
        captured_dtypes=_TYPES,
        known_fields=CONTRACT_1_FIELDS | {"sinks", "q_layout", "kv_layout", "page_size"},
        node_dtypes=_TYPES,
    )

    def probe(self) -> Decision:
        """Look for an Apple GPU that torch can use."""
        if not torch.backends.mps.is_available():
            return Rejected(
                "torch sees no Apple GPU; it needs a Mac with Apple silicon and macOS 14 or newer"
            )
        return Accepted()

    def notes(self) -> Sequence[str]:
        """Return what the GPU is, and how its self test ended."""
        if not torch.backends.mps.is_available():
            return ()
        failures = []
        for dtype in sorted(self.capabilities.dtypes, key=str):
            try:
                self.check_gpu(dtype)
            except BackendRefused as error:
                failures.append(str(error))
        passed = "self test passed: the kernels' assumptions hold on this GPU"
        return (f"{machine()}, {self.cores()} cores", *(failures or [passed]))

    def supports(self, spec: Spec) -> Decision:
        """Refuse what `capabilities` can't express: see `refusals`."""
        decision = super().supports(spec)
        reason = refusal(spec) if isinstance(decision, Accepted) else None
        return decision if reason is None else Rejected(reason)

    def saved_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """See `MpsKernel.saved_outputs`."""
        return (0 if dtype is torch.float32 else dtype.itemsize, 8)

    def compile_shader(self) -> CompileShader:
        """Return what compiles Metal source."""
        return torch.mps.compile_shader

    def device(self) -> torch.device:
        """Return where a call's tensors are."""
        return torch.device("mps")

    def cores(self) -> int:
        """Return the number of the GPU's cores."""
        return cores()

    @cached_property
    def _self_test(self) -> SelfTest:
        from anyflex_mps.self_test import SelfTest

        return SelfTest(self.compile_shader(), self.device())

    def check_gpu(self, dtype: torch.dtype) -> None:
        """Raise BackendRefused where the GPU doesn't keep what a dtype's kernels assume; it is
        tried once."""
        self._self_test.check(dtype)

    def check_matrix_units(self, spec: Spec) -> None:
        """Raise ArgumentError where the products that a spec's kernel makes on matrix units, by
        the option ``mpp``, aren't right; those of equal sizes are tried once."""
        from anyflex_mps.forward_matmul import products_of

        self._self_test.check_matrix_units(spec.dtype, products_of(spec))

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Write the kernels' source; Metal compiles it at the first launch.

        Raises BackendRefused where `check_gpu` does, and ArgumentError where an option can't be
        honoured: see `refusals.option_refusal` and `check_matrix_units`.
        """
        from anyflex_mps.kernel import MpsKernel
        from anyflex_mps.shaders import Shaders

        reason = option_refusal(spec)
        if reason is not None:
            raise ArgumentError(reason)
        self.check_gpu(spec.dtype)
        if wants_mpp(spec):
            self.check_matrix_units(spec)
        return MpsKernel(spec, Shaders(self.compile_shader()), self.cores())
