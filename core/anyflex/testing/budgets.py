"""Budgets of a case: its results by the dense formula, and how far a backend may be from them.

The budget comes from the data. The dense formula is evaluated in float64, then three times more
with query, key, value, the softmax weights and the sum of dout * out changed at random by as much
as rounding them in the call's type changes them, and once in float32. An element may be off by the
largest change in its row, or by half of the tensor's largest, times 8 (16 in float32 and float64,
where long sums round too), and by one step of its 16-bit type or 4 of a wider one. NaN and
infinities must be where the formula has them. Where torch allows products of float32 in TF32 or
bfloat16, operands are changed by as much. Exponentials and others that a mod computes in a
narrower type than the formula's are changed by a step of that type. Nothing here knows how a
backend computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyflex.mod_graph.operations import RECORDS
from anyflex.testing.attention_case import AttentionCase, Drawn
from anyflex.testing.dropout_mask import kept_pairs, seed_of
from anyflex.testing.mods import Mod
from anyflex.testing.oracle import dense_attention, dense_mask
from anyflex.testing.results import Results, gradients

__all__ = ["Budgets", "by_oracle", "result_dtype", "wanted_inputs"]

_FACTOR, _FACTOR_WIDE = 8.0, 16.0
"""Factors of the largest change: a kernel's errors add up in another order than the changed
oracle's. The second is for sums in the call's own type, where errors of long sums count too."""
_TRIALS = 3
_STEPS, _STEPS_NARROW = 4, 1
"""Steps of the result's type that are always allowed: approximate exponentials and logarithms in
float32 and float64; a value that is computed wide and rounded once to 16 bits is off by half a
step."""
_UNITS = {"high": 2.0**-10, "medium": 2.0**-9}
"""Relative rounding of product operands: TF32's tensor cores drop the other bits, which is up to a
whole step; bfloat16's are rounded."""


@dataclass(frozen=True)
class Budgets:
    """Oracle's results of a case: the exact values and the allowed errors, by name."""

    exact: Mapping[str, Tensor]
    allowed: Mapping[str, Tensor]


def by_oracle(case: AttentionCase, drawn: Drawn) -> Budgets:
    """Evaluate the dense formula exactly, and again with rounded values."""
    exact = _formula(case, drawn, torch.float64)
    trials = _trials(case, drawn, exact)
    wide = _compute_dtype(case) is case.dtype and not _is_rounded(case)
    unasked = {"lse", "max_scores"} - case.aux
    allowed = {}
    for name in (name for name in exact if name not in unasked):
        gap = torch.zeros_like(exact[name])
        for trial in trials:
            change = (trial[name].double() - exact[name]).abs().nan_to_num(0.0, 0.0, 0.0)
            gap = torch.maximum(gap, change)
        # With a few trials one element's difference is chance: the row's and half of the tensor's
        # count.
        row = gap.amax(-1, keepdim=True).expand_as(gap) if gap.dim() and gap.numel() else gap
        usual = torch.maximum(row, 0.5 * gap.amax()) if gap.numel() else gap
        result = torch.finfo(result_dtype(name, case, drawn))
        steps = _STEPS_NARROW if result.bits == 16 else _STEPS
        size = exact[name].abs().nan_to_num(0.0, 0.0, 0.0)
        if name == "lse":
            # lse is the maximum plus a logarithm, which may cancel.
            size = size + exact["max_scores"].abs().nan_to_num(0.0, 0.0, 0.0)
        allowed[name] = (_FACTOR_WIDE if wide else _FACTOR) * usual
        allowed[name] += steps * result.eps * size + torch.finfo(case.dtype).tiny
    return Budgets({name: exact[name] for name in allowed}, allowed)


def _trials(
    case: AttentionCase, drawn: Drawn, exact: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Results that differ from the exact ones by rounding alone."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shaken = _Shaken(
        _UNITS[case.products] if _is_rounded(case) else torch.finfo(case.dtype).eps / 2,
        torch.finfo(_compute_dtype(case)).eps,
        generator,
        exact,
    )
    trials = [_formula(case, drawn, torch.float64, shaken) for _ in range(_TRIALS)]
    if case.dtype is torch.float64:
        # Where a mod multiplies an index by a Python number the product is of torch's default
        # type, which is float32 for the backend.
        trials.append(_formula(case, drawn, torch.float64, numbers=torch.float32))
    else:
        trials.append(_formula(case, drawn, torch.float32))
    return trials


def _is_rounded(case: AttentionCase) -> bool:
    """Whether operands of products may be rounded further than the call's type is."""
    return case.products != "highest" and case.dtype is torch.float32


def _compute_dtype(case: AttentionCase) -> torch.dtype:
    return torch.promote_types(case.dtype, torch.float32)


_APPROXIMATE = frozenset(
    name
    for record in RECORDS.values()
    if record.approximate
    for name in (record.name, *record.names)
)
"""Names of functions whose last bits differ between two right libraries."""


@dataclass(frozen=True)
class _Shaken:
    """Random changes that are as large as rounding's.

    Args:
        unit: half a step of the call's type, or of `_UNITS`.
        step: one step of the type that scores are computed in.
        generator: of the noise.
        exact: the exact results.
    """

    unit: float
    step: float
    generator: torch.Generator
    exact: Mapping[str, Tensor]

    def tensor(self, tensor: Tensor) -> Tensor:
        """An input, rounded."""
        return tensor * (1 + self.unit * self._noise(tensor))

    def weights(self, weights: Tensor) -> Tensor:
        """Softmax weights, rounded after backward has computed them again as exp(score - lse): the
        error of the exponent is that of rounding score and lse."""
        smallest = torch.finfo(torch.float32).tiny
        exponent = weights.detach().clamp_min(smallest).log().abs()
        exponent = 1 + exponent + self.exact["lse"].abs().nan_to_num(0.0, 0.0, 0.0).unsqueeze(-1)
        return self.tensor(weights * (1 + 2 * self.step * self._noise(weights) * exponent))

    def delta(self, dout: Tensor) -> Tensor:
        """Change of delta: backward subtracts the sum of dout * out with a rounded out, which acts
        like a change of dlse."""
        change = self.unit * (dout * self.exact["out"].nan_to_num(0.0)).abs().sum(-1)
        return change * self._noise(change)

    def dlse(self, dlse: Tensor) -> Tensor:
        """Change of dlse: backward multiplies it by the weights, computed again from a rounded
        lse, so all of a row's are off by one factor."""
        exponent = 1 + self.exact["lse"].abs().nan_to_num(0.0, 0.0, 0.0)
        return dlse * (1 + 2 * self.step * self._noise(dlse) * exponent)

    def score_mod(self, mod: Callable[..., Any]) -> Callable[..., Any]:
        """A score mod whose approximate functions are off by a step where their type is narrower
        than float64: float64's own are within the changes of scores."""

        def changed(*given: Any) -> Any:
            with _LastBits(self._noise):
                return mod(*given)

        return changed

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype)


class _LastBits(TorchFunctionMode):
    """Changes results of narrow approximate functions in the body by a step of their type."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._change = noise

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _APPROXIMATE:
            return result
        if not result.is_floating_point() or result.dtype is torch.float64:
            return result
        return result * (1 + torch.finfo(result.dtype).eps * self._change(result))


def _formula(
    case: AttentionCase,
    drawn: Drawn,
    dtype: torch.dtype,
    shaken: _Shaken | None = None,
    numbers: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The dense formula.

    Args:
        dtype: the type of the computation.
        shaken: changes inputs, weights and dlse.
        numbers: type of integers that meet a Python float, if not `dtype`.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype if numbers is None else numbers)
    try:
        query, key, value = (
            drawn.tensors[name].detach().cpu().to(dtype) for name in ("query", "key", "value")
        )
        if shaken is not None and case.rounded_inputs:
            query, key, value = (shaken.tensor(tensor) for tensor in (query, key, value))
        for tensor in (query, key, value):
            tensor.requires_grad_()
        mod = _widened(drawn.mods["score"], dtype) if "score" in drawn.mods else None
        score_mod = None if mod is None else mod.function()
        if shaken is not None and score_mod is not None:
            score_mod = shaken.score_mod(score_mod)
        forward = dense_attention(
            query,
            key,
            value,
            score_mod,
            _live(case, drawn),
            case.scale,
            None if shaken is None else shaken.weights,
            case.dropout_p,
            _kept(case),
        )
        lse, sinks = forward.lse, case.learned_sinks(dtype, query.device)
        if sinks is not None and lse is not None:
            # A sink takes its share of a row's weights, and its value is 0.
            dead = lse == -torch.inf
            left = torch.sigmoid(torch.where(dead, lse, lse - sinks[:, None]))
            forward = dataclasses.replace(forward, out=forward.out * left[..., None])
            lse = torch.where(dead, lse, torch.logaddexp(lse, sinks[:, None]))
        dout = drawn.weights["dout"].cpu().to(dtype) if case.dout else None
        if shaken is not None and dout is not None and _is_rounded(case):
            dout = shaken.tensor(dout)
        dlse = drawn.weights["dlse"].cpu().to(dtype) if case.dlse else None
        if shaken is not None and dlse is not None:
            dlse = shaken.dlse(dlse)
        if shaken is not None and dout is not None and case.rounded_delta:
            delta = shaken.delta(dout)
            dlse = delta if dlse is None else dlse + delta
        grads: dict[str, Tensor] = {}
        if case.gradients:
            inputs = wanted_inputs(case, query, key, value, mod, sinks)
            # A change of delta acts like a gradient of lse with the sinks in it.
            arrived = forward if case.dlse else dataclasses.replace(forward, lse=lse)
            grads = gradients(arrived, inputs, dout, dlse, missing_is_zero=True)
    finally:
        torch.set_default_dtype(previous)
    return Results(forward, grads).named()


def _live(case: AttentionCase, drawn: Drawn) -> Tensor | None:
    """Return the dense mask, bool [B, H, Q, KV], structure included."""
    mod = drawn.mods.get("mask")
    if mod is None and case.runs is None:
        return None
    sizes = (case.batch, case.heads, case.q_length, case.kv_length)
    by_mod = dense_mask(None if mod is None else mod.function(), *sizes)
    if case.runs is None:
        return by_mod
    kinds = torch.tensor(case.runs)
    kinds = kinds.repeat_interleave(case.block_size[0], 0).repeat_interleave(case.block_size[1], 1)
    kinds = kinds[: case.q_length, : case.kv_length]
    return (kinds == 1) | ((kinds == 2) & by_mod)


def _kept(case: AttentionCase) -> Tensor | None:
    if not case.dropout_p:
        return None
    sizes = (case.batch, case.heads, case.q_length, case.kv_length)
    return kept_pairs(seed_of(case.seed), case.dropout_p, *sizes)


def _widened(mod: Mod, dtype: torch.dtype) -> Mod:
    leaves = {
        name: leaf.detach().to(torch.promote_types(dtype, leaf.dtype)).requires_grad_()
        if leaf.requires_grad
        else leaf
        for name, leaf in mod.leaves.items()
    }
    return mod.with_leaves(leaves)


def result_dtype(name: str, case: AttentionCase, drawn: Drawn) -> torch.dtype:
    if name in ("lse", "max_scores", "dsinks"):
        return torch.promote_types(case.dtype, torch.float32)
    learned = drawn.mods["score"].learned if "score" in drawn.mods else {}
    return learned[name].dtype if name in learned else case.dtype


def wanted_inputs(
    case: AttentionCase,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mod: Mod | None,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    named = {"q": query, "k": key, "v": value}
    inputs = {f"d{name}": named[name] for name in "qkv" if name in case.gradients}
    if mod is not None and "captured" in case.gradients:
        inputs |= mod.learned
    if sinks is not None:
        inputs["dsinks"] = sinks
    return inputs
