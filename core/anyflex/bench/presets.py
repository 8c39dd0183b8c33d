"""The presets of ``anyflex bench``, as data."""

from __future__ import annotations

from collections.abc import Mapping

from anyflex.bench.case import TF32, BenchCase, Direction

__all__ = ["PRESETS"]

_TRAINING: tuple[Direction, ...] = ("forward", "backward")
_TOKENS = 32768
_HIDDEN = 2048

_PATTERNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((), ()),
    "causal": (("causal",), ()),
    "alibi": (("causal",), ("alibi",)),
    "softcap": (("causal",), ("softcap:30.0",)),
    "window": (("causal_window:1024",), ()),
    "documents": (("random_documents:200,1800", "causal"), ()),
    "prefix": (("prefix_lm:1000",), ()),
}
"""name -> (masks, mods)."""


def _square(
    name: str,
    batch: int,
    heads: int,
    length: int,
    width: int,
    *,
    kv_heads: int = 0,
    value_width: int = 0,
    dtype: str = "bfloat16",
    directions: tuple[Direction, ...] = _TRAINING,
) -> BenchCase:
    masks, mods = _PATTERNS[name]
    kv_heads = kv_heads or heads
    shared = f" GQA {heads}/{kv_heads}" if kv_heads != heads else ""
    values = f"/{value_width}" if value_width else ""
    return BenchCase(
        f"{name} B{batch} H{heads} S{length} D{width}{values}{shared} {dtype}",
        (batch, heads, length, width),
        (batch, kv_heads, length, width),
        dtype,
        masks,
        mods,
        directions,
        value_head_dim=value_width,
    )


def _decode(batch: int, length: int) -> BenchCase:
    return BenchCase(
        f"decode B{batch} S{length} D128 GQA 32/8",
        (batch, 32, 1, 128),
        (batch, 8, length, 128),
    )


_H200 = (
    *(
        _square(pattern, _TOKENS // length, _HIDDEN // width, length, width)
        for width in (128, 64)
        for length in (2048, 8192, 16384)
        for pattern in ("full", "causal")
    ),
    *(
        _square(pattern, 4, 16, 8192, 128)
        for pattern in ("alibi", "softcap", "window", "documents", "prefix")
    ),
    _square("causal", 4, 32, 8192, 128, kv_heads=8),
    _decode(1, 32768),
    _decode(16, 8192),
    _decode(64, 4096),
    _square("causal", 1, 16, 512, 128),
)

_HEADS = {96: 16, 192: 8, 256: 8}
_WIDTHS = (
    *(
        _square(pattern, 4, _HEADS[width], 4096, width)
        for width in (256, 192, 96)
        for pattern in ("full", "causal")
    ),
    # Latent attention, as DeepSeek's models train it.
    *(_square(pattern, 4, 16, 4096, 192, value_width=128) for pattern in ("full", "causal")),
    *(
        _square(pattern, 4, _HEADS[width], 4096, width)
        for width in (256, 96)
        for pattern in ("alibi", "softcap", "window", "documents")
    ),
    _square("causal", 4, 8, 4096, 256, kv_heads=2),
)

_TF32 = (
    *(
        _square(pattern, 4, 8 if width == 256 else 16, 4096, width, dtype=TF32)
        for width in (64, 128, 192, 256)
        for pattern in ("full", "causal")
    ),
    *(
        _square(pattern, 4, 16, 4096, 128, dtype=TF32)
        for pattern in ("alibi", "softcap", "window", "documents")
    ),
    _square("causal", 4, 16, 4096, 128, kv_heads=4, dtype=TF32),
)

_CPU = (
    *(
        _square("causal", 1, 8, length, width, dtype=dtype, directions=("forward",))
        for dtype in ("float32", "bfloat16")
        for length in (1024, 2048, 4096)
        for width in (64, 128)
    ),
    *(
        _square(pattern, 1, 8, 2048, 64, dtype="float32", directions=("forward",))
        for pattern in ("full", "alibi", "softcap", "window", "documents", "prefix")
    ),
    _square("causal", 1, 8, 2048, 64, kv_heads=2, dtype="float32"),
)

PRESETS: Mapping[str, tuple[BenchCase, ...]] = {
    "cpu-quick": (
        _square("full", 1, 4, 512, 64, dtype="float32"),
        _square("causal", 1, 4, 512, 64, dtype="float32"),
        _square("alibi", 1, 4, 512, 64, dtype="float32", directions=("forward",)),
    ),
    "cpu": _CPU,
    "h200": _H200,
    "h200-plain": _H200[:12],
    "h200-mods": _H200[12:18],
    "h200-decode": _H200[18:21],
    "h200-small": _H200[21:],
    "h200-widths": _WIDTHS,
    "h200-tf32": _TF32,
}
"""name -> cases. The parts of ``h200`` can be run alone. ``h200-widths`` (head dims other than the
two that most models have) and ``h200-tf32`` aren't parts of it."""
