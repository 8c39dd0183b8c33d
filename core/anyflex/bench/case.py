"""Measured calls: a call as data, and the tensors and functions that it is made with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import anyflex
from anyflex.bench.drawn_patterns import PatternCall
from anyflex.bench.patterns import make_mask_mod, make_score_mod
from anyflex.testing.attention_case import Layout, laid_out
from anyflex.tracing.trace import trace_mod

__all__ = ["DIRECTIONS", "TF32", "BenchCase", "Direction", "Inputs", "make_inputs"]

Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")
TF32 = "tf32"

_BLOCK = 128
_SMALL = 3 * _BLOCK
"""Maximum length of the call that results are checked on. It ends at a block's border, or as many
tokens behind one as the measured call."""
_HEADS = 64
"""Target number of query heads, over all batch entries, of the checked call. With this many it has
more tiles than a GPU has multiprocessors, as the measured calls have; calls with fewer may run
other kernels."""
_FEW_TILES, _SOME_TILES, _MANY_ROWS = 231, 528, 32768
"""On a GPU with 132 multiprocessors backward splits the query heads of a KV head over programs
where all KV heads together have fewer tiles of keys than the first number, or no more than the
second and as many query rows a KV head as the third."""
_DRAWN_ON_HOST = 1 << 22
"""Elements up to which random numbers are drawn on the host, the same for every device."""
_PAIRS = 1 << 24
"""Number of pairs that the mask is evaluated at in one step."""


@dataclass(frozen=True)
class BenchCase:
    """A call of `flex_attention` that is measured.

    Args:
        name: identifies the call.
        q_shape: [B, Hq, L, E].
        kv_shape: [B, Hkv, S, E], of key.
        dtype: of query, key and value: ``"bfloat16"``; ``"tf32"`` is float32 where torch allows
            its products to be rounded to that.
        masks, mods: as the command line spells them; masks all hold, mods follow one another.
        directions: of `DIRECTIONS`. ``"both"`` is a forward and its backward.
        block_size: of the block mask.
        value_head_dim: Ev; 0: as E.
        layout: of query, key, value and out's gradient in memory.
    """

    name: str
    q_shape: tuple[int, int, int, int]
    kv_shape: tuple[int, int, int, int]
    dtype: str = "bfloat16"
    masks: tuple[str, ...] = ()
    mods: tuple[str, ...] = ()
    directions: tuple[Direction, ...] = ("forward",)
    block_size: int = 128
    value_head_dim: int = 0
    layout: Layout = "dense"

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """[B, Hkv, S, Ev]."""
        return (*self.kv_shape[:3], self.value_head_dim or self.kv_shape[3])

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """[B, Hq, L, Ev]."""
        return (*self.q_shape[:3], self.v_shape[3])

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's object."""
        found: torch.dtype = torch.float32 if self.dtype == TF32 else getattr(torch, self.dtype)
        return found

    @property
    def products(self) -> str:
        """Precision that `torch.set_float32_matmul_precision` is set to for the case."""
        return "high" if self.dtype == TF32 else "highest"

    @property
    def learns(self) -> bool:
        """Whether some direction is or has a backward."""
        return self.directions != ("forward",)

    def pattern_call(self, device: torch.device) -> PatternCall:
        """Return what the case's masks and mods are made for."""
        shape = (*self.q_shape[:3], self.kv_shape[2])
        return PatternCall(shape, device, self.torch_dtype, self.learns)

    @property
    def gqa(self) -> bool:
        """Whether query heads share KV heads."""
        return self.q_shape[1] != self.kv_shape[1]

    def small(self) -> BenchCase:
        """Return a case of the same kind whose dense formula is cheap."""
        batch, heads, q_length, width = self.q_shape
        kv_heads, kv_length = self.kv_shape[1:3]
        ratio = heads // kv_heads
        few = min(kv_heads, max(_HEADS // 2 // ratio, 1))
        # A long call of few entries has many tiles too.
        most = batch * max(q_length // _SMALL, 1)
        entries = min(most, max(_HEADS // (few * ratio), 1))
        length = _shortened(kv_length)
        grouped = ratio > 1 and self.learns
        if grouped and not self.splits_query_heads():
            entries = -(-_FEW_TILES // (few * -(-length // self._keys_of_tile())))
        return dataclasses.replace(
            self,
            q_shape=(entries, few * ratio, _shortened(q_length), width),
            kv_shape=(entries, few, length, width),
        )

    def splits_query_heads(self) -> bool:
        """Return whether backward splits the query heads of a KV head on a GPU that has as many
        multiprocessors as a Hopper."""
        (batch, heads, q_length, _), (_, kv_heads, kv_length, _) = self.q_shape, self.kv_shape
        tiles = batch * kv_heads * -(-kv_length // self._keys_of_tile())
        rows = heads // kv_heads * q_length
        return tiles < _FEW_TILES or (tiles <= _SOME_TILES and rows >= _MANY_ROWS)

    def _keys_of_tile(self) -> int:
        return 128 if max(self.q_shape[3], self.v_shape[3]) <= 128 else 64

    def flops(self, direction: Direction, share: float) -> float:
        """Floating-point operations of the products at live pairs: two of them forward, five
        backward.

        Args:
            share: of the pairs that are live, 0 to 1.
        """
        batch, heads, q_length, width = self.q_shape
        of_column = 2.0 * batch * heads * q_length * self.kv_shape[2] * share
        # Scores and weights times values; scores again, dQ and dK, dout times values and dV.
        forward = width + self.v_shape[3]
        backward = 3 * width + 2 * self.v_shape[3]
        columns = {"forward": forward, "backward": backward, "both": forward + backward}
        return of_column * columns[direction]

    def kv_bytes(self) -> int:
        """Bytes of key and value, which a decoding step has to read."""
        elements = math.prod(self.kv_shape) + math.prod(self.v_shape)
        return elements * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Inputs:
    """A case on a device.

    Args:
        case: the case that they belong to.
        query, key, value: random normal, requiring gradients where the case has a backward.
        dout: the incoming gradient of backward, shaped like out.
        score_mod, mask_mod: or None.
        block_mask: of `mask_mod`.
        share: of the pairs that are live.
        learned: tensors that `score_mod` captures and that require gradients.
    """

    case: BenchCase
    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    block_mask: anyflex.BlockMask | None
    share: float
    learned: tuple[Tensor, ...]


def make_inputs(
    case: BenchCase, device: torch.device, *, seed: int = 0, on_host: bool = False
) -> Inputs:
    """Return a case's tensors and functions, the same for the same seed, on the same device.

    Args:
        on_host: random numbers are drawn on the host, however many, and so are the same on every
            device.

    Raises:
        ArgumentError, ArgumentTypeError: from the functions that the case names.
    """
    shapes = (case.q_shape, case.kv_shape, case.v_shape, case.out_shape)
    # Drawing large tensors on the host would take seconds.
    large = max(math.prod(shape) for shape in shapes) > _DRAWN_ON_HOST
    source = device if large and not on_host else torch.device("cpu")
    generator = torch.Generator(source).manual_seed(seed)
    # Never zeros: a chip that multiplies zeros takes less power, and runs faster.
    query, key, value, dout = (
        laid_out(
            torch.randn(shape, generator=generator, device=source).to(device, case.torch_dtype),
            case.layout,
        )
        for shape in shapes
    )
    if case.learns:
        for tensor in (query, key, value):
            tensor.requires_grad_()
    call = case.pattern_call(device)
    mask_mod = make_mask_mod(case.masks, call)
    score_mod = make_score_mod(case.mods, call)
    learned: list[Tensor] = []
    if score_mod is not None:
        captured = trace_mod(score_mod, "score", device=device).captured
        learned = [tensor for tensor in captured if tensor.requires_grad]
    mask = None
    share = 1.0
    if mask_mod is not None:
        mask = anyflex.create_block_mask(
            mask_mod, None, *call.shape[1:], device=device, BLOCK_SIZE=case.block_size
        )
        share = _live_share(mask_mod, call)
    return Inputs(case, query, key, value, dout, score_mod, mask_mod, mask, share, tuple(learned))


def _shortened(length: int) -> int:
    return length if length <= _SMALL else _SMALL - -length % _BLOCK


def _live_share(mask_mod: Callable[..., Any], call: PatternCall) -> float:
    """Return the share of the pairs, over all heads, at which the mask is true. Masks of the
    command line are the same for each batch entry."""
    _, heads, q_length, kv_length = call.shape
    if q_length * kv_length == 0:
        return 0.0
    zero = torch.zeros((), dtype=torch.int64, device=call.device)
    kv_idx = torch.arange(kv_length, device=call.device)
    h = torch.arange(heads, device=call.device).reshape(heads, 1, 1)
    rows = max(1, _PAIRS // kv_length)
    share = 0.0
    for begin in range(0, q_length, rows):
        q_idx = torch.arange(begin, min(begin + rows, q_length), device=call.device).unsqueeze(1)
        # Dimensions of size 1, or that are absent, don't change the mean.
        kept = mask_mod(zero, h, q_idx, kv_idx)
        share += int(kept.sum()) / kept.numel() * len(q_idx) / q_length
    return share
