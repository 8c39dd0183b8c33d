"""The presets of ``anyflex bench``, as data."""

from __future__ import annotations

from collections.abc import Mapping

from anyflex.bench.case import TF32, BenchCase, Direction

__all__ = ["PRESETS"]

_TRAINING: tuple[Direction, ...] = ("forward", "backward")
_TOKENS = 32768
_HIDDEN = 2048

_BY_HEAD = ",".join(str(64 << head % 8) for head in range(16))
_PATTERNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "full": ((), ()),
    "causal": (("causal",), ()),
    "alibi": (("causal",), ("alibi",)),
    "softcap": (("causal",), ("softcap:30.0",)),
    "window": (("causal_window:1024",), ()),
    "documents": (("random_documents:200,1800", "causal"), ()),
    "prefix": (("prefix_lm:1000",), ()),
    "window 4096": (("causal_window:4096",), ()),
    "window to both sides": (("sliding_window:512,512",), ()),
    "window by head": ((f"causal_window:[{_BY_HEAD}]",), ()),
    "blocks 10 %": (("random_blocks:10",), ()),
    "blocks 1 %": (("random_blocks:1",), ()),
    "documents, softcap, alibi": (
        ("random_documents:200,1800", "causal"),
        ("softcap:30.0", "alibi"),
    ),
    "neighbourhood 64x64": (("neighbourhood:(64,64),13",), ()),
    "neighbourhood 16x16x16": (("neighbourhood:(16,16,16),5",), ()),
    "tree": (("random_tree",), ()),
    "causal bottom right": (("causal_bottom_right",), ()),
    "full, alibi": ((), ("alibi",)),
    "T5": (("causal",), ("random_t5:32",)),
    "image bias": ((), ("random_image_bias:64",)),
    "dense bias": ((), ("random_bias",)),
}
"""name -> (masks, mods)."""


def _case(
    name: str,
    batch: int,
    heads: int,
    length: int,
    width: int,
    *,
    kv_heads: int = 0,
    kv_length: int = 0,
    value_width: int = 0,
    dtype: str = "bfloat16",
    directions: tuple[Direction, ...] = _TRAINING,
) -> BenchCase:
    masks, mods = _PATTERNS[name]
    kv_heads = kv_heads or heads
    shared = f" GQA {heads}/{kv_heads}" if kv_heads != heads else ""
    keys = f"/{kv_length}" if kv_length else ""
    values = f"/{value_width}" if value_width else ""
    return BenchCase(
        f"{name} B{batch} H{heads} S{length}{keys} D{width}{values}{shared} {dtype}",
        (batch, heads, length, width),
        (batch, kv_heads, kv_length or length, width),
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
        _case(pattern, _TOKENS // length, _HIDDEN // width, length, width)
        for width in (128, 64)
        for length in (2048, 8192, 16384)
        for pattern in ("full", "causal")
    ),
    *(
        _case(pattern, 4, 16, 8192, 128)
        for pattern in ("alibi", "softcap", "window", "documents", "prefix")
    ),
    _case("causal", 4, 32, 8192, 128, kv_heads=8),
    _decode(1, 32768),
    _decode(16, 8192),
    _decode(64, 4096),
    _case("causal", 1, 16, 512, 128),
)

_HEADS = {96: 16, 192: 8, 256: 8}
_WIDTHS = (
    *(
        _case(pattern, 4, _HEADS[width], 4096, width)
        for width in (256, 192, 96)
        for pattern in ("full", "causal")
    ),
    # Latent attention, as DeepSeek's models train it.
    *(_case(pattern, 4, 16, 4096, 192, value_width=128) for pattern in ("full", "causal")),
    *(
        _case(pattern, 4, _HEADS[width], 4096, width)
        for width in (256, 96)
        for pattern in ("alibi", "softcap", "window", "documents")
    ),
    _case("causal", 4, 8, 4096, 256, kv_heads=2),
)

_TF32 = (
    *(
        _case(pattern, 4, 8 if width == 256 else 16, 4096, width, dtype=TF32)
        for width in (64, 128, 192, 256)
        for pattern in ("full", "causal")
    ),
    *(
        _case(pattern, 4, 16, 4096, 128, dtype=TF32)
        for pattern in ("alibi", "softcap", "window", "documents")
    ),
    _case("causal", 4, 16, 4096, 128, kv_heads=4, dtype=TF32),
)

_FORWARD: tuple[Direction, ...] = ("forward",)
_STRANGERS = (
    _case("causal", 2, 32, 8192, 128, kv_heads=1),
    _case("image bias", 4, 16, 4096, 64),
    _case("T5", 4, 16, 4096, 64),
    # The same calls without their biases.
    *(_case(pattern, 4, 16, 4096, 64) for pattern in ("full", "causal")),
    _case("causal", 4, 16, 4096, 96),
    _case("causal", 4, 16, 4096, 192, value_width=128),
    _case("causal", 8, 16, 3000, 128),
    _case("full", 64, 16, 300, 64),
    _case("window 4096", 1, 32, 32768, 128, kv_heads=8),
    _case("causal", 4, 32, 4096, 64, dtype="float16"),
    _case("causal", 1, 8, 65536, 128),
    # Head dims between the tiles'.
    *(_case("causal", 4, 16, 4096, width) for width in (72, 80, 112)),
    _case("causal", 2, 32, 4096, 64, kv_heads=1),
    _case("window to both sides", 4, 16, 8192, 128),
    _case("full", 8, 16, 4096, 64, kv_length=77),
    _case("causal", 1, 32, 512, 128, kv_heads=8),
    _case("dense bias", 4, 16, 4096, 64),
    _case("neighbourhood 16x16x16", 4, 16, 4096, 64),
    _case("neighbourhood 64x64", 4, 16, 4096, 64),
    _case("blocks 10 %", 2, 16, 16384, 128),
    _case("blocks 1 %", 2, 16, 16384, 128),
    _case("documents, softcap, alibi", 4, 16, 8192, 128),
    _case("documents", 4, 32, 8192, 64),
    _case("window by head", 4, 16, 8192, 128),
    _case("tree", 16, 32, 64, 128, kv_heads=8, kv_length=8192, directions=_FORWARD),
    _case("causal bottom right", 16, 32, 4, 128, kv_heads=8, kv_length=8192, directions=_FORWARD),
    _case("full, alibi", 16, 32, 1, 128, kv_heads=8, kv_length=8192, directions=_FORWARD),
    _case("full", 16, 16, 1, 256, kv_heads=4, kv_length=8192, directions=_FORWARD),
)

_CPU = (
    *(
        _case("causal", 1, 8, length, width, dtype=dtype, directions=("forward",))
        for dtype in ("float32", "bfloat16")
        for length in (1024, 2048, 4096)
        for width in (64, 128)
    ),
    *(
        _case(pattern, 1, 8, 2048, 64, dtype="float32", directions=("forward",))
        for pattern in ("full", "alibi", "softcap", "window", "documents", "prefix")
    ),
    _case("causal", 1, 8, 2048, 64, kv_heads=2, dtype="float32"),
)

PRESETS: Mapping[str, tuple[BenchCase, ...]] = {
    "cpu-quick": (
        _case("full", 1, 4, 512, 64, dtype="float32"),
        _case("causal", 1, 4, 512, 64, dtype="float32"),
        _case("alibi", 1, 4, 512, 64, dtype="float32", directions=("forward",)),
    ),
    "cpu": _CPU,
    "h200": _H200,
    "h200-plain": _H200[:12],
    "h200-mods": _H200[12:18],
    "h200-decode": _H200[18:21],
    "h200-small": _H200[21:],
    "h200-widths": _WIDTHS,
    "h200-tf32": _TF32,
    "h200-strangers": _STRANGERS,
}
"""name -> cases. The parts of ``h200`` can be run alone. ``h200-widths`` (head dims other than the
two that most models have), ``h200-tf32`` and ``h200-strangers`` (shapes and patterns that kernels
weren't tuned on) aren't parts of it."""
