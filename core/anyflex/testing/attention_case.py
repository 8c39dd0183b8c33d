"""One comparison of a backend with the oracle, as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from anyflex.plugin import Capabilities
from anyflex.tensors.torch_versions import negated_view
from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Mod, Sizes
from anyflex.testing.mods.kit_mods import KIT_MASKS, KIT_MODS
from anyflex.testing.mods.mod import Form
from anyflex.testing.mods.operation_mods import OPERATION_MODS

__all__ = [
    "ALL",
    "LSE",
    "MAXIMA",
    "QKV",
    "AttentionCase",
    "Drawn",
    "Layout",
    "declared_head_dim",
    "laid_out",
]

QKV = frozenset({"q", "k", "v"})
ALL = QKV | {"captured"}
"""Gradients that a case may ask for."""
LSE, MAXIMA = frozenset({"lse"}), frozenset({"max_scores"})
"""Auxiliary outputs that it may ask for."""

_OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.float64)

Layout = Literal[
    "dense", "heads_last", "last_stride_2", "offset", "expanded_heads", "mixed", "negated"
]
"""Layouts of q, k, v and the gradients of out and lse in memory: contiguous; stored as (B, L, H,
E); each second element of a wider last dimension; a view inside of a larger tensor; one head
repeated by stride 0; key, value and the gradients in three of these ways; as their negatives, with
torch's negative bit, like the imaginary part of a conjugated tensor."""

_MIXED: dict[str, Layout] = {"key": "heads_last", "value": "offset", "dout": "last_stride_2"}

Values = Callable[[dict[str, Tensor]], None]
"""Changes the drawn tensors in place: query, key, value, dout and dlse by name, float64 here."""


@dataclass(frozen=True)
class AttentionCase:
    """A call of `flex_attention` and the results that are compared.

    Args:
        name: ``"masks/prefix_batch"``: the group, then what is special.
        shows: the property that fails here, a sentence.
        batch, heads, kv_heads, q_length, kv_length, head_dim, value_head_dim: sizes.
        kv_batch: of key and value, None for `batch`.
        dtype: of query, key and value.
        insists: `dtype` is the point of the case, see `fitted`.
        products: what torch allows products of float32 to be rounded to while it runs, in the
            words of `torch.set_float32_matmul_precision`. The budget allows as much.
        score_mod, mask_mod: names in `SCORE_MODS`, `KIT_MODS` or `OPERATION_MODS`, and in
            `MASK_MODS` or `KIT_MASKS`; or None.
        runs: instead of a mask mod's own structure, kinds int [B', H', Qb][Kb] (0 not visited,
            1 FULL, 2 PARTIAL) as nested tuples: structure wins over the mask mod. Without a 2 no
            mask mod is needed.
        block_size: (q, kv).
        scale: None for the default.
        dropout_p: probability with which weights are dropped, by the first seed that is drawn
            after ``torch.manual_seed(seed)``.
        sinks: a number for each query head; they learn where there are gradients.
        gradients: of "q", "k", "v", "captured".
        aux: of "lse", "max_scores".
        dout, dlse: whether a gradient arrives there.
        of_sums: those gradients are one number each, repeated by strides of 0, as those of sums.
        layout: of q, k, v and those gradients.
        form: how the mods are written.
        values: changes the drawn tensors.
        rounded_delta: the budget allows a backward that reads out after it was rounded.
        rounded_inputs: the budget allows query, key and value to be rounded again, as those do
            that multiply one of them by the scale.
        quick: in the subset that CI runs.
        required: names of the sets ("forward", "backward", "decode") that `--require` may name
            and that the case belongs to.
        seed: of the drawn tensors.
    """

    name: str
    shows: str
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_length: int = 40
    kv_length: int = 40
    head_dim: int = 16
    value_head_dim: int = 16
    kv_batch: int | None = None
    dtype: torch.dtype = torch.float32
    insists: bool = False
    products: Literal["highest", "high", "medium"] = "highest"
    score_mod: str | None = None
    mask_mod: str | None = None
    runs: tuple[tuple[int, ...], ...] | None = None
    block_size: tuple[int, int] = (16, 16)
    scale: float | None = None
    dropout_p: float = 0.0
    sinks: tuple[float, ...] | None = None
    gradients: frozenset[str] = frozenset()
    aux: frozenset[str] = LSE | MAXIMA
    dout: bool = True
    dlse: bool = False
    of_sums: bool = False
    layout: Layout = "dense"
    form: Form = "function"
    values: Values | None = None
    rounded_delta: bool = True
    rounded_inputs: bool = True
    quick: bool = True
    required: frozenset[str] = frozenset()
    seed: int = 0

    @property
    def sizes(self) -> Sizes:
        """Sizes that the shapes of captured tensors depend on."""
        group = self.heads // self.kv_heads
        return Sizes(self.batch, self.heads, group, self.q_length, self.kv_length)

    def fitted(self, can: Capabilities) -> AttentionCase:
        """Return the case with a type and head dims that a backend declares.

        A case of float32 that doesn't insist on it is run in the first declared type of bfloat16,
        float16 and float64 where float32 isn't declared. A head dim is raised to the next one that
        the rule allows. Properties that can't be fitted stay, and are refused.
        """
        dtype = self.dtype
        if dtype is torch.float32 and not self.insists and dtype not in can.dtypes:
            dtype = next((other for other in _OTHER_DTYPES if other in can.dtypes), dtype)
        step = can.head_dim_multiple
        head_dim, value_head_dim = (
            -(-max(dim, can.head_dim_min) // step) * step
            for dim in (self.head_dim, self.value_head_dim)
        )
        return dataclasses.replace(
            self, dtype=dtype, head_dim=head_dim, value_head_dim=value_head_dim
        )

    def reduced(self, can: Capabilities) -> tuple[AttentionCase, ...]:
        """Return the case with those gradients and auxiliary outputs that a backend declares: two
        cases where it gives lse and gradients, but takes no gradient of lse."""
        gradients = self.gradients if can.core_backward else self.gradients & can.gradients
        aux = self.aux & can.aux
        learns_lse = can.core_backward or "lse" in can.gradients
        dlse = self.dlse and learns_lse and "lse" in aux
        gradients = gradients if self.dout or dlse else frozenset()
        least = dataclasses.replace(self, gradients=gradients, aux=aux, dlse=dlse)
        if not gradients or learns_lse or "lse" not in aux:
            return (least,)
        return (
            dataclasses.replace(least, aux=aux - LSE),
            dataclasses.replace(least, gradients=frozenset()),
        )

    def learned_sinks(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the sinks, which require grad where they learn, or None."""
        if self.sinks is None:
            return None
        learns = bool(self.gradients)
        return torch.tensor(self.sinks, dtype=dtype, device=device, requires_grad=learns)

    def draw(self, device: torch.device) -> Drawn:
        """Draw the inputs."""
        generator = torch.Generator().manual_seed(self.seed)
        kv_batch = self.batch if self.kv_batch is None else self.kv_batch
        shapes: dict[str, tuple[int, ...]] = {
            "query": (self.batch, self.heads, self.q_length, self.head_dim),
            "key": (kv_batch, self.kv_heads, self.kv_length, self.head_dim),
            "value": (kv_batch, self.kv_heads, self.kv_length, self.value_head_dim),
        }
        shapes["dout"] = (*shapes["query"][:3], self.value_head_dim)
        shapes["dlse"] = shapes["query"][:3]
        exact = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        if self.values is not None:
            self.values(exact)
        wide = torch.promote_types(self.dtype, torch.float32)
        mods = {}
        for kind, table, name in (
            ("score", {**SCORE_MODS, **KIT_MODS, **OPERATION_MODS}, self.score_mod),
            ("mask", {**MASK_MODS, **KIT_MASKS}, self.mask_mod),
        ):
            if name is not None:
                mods[kind] = table[name].make(self.sizes, generator, wide)
        weights = {
            "dout": exact.pop("dout").to(self.dtype),
            "dlse": exact.pop("dlse").to(wide),
        }
        tensors = {
            name: laid_out(tensor.to(self.dtype).to(device), self._layout_of(name))
            for name, tensor in exact.items()
        }
        if self.of_sums:
            ones = {
                name: torch.ones((), dtype=w.dtype, device=device) for name, w in weights.items()
            }
            return Drawn(tensors, mods, {n: ones[n].expand(w.shape) for n, w in weights.items()})
        dout = laid_out(weights["dout"].to(device), self._layout_of("dout"))
        dlse = laid_out(weights["dlse"].to(device).unsqueeze(-1), self._layout_of("dlse"))
        return Drawn(tensors, mods, {"dout": dout, "dlse": dlse.squeeze(-1)})

    def _layout_of(self, name: str) -> Layout:
        return _MIXED.get(name, "dense") if self.layout == "mixed" else self.layout


@dataclass(frozen=True)
class Drawn:
    """A case's inputs.

    Args:
        tensors: query, key, value on the device, in their layout, without gradients.
        mods: "score" and "mask", on the CPU.
        weights: dout and dlse on the device.
    """

    tensors: Mapping[str, Tensor]
    mods: Mapping[str, Mod]
    weights: Mapping[str, Tensor] = field(default_factory=dict)


def declared_head_dim(can: Capabilities, wanted: int) -> int:
    """Return the largest declared head dim up to `wanted`, or the smallest one."""
    step = can.head_dim_multiple
    least = -(-max(can.head_dim_min, 1) // step) * step
    return max(least, min(wanted, can.head_dim_max) // step * step)


def laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the values of a contiguous tensor [B, H, L, E] in another layout of memory."""
    if layout == "heads_last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "last_stride_2":
        wide = tensor.new_full((*tensor.shape[:3], 2 * tensor.shape[3]), math.nan)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "offset":
        longer = tensor.new_full(
            (tensor.shape[0], tensor.shape[1], tensor.shape[2] + 3, tensor.shape[3] + 1), math.nan
        )
        longer[:, :, 2:-1, 1:] = tensor
        return longer[:, :, 2:-1, 1:]
    if layout == "expanded_heads":
        return tensor[:, :1].expand(tensor.shape)
    if layout == "negated":
        return negated_view(-tensor)
    return tensor
