"""Table of kernel configs: tiles, warps and stages by target, type and head dim."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from anyflex_triton.arguments import BYTES, LEAST_COPIED
from anyflex_triton.options import STAGES, TILES, WARPS
from anyflex_triton.program import Options

__all__ = [
    "Config",
    "KernelName",
    "Target",
    "Traits",
    "around",
    "config_for",
    "fitted",
    "for_sequences",
    "with_tile",
]

KernelName = Literal["forward", "decode", "keys", "queries"]
Target = Literal["hopper", "ampere", "blackwell", "amd", "xpu", "interpreter"]


@dataclass(frozen=True)
class Config:
    """Tiles and compiler options of one kernel.

    Args:
        block_m: query rows.
        block_n: keys.
        options: warps and stages.
        overlap: forward only: a step's second product runs while the next step's weights are made,
            which takes registers for both.
        parts: forward only: row_max and row_sum are found in parts, which don't wait for each
            other.
        least_warps: minimum number of warps where a mask's blocks shrink the tile (`fitted`).
    """

    block_m: int
    block_n: int
    options: Options
    overlap: bool = False
    parts: bool = False
    least_warps: int = 4

    def __str__(self) -> str:
        options = self.options
        parts = [
            f"{self.block_m}x{self.block_n}",
            f"{options.num_warps} warps",
            f"{options.num_stages} stages",
            *(f"{name} {value}" for name, value in options.more),
            *(["overlap"] if self.overlap else []),
            *(["parts"] if self.parts else []),
        ]
        return ", ".join(parts)


_ALL_REGISTERS = 255
"""Maximum number of registers of an NVIDIA thread."""


def _c(block_m: int, block_n: int, warps: int, stages: int, **more: object) -> Config:
    return Config(block_m, block_n, Options(warps, stages, tuple(more.items())))


def _o(block_m: int, block_n: int, warps: int, stages: int) -> Config:
    return replace(_c(block_m, block_n, warps, stages), overlap=True)


def _r(block_m: int, block_n: int, warps: int, stages: int) -> Config:
    """Return a config with all registers that an NVIDIA thread can have, for up to 8 warps. Left
    alone, ptxas spills a few of them so that one more program fits a multiprocessor."""
    return _c(block_m, block_n, warps, stages, maxnreg=_ALL_REGISTERS)


_INTERPRETED: dict[KernelName, tuple[Config, ...]] = {
    "forward": (_c(64, 64, 4, 1),) * 3,
    "decode": (_c(16, 64, 4, 1),) * 3,
    "keys": (_c(64, 64, 4, 1),) * 3,
    "queries": (_c(64, 64, 4, 1),) * 3,
}
# Configs by kernel, of 16-bit types and of float32, with head dims up to 64, 128 and 256.
# Hopper's were the fastest of ten to forty candidates each, measured on an H200: 16-bit types
# causal and full, head dims 64 and 128 at S = 8192, 256 at 4096 (`bench/results/h200_triton.md`);
# float32 causal at S = 2048, where forward of 64 and 128 had to spill nothing. Head dims 129 to
# 192 have configs of their own (`_in_column_parts`). On Ampere and Blackwell, forward of float32
# and head dim 64 is Hopper's. The others were never measured: they have the fewest spills, and
# none in forward of 64 and 128 (`bench/triton_compiles.py` and its patterns; between these head
# dims one pattern spills a few bytes on Hopper, outside of loops: docs/triton.md).
_HALF: dict[Target, dict[KernelName, tuple[Config, ...]]] = {
    "hopper": {
        "forward": (_c(64, 64, 4, 3), _o(64, 64, 4, 3), _c(64, 128, 4, 1)),
        "decode": (_c(16, 64, 4, 3), _c(16, 64, 4, 3), _c(16, 32, 4, 3)),
        "keys": (_c(64, 64, 4, 3), _c(64, 64, 4, 2), _c(64, 64, 8, 2)),
        "queries": (_c(128, 64, 4, 3), _c(128, 64, 8, 3), _c(64, 64, 4, 2)),
    },
    "ampere": {
        "forward": (_r(128, 64, 8, 3), _c(128, 32, 8, 3), _c(64, 32, 4, 2)),
        "decode": (_c(16, 64, 4, 3), _c(16, 64, 4, 2), _c(16, 32, 4, 2)),
        "keys": (_c(32, 64, 4, 2), _c(32, 64, 4, 2), _c(16, 32, 4, 1)),
        "queries": (_c(64, 32, 4, 2), _c(64, 32, 4, 2), _c(32, 16, 4, 1)),
    },
    "amd": {
        "forward": (_c(128, 64, 4, 2), _c(64, 32, 4, 1), _c(64, 32, 4, 1)),
        "decode": (_c(16, 64, 4, 2), _c(16, 64, 4, 1), _c(16, 32, 4, 1)),
        "keys": (_c(32, 64, 4, 1), _c(32, 64, 4, 1), _c(16, 32, 4, 1)),
        "queries": (_c(64, 32, 4, 1), _c(64, 32, 4, 1), _c(32, 16, 4, 1)),
    },
    "xpu": {
        "forward": (_c(128, 64, 16, 2), _c(128, 64, 16, 2), _c(32, 64, 8, 1)),
        "decode": (_c(16, 64, 4, 2), _c(16, 32, 4, 2), _c(16, 32, 4, 1)),
        "keys": (_c(64, 64, 8, 1), _c(64, 64, 8, 1), _c(32, 32, 8, 1)),
        "queries": (_c(64, 64, 8, 1), _c(64, 64, 8, 1), _c(32, 32, 8, 1)),
    },
    "interpreter": _INTERPRETED,
}
_HALF["blackwell"] = {
    **_HALF["hopper"],
    # Triton 3.6 fails to compile this kernel with overlap.
    "forward": (_r(128, 64, 8, 3), _r(128, 32, 8, 3), _c(64, 64, 8, 2)),
    # Hopper's tiles for head dim 256 don't serve: dK and dV's doesn't fit, dQ's spills more.
    "keys": (*_HALF["hopper"]["keys"][:2], _c(32, 64, 8, 2)),
    "queries": (*_HALF["hopper"]["queries"][:2], _c(64, 32, 8, 2)),
}
_FLOAT32: dict[Target, dict[KernelName, tuple[Config, ...]]] = {
    "hopper": {
        "forward": (_r(32, 32, 4, 1), _r(32, 16, 8, 2), _c(32, 64, 4, 2)),
        "decode": (_c(16, 32, 4, 2), _c(16, 32, 4, 2), _c(16, 16, 4, 2)),
        "keys": (_c(32, 32, 4, 1), _c(32, 32, 4, 2), _c(32, 16, 4, 1)),
        "queries": (_c(32, 32, 4, 2), _c(32, 32, 4, 2), _c(16, 32, 4, 1)),
    },
    "ampere": {
        "forward": (_r(32, 32, 4, 1), _r(32, 16, 8, 2), _c(32, 16, 8, 1)),
        "decode": (_c(16, 32, 4, 2), _c(16, 32, 4, 2), _c(16, 16, 4, 2)),
        "keys": (_c(16, 32, 4, 1), _c(16, 32, 4, 1), _c(16, 16, 4, 1)),
        "queries": (_c(32, 16, 4, 1), _c(32, 16, 4, 1), _c(16, 16, 4, 1)),
    },
    "amd": {
        "forward": (_c(64, 32, 4, 1), _c(64, 32, 4, 1), _c(32, 16, 4, 1)),
        "decode": (_c(16, 32, 4, 1), _c(16, 32, 4, 1), _c(16, 16, 4, 1)),
        "keys": (_c(16, 32, 4, 1), _c(16, 32, 4, 1), _c(16, 16, 4, 1)),
        "queries": (_c(32, 16, 4, 1), _c(32, 16, 4, 1), _c(16, 16, 4, 1)),
    },
    "xpu": {
        "forward": (_c(128, 32, 16, 1), _c(128, 32, 16, 1), _c(64, 16, 8, 1)),
        "decode": (_c(16, 32, 4, 1), _c(16, 32, 4, 1), _c(16, 16, 4, 1)),
        "keys": (_c(16, 16, 4, 1), _c(16, 16, 4, 1), _c(16, 16, 4, 1)),
        "queries": (_c(16, 16, 4, 1), _c(16, 16, 4, 1), _c(16, 16, 4, 1)),
    },
    "interpreter": _INTERPRETED,
}
_FLOAT32["blackwell"] = _FLOAT32["hopper"]

# Configs where products of float32 are rounded to TF32 for tensor cores. Measured on an H200,
# causal and full at S = 4096, Hopper's took the least time of both together among ten to twenty
# candidates each, or 2 % more (`bench/results/h200_triton.md`); forward of 64 and 128 spills
# nothing. The other targets' were never measured. Entries missing here are those of float32.
_TF32: dict[Target, dict[KernelName, tuple[Config, ...]]] = {
    "hopper": {
        "forward": (_c(128, 64, 8, 3), _c(128, 32, 8, 3), _c(32, 64, 4, 2)),
        "keys": (_c(64, 128, 8, 1), _c(32, 128, 8, 1), _c(32, 32, 8, 1)),
        "queries": (_c(128, 64, 8, 2), _c(128, 64, 8, 1), _c(32, 32, 4, 2)),
    },
    "ampere": {
        "forward": (_r(128, 64, 8, 2), _c(64, 32, 4, 1), _c(64, 16, 8, 1)),
        "keys": (_c(32, 32, 4, 1), _c(32, 32, 4, 1)),
        "queries": (_c(64, 32, 4, 2), _c(32, 32, 4, 1)),
    },
    "blackwell": {
        "forward": (_r(128, 64, 8, 3), _c(128, 32, 8, 1), _c(64, 32, 8, 1)),
        "keys": (_c(32, 64, 4, 1), _c(32, 32, 4, 2)),
        "queries": (_c(128, 64, 8, 2), _c(128, 32, 8, 1)),
    },
}

# Configs for forward of 16-bit types with a score mod that reads an element for each pair of a
# query and a key, head dims up to 64, 128 and 256. Those elements and their addresses take
# registers and shared memory beside the tiles: with the table's entries Hopper spills up to 2.8
# KiB a thread, and its products wait for each other. On an H200 with head dim 128 this entry takes
# 11.0 ms for a dense bias, 64x64 takes 22.5 and the table's 46.0; for a relative bias 6.1, 5.4 and
# 9.5. With head dim 256 it takes 0.61 ms for a dense bias, the table's 4.46; for a relative bias
# 0.53 and 0.66. Ampere lacks shared memory for three stages, Intel for tiles of 64 keys with head
# dim 128.
_READING_PAIRS: dict[Target, tuple[Config, ...]] = {
    "hopper": (_c(64, 64, 4, 2), _c(64, 32, 4, 2), _c(64, 32, 4, 2)),
    "ampere": (_c(128, 64, 8, 2), _c(64, 32, 8, 2)),
    "xpu": (_c(128, 64, 16, 2), _c(128, 32, 16, 2)),
}
# The same for products in TF32. For a relative bias the table's entries would take 0.9 of the time
# on an H200, and spill a few bytes with Triton 3.9. Ampere lacks shared memory for these.
_TF32_READING_PAIRS: dict[Target, tuple[Config, ...]] = {
    "hopper": (_c(128, 32, 8, 2), _c(128, 16, 8, 3)),
    "ampere": (_r(128, 32, 8, 2),),
}


class Traits(NamedTuple):
    """Facts about a spec that decide its kernels' configs.

    Args:
        head_dim: the larger of E and Ev.
        itemsize: bytes of an element.
        is_plain: there is neither mask nor score mod.
        is_scored: there is a score mod.
        shares_keys: several query heads, or batch entries, read one KV head.
        score_is_light: except for one tanh, no operation of the score mod takes many instructions.
        score_reads_pairs: the score mod reads elements that row and key decide together.
        mask_reads: the mask mod reads a captured tensor, as that of packed documents does.
        mask_reads_pairs: the mask mod reads elements that row and key decide together.
        reads_keys: a mod reads elements that a key alone decides, beside the tiles.
        adds_by_pair: captured tensors need gradients, and query and key together, or the score,
            decide which of their elements a pair adds to.
        row_bytes: the largest of 16, 8, 4 and 2 that divides the bytes of both E and Ev.
        has_narrow_values: Ev is at most 128.
        in_tf32: products round their operands, which are float32, to TF32.
    """

    head_dim: int
    itemsize: int
    is_plain: bool = False
    is_scored: bool = False
    shares_keys: bool = False
    score_is_light: bool = True
    score_reads_pairs: bool = False
    mask_reads: bool = False
    mask_reads_pairs: bool = False
    reads_keys: bool = False
    adds_by_pair: bool = False
    row_bytes: int = BYTES
    has_narrow_values: bool = False
    in_tf32: bool = False


def config_for(target: Target, kernel: KernelName, traits: Traits) -> Config:
    """Return the heuristic first choice: the table's entry, or a config that was found to be
    better for kernels with such traits."""
    is_half = traits.itemsize == 2
    width = 0 if traits.head_dim <= 64 else 1 if traits.head_dim <= 128 else 2
    config = (_HALF if is_half else _FLOAT32)[target][kernel][width]
    rounded = _TF32.get(target, {}).get(kernel, ()) if traits.in_tf32 else ()
    if width < len(rounded):
        config = rounded[width]
    pairs = _READING_PAIRS if is_half else _TF32_READING_PAIRS if traits.in_tf32 else {}
    for_pairs = pairs.get(target, ())
    if kernel == "forward" and traits.score_reads_pairs and width < len(for_pairs):
        config = for_pairs[width]
    if kernel == "forward" and traits.reads_keys:
        # With a third stage of what mods read, shared memory holds one program per multiprocessor
        # instead of two.
        stages = min(2, config.options.num_stages)
        config = replace(config, options=replace(config.options, num_stages=stages))
    by_pair = kernel == "queries" and traits.adds_by_pair and is_half
    if by_pair and (target == "hopper" or (target == "blackwell" and width < 2)):
        # The addresses of pairs take registers and shared memory: the table's entry for Hopper and
        # head dim 64 spills 4 KiB a thread, Blackwell's for 128 doesn't fit. Backward with biases
        # by distance, measured on an H200: head dims 64 and 128 take 4.1 and 4.8 ms, 10.7 and 5.05
        # with the table's entries; dQ of 256 takes 1.20 ms, 1.63 with the table's.
        return _c(64, 32, 4, 2) if width else _c(64, 64, 4, 2)
    return _for_hopper(kernel, traits, config) if target == "hopper" else config


def _for_unaligned_rows(kernel: KernelName, traits: Traits) -> Config | None:
    """Return Hopper's config for 16-bit types and head dims up to 128 where TMA doesn't load a
    contiguous tensor's rows; None where the table's entry is faster, or where Triton 3.9 would
    spill in each step. Copies of 4 or 8 bytes load such rows; where a row is an odd number of
    elements no copy does, and rows come through registers. These configs were the fastest of five
    to nine candidates each, measured on an H200 with head dims 50, 100, 49 and 99, causal and full
    (`bench/results/h200_triton.md`), though some spill a few bytes with Triton 3.6. For documents
    and grouped heads they were compiled, and not timed."""
    wide = traits.head_dim > 64
    copied = traits.row_bytes >= LEAST_COPIED
    if kernel == "forward":
        if traits.score_reads_pairs:
            return None
        if copied and wide:
            return _o(128, 64, 8, 3)
        if copied:
            return _c(128, 64, 8, 3) if traits.is_plain else None
        if wide:
            return replace(_c(128, 64, 8, 1), parts=not traits.is_scored)
        return None if traits.is_scored else _c(128, 128, 8, 1)
    if kernel == "keys" and wide:
        return _c(32, 64, 4, 3) if copied else _c(32, 128, 8, 1)
    if kernel == "keys":
        return None if copied else _c(64, 128, 8, 1)
    if kernel == "queries" and not wide:
        return _c(128, 32, 4, 3) if copied else _c(128, 64, 8, 3)
    return None


def _for_hopper(kernel: KernelName, traits: Traits, config: Config) -> Config:
    is_half = traits.itemsize == 2
    reads_pairs = kernel == "forward" and is_half and traits.score_reads_pairs
    if 128 < traits.head_dim <= 192 and kernel != "decode" and not reads_pairs:
        return _in_column_parts(kernel, traits)
    if is_half and traits.head_dim <= 128 and traits.row_bytes < BYTES:
        unaligned = _for_unaligned_rows(kernel, traits)
        if unaligned is not None:
            return unaligned
    wide = 64 < traits.head_dim <= 128 and is_half
    if kernel == "forward" and is_half and traits.head_dim <= 128 and not traits.is_scored:
        # A/B measured on an H200: most cases of head dim 128 take 0.95 to 0.98 of the time, those
        # of 64 the same within noise, a soft cap 1.03. On Blackwell, and in float32, registers
        # spill. Wider heads weren't timed.
        config = replace(config, parts=True)
    narrow_plain = traits.head_dim <= 64 and is_half and traits.is_plain
    if kernel == "forward" and narrow_plain:
        # Measured on an H200: 5 to 7 % faster; a causal mask would be 8 % slower at S = 2048.
        return replace(config, block_n=128, options=Options(4, 2))
    if kernel == "forward" and is_half and 32 < traits.head_dim <= 64 and _needs_little(traits):
        # Four programs per multiprocessor: with three stages shared memory holds three, and
        # without a register limit most kernels take more than 128. A/B measured on an H100: causal
        # takes 0.89 to 0.98 of the time, windows 0.89 to 0.96, documents 0.88, ALiBi 0.92 and
        # 0.95, soft cap 0.95 and 0.97.
        return replace(config, parts=True, options=Options(4, 2, (("maxnreg", 128),)))
    if kernel == "keys" and traits.shares_keys:
        # The loop over query heads takes registers that the larger tile needs: its products would
        # wait for each other (ptxas: C7512). The smaller tile leaves room for a third stage, and
        # is 11 % faster on an H200. For narrow heads the larger tile spills a few bytes, no
        # product waits, and it is 21 % faster.
        if wide:
            return _c(32, 64, 4, 3)
        if traits.head_dim > 64 or not is_half:
            return replace(config, block_m=min(32, config.block_m))
    in_full = not is_half and not traits.in_tf32
    if kernel == "forward" and 64 < traits.head_dim < 128 and in_full and traits.mask_reads:
        # 32x16 spills a few bytes here. Measured on an H100 with packed documents, head dims 80
        # and 96, S 4000 and 4096: this tile takes 0.96 to 1.0 of its time.
        return _c(16, 16, 4, 2)
    if wide and traits.mask_reads:
        # Rows of documents are short, so a short prologue counts. Measured on an H200: forward is
        # 3 % faster, dQ 10 %. Smaller steps fit three programs per multiprocessor where registers
        # allow it, and make forward another 3 % faster on an H100.
        if kernel == "forward":
            config = replace(config, overlap=False, options=Options(4, 2))
            if not traits.is_scored:
                config = replace(config, block_n=32, options=Options(4, 3))
            return config
        if kernel == "queries":
            return _c(64, 64, 4, 2)
    return config


def _in_column_parts(kernel: KernelName, traits: Traits) -> Config:
    """Return Hopper's config for tiles in three parts (`column_parts`), which free registers and
    shared memory that head dim 256 takes. Measured on an H200 with head dims 192, 160, and 192
    with values of 128; float32 with 192 and a causal mask (`bench/results/h200_triton.md`). With
    two stages there is room for elements that are read for each pair."""
    reads_pairs = traits.score_reads_pairs or traits.mask_reads_pairs
    stages = 2 if reads_pairs else 3
    if traits.in_tf32:
        tiles = {"forward": _c(128, 64, 8, 1), "queries": _c(64, 32, 4, 2)}
        return tiles.get(kernel, _c(32, 32, 4, 2))
    if traits.itemsize == 4:
        return _c(16, 64, 4, 2) if kernel == "forward" else _c(32, 32, 4, 2)
    if kernel == "keys" and traits.shares_keys:
        return _c(64, 64, 8, stages)
    if kernel == "keys" and traits.has_narrow_values:
        return _c(32, 64, 4, stages)
    if kernel == "keys":
        # With tiles of 64 keys, 4 warps would spill 72 to 113 registers a step.
        return replace(_c(64, 128, 8, 2), least_warps=8)
    if kernel == "queries":
        return _c(128, 64, 8, stages if traits.has_narrow_values else 2)
    if traits.has_narrow_values and traits.mask_reads:
        return _c(64, 64, 4, 2)
    return _c(128, 64, 8, stages)


def _needs_little(traits: Traits) -> bool:
    """Whether forward of head dim 64 spills nothing with 128 registers a thread."""
    if traits.mask_reads_pairs or traits.row_bytes < BYTES:
        return False
    reads = traits.score_reads_pairs or traits.reads_keys or traits.mask_reads
    return not traits.is_scored or (traits.score_is_light and not reads)


def with_tile(
    config: Config, block_m: int, block_n: int, num_warps: int, num_stages: int
) -> Config:
    """Return the config with another tile, warps or stages. A register limit is dropped where tile
    or warps change, because it was found for these; all registers that a thread can have are too
    many for more warps."""
    options = config.options
    limit = dict(options.more).get("maxnreg")
    same = (block_m, block_n, num_warps) == (config.block_m, config.block_n, options.num_warps)
    more = options.more
    if num_warps > options.num_warps or (limit != _ALL_REGISTERS and not same):
        more = _without_limit(options)
    return replace(
        config, block_m=block_m, block_n=block_n, options=Options(num_warps, num_stages, more)
    )


def for_sequences(config: Config, target: Target, is_paged: bool) -> Config:
    """Return the config of a kernel of packed sequences.

    Args:
        config: a dense call's.
        is_paged: keys lie in pages.
    """
    options = config.options
    if is_paged:
        # Triton loads a page's id as many steps before its rows as rows before their products. So
        # there are as many tiles in flight as without pages.
        options = replace(options, num_stages=2 * options.num_stages - 1)
    if target in ("hopper", "ampere", "blackwell"):
        # Addresses of pages take some registers, and without a limit ptxas spills a few, for up to
        # 8 warps.
        more = (*_without_limit(options), ("maxnreg", _ALL_REGISTERS))
        options = replace(options, more=more)
    return replace(config, options=options)


def _without_limit(options: Options) -> tuple[tuple[str, object], ...]:
    return tuple(option for option in options.more if option[0] != "maxnreg")


# Steps to neighbouring configs: factors of the tile side that a program keeps, of the side that
# its loop steps over and of the warps; summand of the stages. Steps that change two numbers keep a
# warp's registers, or the shared memory of all stages.
_STEPS = (
    (2, 1, 1, 0), (0.5, 1, 1, 0), (1, 2, 1, 0), (1, 0.5, 1, 0),
    (1, 1, 2, 0), (1, 1, 0.5, 0), (1, 1, 1, 1), (1, 1, 1, -1),
    (2, 1, 2, 0), (0.5, 1, 0.5, 0), (1, 2, 1, -1), (1, 0.5, 1, 1),
)  # fmt: skip


def around(kernel: KernelName, config: Config) -> list[Config]:
    """Return the configs that are one step away from `config`, for autotuning."""
    found = [replace(config, overlap=False)] if config.overlap else []
    found += [replace(config, parts=False)] if config.parts else []
    if _without_limit(config.options) != config.options.more:
        unlimited = replace(config.options, more=_without_limit(config.options))
        found.append(replace(config, options=unlimited))
    for kept, looped, warps, stages in _STEPS:
        # A decoding tile always holds all rows.
        if kernel == "decode" and kept != 1:
            continue
        m, n = (looped, kept) if kernel == "keys" else (kept, looped)
        other = with_tile(
            config,
            int(config.block_m * m),
            int(config.block_n * n),
            int(config.options.num_warps * warps),
            config.options.num_stages + stages,
        )
        if (
            other.block_m in TILES
            and other.block_n in TILES
            and other.options.num_warps in WARPS
            and other.options.num_stages in STAGES
        ):
            found.append(other)
    return found


def fitted(config: Config, kernel: KernelName, block: int, may_have_fewer_warps: bool) -> Config:
    """Return the config with the tile side that a program keeps no larger than a mask's block, at
    least 16, and with fewer warps in proportion, but no fewer than `least_warps`. In tiles of 64
    rows dQ of head dim 128 takes 3.48 ms on an H200 with 4 warps, 6.20 with the 8 of 128 rows.

    Args:
        block: block size of query rows; of keys for dK and dV.
        may_have_fewer_warps: whether the user left the warps to the table.
    """
    kept = config.block_n if kernel == "keys" else config.block_m
    size, options = kept, config.options
    while size > max(16, block):
        size //= 2
    if may_have_fewer_warps and size < kept:
        warps = min(options.num_warps, max(config.least_warps, options.num_warps * size // kept))
        options = replace(options, num_warps=warps)
    if kernel == "keys":
        return replace(config, block_n=size, options=options)
    return replace(config, block_m=size, options=options)
