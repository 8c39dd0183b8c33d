"""Launches of Hopper's backward above head dim 128, between row values and repairs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anyflex.plugin import Call, Grads, Spec
from anyflex_cuda.forward_call import parts_of
from anyflex_cuda.gluon_kernels import GluonPrograms, mod_constants
from anyflex_cuda.gluon_launch import (
    descriptor,
    descriptor_type,
    row_descriptor,
    row_descriptor_type,
)
from anyflex_triton.building import (
    FixedArguments,
    FixedLaunch,
    Mods,
    Options,
    backward_sizes,
    key_head_group,
)

__all__ = ["WIDE_BLOCKS", "is_wide", "wide_launches"]

_ROWS = 128
"""Query rows of a tile, 64 for each consumer."""
_STEP = 64
"""Query rows of a step, and keys of a tile."""
WIDE_BLOCKS = (_ROWS, _STEP)
"""Block sizes of masks are multiples of these numbers of rows and keys."""


def is_wide(spec: Spec) -> bool:
    """Return whether some head dim is above 128."""
    return max(spec.head_dim, spec.value_head_dim) > 128


def _boxes(
    tensors: Mapping[str, Tensor | None],
) -> dict[str, tuple[Tensor, tuple[int, ...]] | None]:
    """Return tensors and boxes by names of descriptors; None for a missing tensor or second
    part."""
    found: dict[str, tuple[Tensor, tuple[int, ...]] | None] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            found[name] = found[f"{name}_2"] = None
            continue
        first, *rest = parts_of(tensor.shape[3])
        found[name] = tensor, (1, 1, 64, first)
        found[f"{name}_2"] = (tensor, (1, 1, 64, rest[0])) if rest else None
    return found


def wide_launches(
    made: GluonPrograms,
    call: Call,
    dout: Tensor,
    grads: Grads,
    row_values: Tensor,
    odd_rows: Tensor | None,
) -> list[FixedLaunch]:
    """Return the launches that fill grads.dv, grads.dk, and, where there are `odd_rows`, grads.dq.

    Args:
        row_values, odd_rows: as in `backward_call.Work`.
    """
    dq, dk, dv = grads.dq, grads.dk, grads.dv
    assert dk is not None and dv is not None
    given = {"query": call.query, "key": call.key, "value": call.value, "dout": dout}
    batch, heads, length = call.query.shape[:3]
    kv_batch, kv_heads, keys = call.key.shape[:3]
    even = length % _STEP == 0 and keys % _STEP == 0
    mods = made.mods(call, even)
    # Rows past the end count where a score mod may make their scores non-finite.
    ragged = bool(keys % _STEP) or (mods.score_mod is not None and not even)
    launches = [
        _launch(
            made, call, row_values, False, mods, ragged, {**given, "dq": None, "dk": dk, "dv": dv},
            kv_batch * kv_heads, -(-keys // _STEP), key_head_group(call),
        )
    ]  # fmt: skip
    if odd_rows is not None:
        assert dq is not None
        units = batch * heads
        launches.append(
            _launch(
                made, call, row_values, True, made.mods(call, even and length % _ROWS == 0),
                bool(keys % _STEP), {**given, "dq": dq, "dk": None, "dv": None},
                units, -(-length // _ROWS), made.head_group(units, keys),
            )
        )  # fmt: skip
    return launches


def _launch(
    made: GluonPrograms, call: Call, row_values: Tensor, of_queries: bool, mods: Mods,
    ragged: bool, tensors: Mapping[str, Tensor | None], units: int, tiles: int, head_group: int,
) -> FixedLaunch:  # fmt: skip
    # Imported here because few processes need it, and Triton reads the source of each of its
    # functions.
    from anyflex_cuda import hopper_wide_backward

    spec = made.spec
    blocks = (_ROWS, _ROWS) if call.mask is None else call.mask.block_size
    boxes = _boxes(tensors)
    there = {name: each for name, each in boxes.items() if each is not None}
    types = {name: descriptor_type(spec.dtype, box) for name, (_, box) in there.items()}
    absent = [name for name in boxes if name not in there]
    fixed = {
        **backward_sizes(call, row_values),
        **{name: descriptor(tensor, box) for name, (tensor, box) in there.items()},
        "units": units,
        "tiles": tiles,
        "head_group": head_group,
    }
    if of_queries:
        absent.append("odd_keys")
    else:
        absent += ["odd_rows", "padded_length"]
        types["row_values"] = row_descriptor_type(_STEP)
        fixed["row_values"] = row_descriptor(row_values, _STEP)
    program = made.program(
        ("hopper wide backward", of_queries, blocks, ragged, mods.key),
        hopper_wide_backward.wide_kernel,
        {
            **dict.fromkeys(absent),
            **mod_constants(mods),
            "OF_QUERIES": of_queries,
            "Q_BLOCK": blocks[0],
            "KV_BLOCK": blocks[1],
            "RAGGED": ragged,
            "D": sum(parts_of(spec.head_dim)),
            "DV": sum(parts_of(spec.value_head_dim)),
        },
        Options(4, 1),
        types=types,
    )
    second = {f"{name}_2": name for name in tensors}
    return FixedLaunch(program, tiles * units, FixedArguments(fixed, second))
