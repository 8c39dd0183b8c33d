"""Small calls that together launch every kernel, and the dense formula of each in float64.

Shapes have tails of rows, keys and columns. A tensor's strides all differ, and so do the keys that
batches and heads see, so that no index can stand for another one unseen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from emulated_backend import Emulated
from packed_calls import PackedCall
from torch import Tensor

import anyflex
from anyflex.plugin import Artifacts, Call, GradInputs, Grads, Kernel, Outputs, Saved, Spec
from anyflex_mps.kernel import MpsKernel
from anyflex_mps.shaders import Shaders

__all__ = ["CALLS", "Poisoned", "SmallCall", "wrong_results"]

Mod = Callable[..., Tensor]
_RELATIVE_ERROR = 5e-6
"""Largest error relative to a result's largest finite element. The kernels' own is below 1e-6,
that of exact sums without their carry 4e-5."""


class _PoisonedKernel(MpsKernel):
    """Writes NaN wherever a launch has to write: an earlier call's results may be there."""

    def forward(self, call: Call, out: Outputs) -> None:
        for tensor in (out.out, out.lse, out.max_scores, *out.saved, *out.workspace):
            if tensor is not None:
                tensor.fill_(torch.nan)
        super().forward(call, out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        for tensor in (grads.dq, grads.dk, grads.dv, grads.workspace[0]):
            if tensor is not None:
                tensor.fill_(torch.nan)
        super().backward(call, saved, grad, grads)


class Poisoned(Emulated):
    """Backend whose kernels begin with NaN in all that they must write."""

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        self.check_gpu(spec.dtype)
        return _PoisonedKernel(spec, Shaders(self.compile_shader()), self.cores())


@dataclass(frozen=True, eq=False)
class SmallCall:
    """A call of float32 tensors.

    Args:
        query, key, value: its tensors.
        slope: captured tensor that is indexed by the head: a row's gradients are one addition.
        position: captured tensor that is indexed by the key.
        mask: mask mod.
        mask_heads: heads of the block mask; of fewer than 2, a KV head's query heads are decoded
            together.
        blocks: rows and keys of the mask's blocks.
        trains: whether gradients are wanted.
        repeats: whether captured tensors' gradients have to repeat bit for bit.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    slope: Tensor
    position: Tensor
    mask: Mod
    mask_heads: int
    blocks: tuple[int, int]
    trains: bool = True
    repeats: bool = False

    scale = 0.3

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Tensors that gradients are of, by the gradients' names."""
        tensors = self.query, self.key, self.value, self.slope, self.position
        names = "dq", "dk", "dv", "gradient of slope", "gradient of position"
        return dict(zip(names, tensors, strict=True))

    @functools.cached_property
    def upstream(self) -> tuple[Tensor, Tensor]:
        """Gradients of out and lse; that of lse is 0 in a row without a live key."""
        drawn = torch.Generator().manual_seed(1)
        dout = torch.randn((*self.query.shape[:3], self.value.shape[3]), generator=drawn)
        dlse = torch.randn(self.query.shape[:3], generator=drawn)
        return dout, dlse.where(self.live.any(-1), 0.0)

    @functools.cached_property
    def indices(self) -> tuple[Tensor, ...]:
        """b, h, q and k of all pairs, to be broadcast."""
        sizes = *self.query.shape[:3], self.key.shape[2]
        return tuple(
            torch.arange(size).view([-1 if at == axis else 1 for at in range(4)])
            for axis, size in enumerate(sizes)
        )

    @functools.cached_property
    def live(self) -> Tensor:
        """Live pairs [B, H, L, S]."""
        return self.mask(*self.indices).expand(*self.query.shape[:3], self.key.shape[2])

    @functools.cached_property
    def expected(self) -> dict[str, Tensor]:
        """Every result by its name, by the formula."""
        leaves = [tensor.double().requires_grad_(self.trains) for tensor in self.leaves.values()]
        query, key, value, slope, position = leaves
        groups = query.shape[1] // key.shape[1]
        live = self.live[..., None]
        # A pair that isn't live contributes nothing, though its product may be NaN.
        queries = torch.where(live, query[:, :, :, None], 0.0)
        keys = torch.where(live, key.repeat_interleave(groups, 1)[:, :, None], 0.0)
        values = torch.where(live, value.repeat_interleave(groups, 1)[:, :, None], 0.0)
        scores = _score_mod(slope, position)((queries * keys).sum(-1) * self.scale, *self.indices)
        some = self.live.any(-1)
        lowest = scores.masked_fill(~self.live, -torch.inf)
        scores = lowest.masked_fill(~some[..., None], 0.0)
        weights = torch.where(self.live, scores.softmax(-1), 0.0)
        out = (weights[..., None] * values).sum(-2)
        lse = scores.logsumexp(-1).masked_fill(~some, -torch.inf)
        results = {"out": out, "lse": lse, "max_scores": lowest.amax(-1)}
        if self.trains:
            dout, dlse = self.upstream
            total = (out * dout.double()).sum() + torch.where(some, lse * dlse.double(), 0.0).sum()
            results |= zip(self.leaves, torch.autograd.grad(total, leaves), strict=True)
        return {name: result.detach() for name, result in results.items()}

    def results(self) -> dict[str, Tensor]:
        """Every result by its name, by the registered backend."""
        leaves = [tensor.detach().requires_grad_(self.trains) for tensor in self.leaves.values()]
        query, key, value, slope, position = leaves
        mask = anyflex.create_block_mask(
            self.mask, query.shape[0], self.mask_heads, query.shape[2], key.shape[2],
            BLOCK_SIZE=self.blocks,
        )  # fmt: skip
        torch.use_deterministic_algorithms(self.repeats)
        try:
            out, aux = anyflex.flex_attention(
                query, key, value, _score_mod(slope, position), mask,
                scale=self.scale, enable_gqa=True, backend="mps",
                return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
            )  # fmt: skip
            results = {"out": out, "lse": aux.lse, "max_scores": aux.max_scores}
            if self.trains:
                gradients = torch.autograd.grad((out, aux.lse), leaves, self.upstream)
                results |= zip(self.leaves, gradients, strict=True)
        finally:
            torch.use_deterministic_algorithms(False)
        return {name: result.detach() for name, result in results.items()}


def _score_mod(slope: Tensor, position: Tensor) -> Mod:
    return lambda s, b, h, q, k: (
        torch.tanh(s * 0.5) * 3.0 + slope[h] * (q - k + 2 * b) * 0.02 + position[k]
    )


def wrong_results(call: SmallCall | PackedCall) -> list[str]:
    """Return the names of the results that differ from the formula's."""
    wrong = []
    for name, found in call.results().items():
        expected = call.expected[name]
        size = expected.nan_to_num(0.0, 0.0, 0.0).abs().max()
        same = torch.isclose(
            found.double(), expected, rtol=0, atol=_RELATIVE_ERROR * float(size), equal_nan=True
        )
        if not same.all():
            wrong.append(name)
    return wrong


# The calls


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


_DEAD_ROW, _DEAD_KEY = 50, 64
"""In the training calls, a row of head 1 that sees no key, and a key that no row sees."""


def _training(*, repeats: bool = False) -> SmallCall:
    """Return a call that is forward, rows, keys and queries. Two tiles make a block of rows; runs
    of keys are full, partial, and cut by the end of keys; a row and a key have no live pair."""
    rows = _draw(2, 59, 4, 2, 20).transpose(1, 2)[..., 1, :]
    return SmallCall(
        rows,
        _draw(2, 2, 66, 20, 2)[..., 0],
        _draw(2, 2, 66, 12),
        _draw(4),
        _draw(66),
        lambda b, h, q, k: (
            (k <= q + 20 + 6 * h - 9 * b) & ((q != _DEAD_ROW) | (h != 1)) & (k != _DEAD_KEY)
        ),
        4,
        (40, 24),
        repeats=repeats,
    )


def _training_with_dead_rows_and_keys() -> SmallCall:
    """Return a call of the same kernels, in which only rows and keys without a live pair aren't
    finite: the kernels make their second passes, and results are as without them."""
    call = _training()
    query, key, value = call.query.clone(), call.key.clone(), call.value.clone()
    query[:, 1, _DEAD_ROW, 2] = torch.nan
    key[:, :, _DEAD_KEY, 3] = torch.nan
    value[:, :, _DEAD_KEY, 5] = torch.inf
    return replace(call, query=query, key=key, value=value)


def _nonfinite_training() -> SmallCall:
    """Return a call of the same kernels, in which some rows see what isn't finite."""
    call = _training()
    query, key, value = call.query.clone(), call.key.clone(), call.value.clone()
    query[0, 1, 5, 3] = torch.nan
    key[0, 1, 61, 4] = torch.nan
    value[1, 0, 55, 2] = torch.inf
    return replace(call, query=query, key=key, value=value)


def _decoding() -> SmallCall:
    """Return a call of two splits, whose heads are decoded in pairs."""
    return SmallCall(
        _draw(2, 4, 3, 20),
        _draw(2, 2, 530, 20),
        _draw(2, 2, 530, 2, 12)[..., 1, :],
        _draw(4),
        _draw(530),
        lambda b, h, q, k: (k <= 520 + q) & (k > 30 * b),
        1,
        (16, 56),
        trains=False,
    )


def _nonfinite_decoding() -> SmallCall:
    """Return a call of the same kernels, in which some rows see what isn't finite, and one of
    its weights vanishes in float32."""
    call = _decoding()
    value, position = call.value.clone(), call.position.clone()
    value[0, 1, 522, 3] = torch.inf
    value[1, 0, 10, 1] = torch.nan
    position[100] += 150.0
    return replace(call, value=value, position=position)


CALLS = {
    "training": _training(),
    "repeatable training": _training(repeats=True),
    "training with dead rows and keys": _training_with_dead_rows_and_keys(),
    "training beyond finite numbers": _nonfinite_training(),
    "decoding": _decoding(),
    "decoding beyond finite numbers": _nonfinite_decoding(),
}
