"""Running a case by a backend, and comparing its results with the right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import anyflex
from anyflex.testing.attention_case import AttentionCase, Drawn
from anyflex.testing.budgets import Budgets, by_oracle, result_dtype, wanted_inputs
from anyflex.testing.float32_precision import products_in
from anyflex.testing.mods import Mod
from anyflex.testing.results import Forward, Results, gradients

__all__ = ["Budgets", "by_backend", "by_oracle", "mask_of", "mismatches", "moved"]


def mask_of(case: AttentionCase, drawn: Drawn, device: torch.device) -> anyflex.BlockMask | None:
    """Return the case's block mask on the device, or None."""
    mod = drawn.mods.get("mask")
    function = None if mod is None else mod.function(case.form)
    lengths = (case.q_length, case.kv_length)
    if case.runs is None:
        if function is None:
            return None
        return anyflex.create_block_mask(
            function, case.batch, case.heads, *lengths, BLOCK_SIZE=case.block_size
        ).to(device)
    rows = [_row_runs(kinds) for kinds in case.runs]
    counts = [len(row) for row in rows]
    offsets = torch.tensor([[[sum(counts[:i]) for i in range(len(rows) + 1)]]], dtype=torch.int32)
    listed = torch.tensor([run for row in rows for run in row], dtype=torch.int32).reshape(-1, 3)
    return anyflex.BlockMask.from_runs(
        offsets,
        listed,
        seq_lengths=lengths,
        block_size=case.block_size,
        mask_mod=function,
        capacity=len(listed) + 3,  # kernels must read offsets only
    ).to(device)


def _row_runs(kinds: tuple[int, ...]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for column, kind in enumerate(kinds):
        if kind and runs and runs[-1][1] == column and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], column + 1, kind)
        elif kind:
            runs.append((column, column + 1, kind))
    return runs


def by_backend(
    case: AttentionCase,
    drawn: Drawn,
    name: str,
    device: torch.device,
    attention: Callable[..., Any] = anyflex.flex_attention,
) -> dict[str, Tensor]:
    """Run the case by the backend of this name and return its results, by name.

    Args:
        attention: `flex_attention` itself, compiled, or with more arguments.
    """
    query, key, value = (drawn.tensors[t].detach() for t in ("query", "key", "value"))
    for letter, tensor in (("q", query), ("k", key), ("v", value)):
        tensor.requires_grad_(letter in case.gradients)
    mod = moved(drawn.mods["score"], device, case) if "score" in drawn.mods else None
    more: dict[str, Any] = {"dropout_p": case.dropout_p} if case.dropout_p else {}
    sinks = case.learned_sinks(torch.promote_types(case.dtype, torch.float32), device)
    if sinks is not None:
        more["sinks"] = sinks
    with products_in(case.products), _seeded(case):
        out, aux = attention(
            query,
            key,
            value,
            None if mod is None else mod.function(case.form),
            mask_of(case, drawn, device),
            case.scale,
            enable_gqa=case.heads != case.kv_heads,
            return_aux=anyflex.AuxRequest(
                lse="lse" in case.aux or case.dlse, max_scores="max_scores" in case.aux
            ),
            backend=name,
            **more,
        )
        forward = Forward(out, aux.lse, aux.max_scores)
        grads: dict[str, Tensor] = {}
        if case.gradients:
            inputs = wanted_inputs(case, query, key, value, mod, sinks)
            dout = drawn.weights["dout"] if case.dout else None
            dlse = drawn.weights["dlse"] if case.dlse else None
            grads = gradients(forward, inputs, dout, dlse, missing_is_zero=False)
    named = Results(forward, grads).named()
    return {name: named[name] for name in named.keys() - ({"lse", "max_scores"} - case.aux)}


@contextmanager
def _seeded(case: AttentionCase) -> Iterator[None]:
    """Seed the CPU's generator in the body of a case with dropout. The other cases see the
    process's own, which no call may change."""
    if not case.dropout_p:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        # Not `torch.manual_seed`, which would seed the devices' generators for good.
        torch.default_generator.manual_seed(case.seed)
        yield


def moved(mod: Mod, device: torch.device, case: AttentionCase) -> Mod:
    leaves = {
        name: leaf.detach()
        .to(device)
        .requires_grad_(leaf.requires_grad and "captured" in case.gradients)
        for name, leaf in mod.leaves.items()
    }
    return mod.with_leaves(leaves)


def mismatches(
    found: Mapping[str, Tensor], budgets: Budgets, case: AttentionCase, drawn: Drawn
) -> list[str]:
    """Return a sentence for each wrong result."""
    lines = []
    for name, wanted in budgets.exact.items():
        if name not in found:
            lines.append(f"{name} is missing")
            continue
        value = found[name].cpu()
        dtype = result_dtype(name, case, drawn)
        if value.shape != wanted.shape:
            lines.append(f"{name} has shape {list(value.shape)}, wanted {list(wanted.shape)}")
        elif value.dtype is not dtype:
            lines.append(f"{name} has dtype {value.dtype}, wanted {dtype}")
        else:
            line = _difference(value.double(), wanted, budgets.allowed[name], dtype)
            if line:
                lines.append(f"{name} {line}")
    return lines


def _difference(found: Tensor, wanted: Tensor, allowed: Tensor, dtype: torch.dtype) -> str:
    # A value beyond the type's range becomes infinite.
    wanted = wanted.to(dtype).double() if dtype is torch.float16 else wanted
    finite = wanted.isfinite()
    strange = ~finite & ~((found == wanted) | (found.isnan() & wanted.isnan()))
    strange |= finite & ~found.isfinite()
    if strange.any():
        at = tuple(strange.nonzero()[0].tolist())
        return (
            f"is {found[at]} at {list(at)}, wanted {wanted[at]} ({int(strange.sum())} of "
            f"{strange.numel()} elements are not finite alike)"
        )
    gap = torch.where(finite, (found - wanted).abs(), 0.0)
    over = gap > torch.where(finite, allowed, 1.0)
    if not over.any():
        return ""
    ratio = torch.where(over, gap / allowed, 0.0)
    at = tuple(torch.unravel_index(ratio.argmax(), ratio.shape))
    where = [int(index) for index in at]
    return (
        f"is {found[at]:.6g} at {where}, wanted {wanted[at]:.6g}: off by {gap[at]:.3g}, allowed "
        f"{allowed[at]:.3g} ({int(over.sum())} of {over.numel()} elements)"
    )
