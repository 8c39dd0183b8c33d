"""Running a call over packed sequences, and comparing each sequence with the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import anyflex
from anyflex.errors import BackendRefused
from anyflex.testing.budgets import Budgets, by_oracle, wanted_inputs
from anyflex.testing.comparison import mismatches, moved
from anyflex.testing.float32_precision import products_in
from anyflex.testing.ragged_case import Part, Ragged, RaggedCase
from anyflex.testing.results import Forward, Results, gradients
from anyflex.testing.session import Session

__all__ = ["budgets_of", "check", "compare_ragged", "declares_layout", "run"]

Attention = Callable[..., Any]


def compare_ragged(session: Session, case: RaggedCase) -> None:
    """Run a case by the backend, and fail unless each sequence has what it has alone.

    Where the call is refused, the same call without undeclared gradients and auxiliary outputs
    must still be right; the refusal is raised then.
    """
    can = session.backend.capabilities
    case = case.fitted(can)
    try:
        drawn = case.draw(session.device)
        check(session, drawn, run(session, drawn))
    except BackendRefused:
        for reduced in case.call.reduced(can):
            if reduced != case.call:
                with contextlib.suppress(BackendRefused):
                    drawn = dataclasses.replace(case, call=reduced).draw(session.device)
                    check(session, drawn, run(session, drawn))
        raise


def declares_layout(session: Session, *, paged: bool) -> bool:
    """Whether the backend takes packed sequences, or pages, as they are."""
    fields = {"q_layout", "kv_layout"} | ({"page_size"} if paged else set())
    return fields <= session.backend.capabilities.known_fields


def run(
    session: Session,
    ragged: Ragged,
    step: anyflex.Step | None = None,
    attention: Attention | None = None,
    **changes: Any,
) -> dict[str, Tensor]:
    """Run the call by the backend and return its results, by name, in the call's own shapes.

    Args:
        step: the step, if not one of its own.
        attention: `flex_attention_packed` compiled.
        changes: arguments in place of the case's.

    Raises:
        ConformanceFailure: another backend computed it, or not in the layout that is declared.
    """
    call, memory = ragged.case.call, ragged.memory
    before = len(session.journal.forwards)
    query, key, value = (memory[name].detach() for name in ("query", "key", "value"))
    for letter, tensor in (("q", query), ("k", key), ("v", value)):
        if letter in call.gradients:
            tensor.requires_grad_()
    mods = {kind: moved(mod, ragged.device, call) for kind, mod in ragged.mods.items()}
    score_mod, mask_mod = (
        mods[kind].function(call.form) if kind in mods else None for kind in ("score", "mask")
    )
    lse, maxima = "lse" in call.aux or call.dlse, "max_scores" in call.aux
    given: dict[str, Any] = {
        "scale": call.scale,
        "enable_gqa": call.heads != call.kv_heads,
        "return_aux": anyflex.AuxRequest(lse=lse, max_scores=maxima),
        "backend": session.name,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
    }
    if "key_scale" in memory:
        given |= {"k_scale": memory["key_scale"], "v_scale": memory["value_scale"]}
    if ragged.case.sinks is not None:
        wide = torch.promote_types(call.dtype, torch.float32)
        given["sinks"] = torch.tensor(ragged.case.sinks, dtype=wide, device=ragged.device)
    if not call.gradients and attention is None:
        shape = (*query.shape[:2], value.shape[-1])
        given["out"] = torch.full(shape, math.nan, dtype=call.dtype, device=ragged.device)
    step = ragged.batch().begin() if step is None else step
    attention = anyflex.flex_attention_packed if attention is None else attention
    with products_in(call.products):
        out, aux = attention(query, key, value, step, **{**given, **changes})
        forward = Forward(out, aux.lse, aux.max_scores)
        grads: dict[str, Tensor] = {}
        if call.gradients:
            inputs = wanted_inputs(call, query, key, value, mods.get("score"))
            dout = memory["dout"] if call.dout else None
            dlse = memory["dlse"] if call.dlse else None
            grads = gradients(forward, inputs, dout, dlse, missing_is_zero=False)
    session.check_journal()
    ran = session.journal.forwards[before:]
    session.require(
        bool(ran) or not out.numel() or not key.numel(),
        "the call was accepted and another backend ran it",
    )
    paged = ragged.case.page is not None
    whole = attention is anyflex.flex_attention_packed and not call.gradients and ragged.parts
    scaled = "key_scale" in memory
    if scaled and "kv_storage" not in session.backend.capabilities.known_fields:
        whole = False
    if whole and declares_layout(session, paged=paged):
        session.require(
            all(spec.q_layout == "packed" for spec in ran),
            "a declared layout was not taken: the call was computed as a dense one",
        )
    named = Results(forward, grads).named()
    return {name: named[name] for name in named.keys() - ({"lse", "max_scores"} - call.aux)}


def budgets_of(ragged: Ragged) -> list[Budgets]:
    """Return the results that each sequence has alone, and how far they may be off."""
    return [_budgets(ragged, part) for part in ragged.parts]


def check(
    session: Session,
    ragged: Ragged,
    found: Mapping[str, Tensor],
    wanted: list[Budgets] | None = None,
) -> None:
    """Fail unless the results of each sequence are those that it has alone.

    Args:
        wanted: what `budgets_of` returned, where it is known.
    """
    lines: list[str] = []
    learned: list[Budgets] = []
    wanted = budgets_of(ragged) if wanted is None else wanted
    for number, (part, budgets) in enumerate(zip(ragged.parts, wanted, strict=True)):
        names = budgets.exact.keys() & {"out", "lse", "max_scores", "dq", "dk", "dv"}
        own = {name: _of(part, name, found[name]) for name in names if name in found}
        lines += [
            f"sequence {number}: {line}"
            for line in mismatches(own, _only(budgets, names), part.case, part.drawn)
        ]
        learned.append(_only(budgets, budgets.exact.keys() - names))
    if learned:
        total = Budgets(*(_sums([getattr(each, kind) for each in learned]) for kind in _KINDS))
        lines += mismatches(found, total, ragged.parts[0].case, ragged.parts[0].drawn)
    lines += _of_nobody(ragged, found)
    session.require(not lines, "; ".join(lines))


_KINDS = ("exact", "allowed")


def _sums(named: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([tensors[name] for tensors in named]).sum(0) for name in named[0]}


def _only(budgets: Budgets, names: Any) -> Budgets:
    return Budgets(*({n: getattr(budgets, kind)[n] for n in sorted(names)} for kind in _KINDS))


def _of(part: Part, name: str, tensor: Tensor) -> Tensor:
    """Return a sequence's own results as those of a call of batch 1."""
    rows = tensor[part.keys if name in ("dk", "dv") else part.rows]
    return rows.transpose(0, 1)[None]


def _budgets(ragged: Ragged, part: Part) -> Budgets:
    budgets = by_oracle(part.case, part.drawn)
    if ragged.case.sinks is None:
        return budgets
    exact, allowed = dict(budgets.exact), dict(budgets.allowed)
    sinks = torch.tensor(ragged.case.sinks, dtype=torch.float64)[:, None]
    # A sink takes its share of a row's weights, and its value is 0.
    left = torch.sigmoid(exact["lse"] - sinks).nan_to_num(1.0)[..., None]
    off = allowed["lse"][..., None] * exact["out"].abs()
    exact["out"] = exact["out"] * left
    allowed["out"] = allowed["out"] + off + torch.finfo(part.case.dtype).eps * exact["out"].abs()
    return Budgets(exact, allowed)


def _of_nobody(ragged: Ragged, found: Mapping[str, Tensor]) -> list[str]:
    """Return a sentence for each result of rows that no sequence owns which isn't theirs."""
    lines = []
    wanted = {"out": 0.0, "lse": -math.inf, "max_scores": -math.inf, "dq": 0.0}
    wanted |= {"dk": 0.0, "dv": 0.0}
    for name in wanted.keys() & found.keys():
        owned = torch.zeros(found[name].shape[0], dtype=torch.bool)
        for part in ragged.parts:
            owned[part.keys if name in ("dk", "dv") else part.rows] = True
        rest = found[name].detach().cpu()[~owned]
        if not bool((rest == wanted[name]).all()):
            lines.append(f"{name} of padding rows isn't {wanted[name]}")
    return lines
