"""Launches of Hopper's backward above head dim 128, between row values and repairs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anyflex.plugin import Call, Grads, Spec
from anyflex_cuda.forward_call import parts_of
from anyflex_cuda.gluon_kernels import GluonPrograms, mod_constants
from anyflex_cuda.gluon_launch import descriptor, row_descriptor
from anyflex_triton.building import (
    Boxes,
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


def _boxes(tensors: Mapping[str, Tensor | None]) -> dict[str, Boxes | None]:
    """Return descriptors by name; None for a missing tensor or second part."""
    found: dict[str, Boxes | None] = {}
    for name, tensor in tensors.items():
        found[name] = found[f"{name}_2"] = None
        if tensor is not None:
            for part, columns in zip(("", "_2"), parts_of(tensor.shape[3]), strict=False):
                found[name + part] = descriptor(tensor, (1, 1, 64, columns))
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
    fixed: dict[str, object] = {
        **backward_sizes(call, row_values), **_boxes(tensors), "units": units, "tiles": tiles,
        "head_group": head_group,
    }  # fmt: skip
    if of_queries:
        fixed["odd_keys"] = None
    else:
        fixed.update(odd_rows=None, padded_length=None)
        fixed["row_values"] = row_descriptor(row_values, _STEP)
    return made.fixed_launch(
        hopper_wide_backward.wide_kernel,
        tiles * units,
        {
            **{name: None for name, each in fixed.items() if each is None},
            **mod_constants(mods),
            "OF_QUERIES": of_queries,
            "Q_BLOCK": blocks[0],
            "KV_BLOCK": blocks[1],
            "RAGGED": ragged,
            "D": sum(parts_of(spec.head_dim)),
            "DV": sum(parts_of(spec.value_head_dim)),
        },
        Options(4, 1),
        {name: each for name, each in fixed.items() if each is not None},
        described={f"{name}_2": name for name in tensors},
    )
