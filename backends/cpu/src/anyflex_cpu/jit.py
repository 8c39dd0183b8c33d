"""Mods compiled in the process: a spec's graphs as native functions on tiles (af_tile_function).

llvmlite, an optional dependency, is imported when the first spec is compiled. Object code is kept
as an artifact: another process loads it in a millisecond.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from anyflex.plugin import Artifacts, CapturedFacts, Derivative, ModGraph
from anyflex_cpu.index_ranges import Limits

if TYPE_CHECKING:
    from anyflex_cpu.jit_engine import LoadedCode, Target

__all__ = ["Mods", "NativeFunction", "TooLong", "compile_mods"]

_CALLED = ("af_find_read_outside", "af_add_lanes", "af_add_strip", "af_power")
"""Functions of the native library that the code may call."""

_FORMAT = 7
"""Format of the generated code: bumped when the same graph and llvmlite give other code."""


class Mods(NamedTuple):
    """A spec's graphs, simplified.

    Args:
        mask: of PARTIAL blocks, or None.
        score: or None, where there is none or it returns the score.
        derivative: of the score mod, where some gradient is wanted; or None.
    """

    mask: ModGraph | None
    score: ModGraph | None
    derivative: Derivative | None


class TooLong(Exception):
    """LLVM would take too long; the message is why, in half a line."""


@dataclass(frozen=True, slots=True)
class NativeFunction:
    """Address of an af_tile_function, and the bytes of scratch memory that a tile must offer. The
    address holds as long as this object lives."""

    address: int
    scratch_bytes: int
    code: LoadedCode


def compile_mods(
    mods: Mods,
    *,
    captured: Sequence[CapturedFacts],
    artifacts: Artifacts,
    address: Callable[[str], int],
    limits: Limits,
    longest: int | None = None,
) -> dict[str, NativeFunction]:
    """Return a spec's mods as native functions, from the artifacts if they are there: those of
    "mask", "score" and "score_backward" that the spec has.

    Args:
        mods: the spec's graphs.
        captured: facts of all captured tensors.
        address: returns that of a function of the native library.
        limits: what calls keep to.
        longest: characters of IR that are compiled at most, or None for any number.

    Raises:
        ImportError: llvmlite isn't installed.
        TooLong: the mods' IR is longer than `longest`.
    """
    from anyflex_cpu.jit_engine import LoadedCode, host_target

    target = host_target()
    name = _artifact_name(target, limits)
    kept = artifacts.get(name)
    if kept is None:
        kept = _compiled(mods, captured, target, limits, longest)
        artifacts.put(name, kept)
    header, _, code = kept.partition(b"\n")
    loaded = LoadedCode(code, {name: address(name) for name in _CALLED})
    scratch: dict[str, int] = json.loads(header)
    return {
        kind: NativeFunction(loaded.address(kind), size, loaded) for kind, size in scratch.items()
    }


def _artifact_name(target: Target, limits: Limits) -> str:
    said = f"{_FORMAT} {target.version} {target.cpu} {target.features} {limits}"
    return f"mods-{hashlib.sha256(said.encode()).hexdigest()[:16]}.o"


def _compiled(
    mods: Mods,
    captured: Sequence[CapturedFacts],
    target: Target,
    limits: Limits,
    longest: int | None,
) -> bytes:
    """Return a line that says which functions there are, and object code."""
    from anyflex_cpu.jit_engine import assemble
    from anyflex_cpu.llvm_text import Module
    from anyflex_cpu.node_ir import Fact
    from anyflex_cpu.tile_functions import add_mask, add_score, add_score_backward

    module = Module(target.enabled, target.attributes)
    facts = [Fact(fact.dtype, fact.rank) for fact in captured]
    scratch = {}
    if mods.mask is not None:
        scratch["mask"] = add_mask(module, "mask", mods.mask, facts, limits)
    if mods.score is not None:
        scratch["score"] = add_score(module, "score", mods.score, facts, limits)
    if mods.derivative is not None:
        scratch["score_backward"] = add_score_backward(
            module, "score_backward", mods.derivative, facts, limits
        )
    text = str(module)
    if longest is not None and len(text) > longest:
        raise TooLong(
            f"they are {len(text) / 1e6:.1f} MB of LLVM IR, and more than {longest / 1e6:g} MB "
            "take LLVM too long; mods='jit' compiles them all the same"
        )
    return json.dumps(scratch).encode() + b"\n" + assemble(text, target)
