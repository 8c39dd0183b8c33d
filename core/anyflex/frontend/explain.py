"""explain: which backend takes a call, which variant, and why not the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anyflex.errors import AnyflexError, BackendRefused, PluginError
from anyflex.frontend.aux_outputs import AuxRequest
from anyflex.frontend.checked_call import check
from anyflex.frontend.eager_call import gather
from anyflex.registry.backend_choice import Selection, TraceLine, explain_selection
from anyflex.registry.forced_backends import names_in_force
from anyflex.registry.options import TORCH_KEYS
from anyflex.runtime.compiled_kernel import described
from anyflex.runtime.plan import plan_for, spec_for
from anyflex.tracing.mod_types import ScoreMod

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a call runs where it runs. ``print`` it, or take its parts.

    Args:
        selection: the registry's decision with every candidate's answer.
        variant: what the chosen kernel would run for this call, or "" where nobody takes it.
        problem: why nobody takes it or the chosen backend can't compile it, or "".
        broken: the problem is a broken plugin: the call would raise `anyflex.errors.PluginError`.
        sinks_by: who applies the sinks: ``"kernel"``, ``"core"`` to the kernel's out, or "" where
            there are none.
    """

    selection: Selection
    variant: str
    problem: str
    broken: bool = False
    sinks_by: str = ""

    @property
    def backend(self) -> str | None:
        """Name of the chosen backend."""
        return self.selection.chosen

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON can hold them."""
        chosen = self.selection
        return {
            "backend": chosen.chosen,
            "distribution": chosen.distribution,
            "variant": self.variant,
            "backward": chosen.decision.backward if chosen.decision is not None else None,
            "forced_by": chosen.forced_by,
            "problem": self.problem,
            "broken": self.broken,
            "sinks_by": self.sinks_by,
            "trace": [dataclasses.asdict(line) for line in chosen.trace],
            "unused_options": list(chosen.unused_options),
            "spec": chosen.spec.to_text(),
        }

    def __str__(self) -> str:
        chosen = self.selection
        lines = []
        if chosen.chosen is None:
            # Where one is forced, others may well take it.
            begins = "the call fails" if chosen.forced_by else "nobody takes this call"
            lines.append(f"{begins}: {self.problem}")
        else:
            where = (
                f"{chosen.chosen} ({chosen.distribution})"
                if chosen.distribution
                else (chosen.chosen)
            )
            lines.append(f"backend   {where}" + (f", {self.problem}" if self.problem else ""))
            lines.append(f"variant   {self.variant or '-'}")
        if chosen.forced_by:
            lines.append(f"forced by {chosen.forced_by}")
        lines += [f"asked     {line}" for line in chosen.trace]
        if chosen.unused_options:
            unused = (
                f"{key} (of torch's kernels)" if key in TORCH_KEYS else key
                for key in chosen.unused_options
            )
            lines.append(f"unused    {', '.join(unused)}")
        spec = chosen.spec
        lines.append(
            f"spec      {spec.device_type} {str(spec.dtype).removeprefix('torch.')} "
            f"E={spec.head_dim} Ev={spec.value_head_dim} gqa={spec.gqa_ratio} "
            f"q={spec.q_class} mask={spec.mask_kind} {spec.alignment[0]} "
            f"gradients={','.join(spec.gradients) or 'none'}"
            f"{' dropout' if spec.dropout else ''}"
            f"{f' sinks by {self.sinks_by}' if self.sinks_by else ''}"
        )
        for name, graph in (("score_mod", spec.score_graph), ("mask_mod", spec.mask_graph)):
            if graph is not None:
                lines.append(name)
                lines += ["  " + line for line in str(graph).splitlines()]
        return "\n".join(lines)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Explanation:
    """Tell what `flex_attention` would do with the same arguments, without running it.

    The chosen backend compiles its kernel, as the call would, to name the variant.

    Raises:
        ArgumentError, ArgumentTypeError, BlockMaskError, ModTraceError: as `flex_attention`. A
            refusal is no error here: it stands in the result.

    Examples:
        >>> import torch, anyflex
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
        >>> anyflex.explain(q, k, v, backend="reference").backend
        'reference'
    """
    call = check(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux,
        backend,
        dropout_p,
        sinks,
    )
    sinks_by = ""
    if call.sinks is not None:
        from anyflex.frontend.calls_with_sinks import in_kernels

        sinks_by = "kernel"
        if not in_kernels(call):
            sinks_by = "core"
            call = call._replace(sinks=None, aux=call.aux._replace(lse=True))
    inputs = gather(call)
    choice = (spec_for(inputs), names_in_force(backend), backend, call.options)
    selection = explain_selection(*choice)
    try:
        compiled = plan_for(inputs).compiled
        variant = described(compiled, inputs.call)
    except BackendRefused as error:
        lines = [TraceLine(name, "", "refuses", reason) for name, reason in error.reasons.items()]
        selection = explain_selection(*choice, {line.backend: line for line in lines})
        return Explanation(selection, "", str(error), sinks_by=sinks_by)
    except AnyflexError as error:
        return Explanation(selection, "", str(error), isinstance(error, PluginError), sinks_by)
    if compiled.backend.name != selection.chosen:
        passed = {line.backend: line for line in compiled.passed}
        selection = explain_selection(*choice, passed)
    return Explanation(selection, variant, "", sinks_by=sinks_by)
