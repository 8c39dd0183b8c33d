"""Values that change between calls of one spec: numbers, lengths, captured tensors, masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import anyflex
from anyflex.testing.attention_case import Drawn
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, differentiable, plain, with_mod
from anyflex.testing.comparison import by_backend, by_oracle, mismatches
from anyflex.testing.guarded_tensors import same_bytes
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("run_time")

ScoreMod = Callable[..., Any]


def _scaled(factor: float) -> ScoreMod:
    return lambda s, b, h, q, k: s * factor


def _distance(limit: int) -> ScoreMod:
    return lambda s, b, h, q, k: torch.where(q - k < limit, s, s - 2.0)


@CASES.behaviour()
def numbers(session: Session) -> None:
    """A closed-over number that changes between calls is read at each call, not baked in."""
    case = plain(session, "numbers", score_mod="identity")
    drawn = case.draw(session.device)
    for factor, limit in ((0.5, 3), (1.25, 7), (3.0, -2), (0.5, 3)):
        compare(session, case, with_mod(drawn, "score", case, _scaled, factor))
        compare(session, case, with_mod(drawn, "score", case, _distance, limit))


@CASES.behaviour()
def wide_numbers(session: Session) -> None:
    """A closed-over whole number has 64 bits."""
    case = plain(session, "wide_numbers", score_mod="identity")
    drawn = case.draw(session.device)
    for limit in (3, 2**40 + 3, 3 - 2**40, 2**31 + 3):
        compare(session, case, with_mod(drawn, "score", case, _distance, limit))


@CASES.behaviour()
def float64_numbers(session: Session) -> None:
    """A closed-over number that float32 can't hold is a float64 to float64 scores."""
    case = plain(session, "float64_numbers", score_mod="identity", dtype=torch.float64)
    drawn = case.draw(session.device)
    # The first number may be compiled into the kernel; later ones are run-time values.
    for factor in (0.3, 0.1, 1.7):
        compare(session, case, with_mod(drawn, "score", case, _scaled, factor))


@CASES.behaviour()
def scale(session: Session) -> None:
    """The scale is a run-time value; 0 is one as well."""
    for scale in (0.25, 1.5, None, 0.0, -0.5, 0.25):
        compare(session, plain(session, "scale", scale=scale))


@CASES.behaviour()
def two_mods(session: Session) -> None:
    """Two mods of calls that are alike in all else are two kernels."""
    for name in ("softcap", "alibi_abs", "softcap", "clamped", "alibi_abs"):
        compare(session, plain(session, "two_mods", score_mod=name))


def _table(table: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + table[h, k]


@CASES.behaviour()
def closures(session: Session) -> None:
    """Closures of one factory over other tensors have the same source and other values."""
    gradients = differentiable(session, captured=True)
    case = plain(session, "closures", score_mod="identity", gradients=gradients)
    drawn = case.draw(session.device)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        table = torch.randn(case.heads, case.kv_length, generator=generator)
        table.requires_grad_("captured" in gradients)
        compare(session, case, with_mod(drawn, "score", case, _table, table=table))


@CASES.behaviour()
def captured_dtype(session: Session) -> None:
    """One mod over a captured tensor of another type is another kernel."""
    readable = session.backend.capabilities.captured_dtypes
    dtypes = [
        dtype
        for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
        if dtype in readable
    ]
    session.needs(len(dtypes) >= 2, "fewer than two types of captured tensors are declared")
    case = plain(session, "captured_dtype", score_mod="identity")
    drawn = case.draw(session.device)
    # More digits than bfloat16 has, and whole parts for the integer types.
    table = 3 * torch.randn(case.heads, case.kv_length, generator=torch.Generator().manual_seed(2))
    for dtype in (*dtypes, dtypes[0]):
        compare(session, case, with_mod(drawn, "score", case, _table, table=table.to(dtype)))


@CASES.behaviour()
def captured_strides(session: Session) -> None:
    """A captured tensor's strides, offset and shape are run-time values."""
    case = plain(session, "captured_strides", score_mod="identity")
    drawn = case.draw(session.device)
    heads, length = case.heads, case.kv_length
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(2 * heads + 3, 3 * length, generator=generator)
    for table in (
        wide[:heads, :length].contiguous(),
        wide.t()[: 2 * length, :heads].t()[:, :length],
        wide[3 : 3 + 2 * heads : 2, 5 : 5 + 2 * length : 2],
        wide[:1, :length].expand(heads, length),
        wide[1 : 1 + heads, 2 : 2 + length],
    ):
        compare(session, case, with_mod(drawn, "score", case, _table, table=table))


_OFFSETS = (1, 2, 5, 3)


def _at_indices(table: Any, b0: int, h0: int, q0: int, k0: int) -> ScoreMod:
    return lambda s, b, h, q, k: s + table[b + b0, h + h0, (q + q0 + k + k0) % 7] * (q + q0)


def _mask_at_indices(b0: int, h0: int, q0: int, k0: int) -> ScoreMod:
    return lambda b, h, q, k: (b + b0 + 2 * (h + h0) + 3 * (q + q0) + 4 * (k + k0)) % 7 < 4


@CASES.behaviour()
def index_offsets(session: Session) -> None:
    """The offsets of batch, head, query and key are added to what mods see, backward as well."""
    case = plain(session, "index_offsets", batch=2, score_mod="identity", mask_mod="causal")
    columns = -(-case.kv_length // case.block_size[1])
    # The structure is built by hand: core's knows nothing of offsets.
    kinds = ((2,) * columns,) * -(-case.q_length // case.block_size[0])
    case = dataclasses.replace(case, runs=kinds)
    drawn = case.draw(session.device)
    table = torch.randn(3, case.heads + 2, 7, generator=torch.Generator().manual_seed(4))

    def with_offsets(*offsets: int) -> Drawn:
        scored = with_mod(drawn, "score", case, _at_indices, *offsets, table=0.05 * table)
        return with_mod(scored, "mask", case, _mask_at_indices, *offsets)

    wanted = with_offsets(*_OFFSETS)
    for gradients in (frozenset[str](), case.gradients):
        asked = dataclasses.replace(case, gradients=gradients)
        with session.inspecting("index_offsets", _OFFSETS):
            found = by_backend(asked, with_offsets(0, 0, 0, 0), session.name, session.device)
        session.check_journal()
        if gradients and not session.journal.backwards:
            # Core computed the gradients: it never has offsets in this contract.
            continue
        lines = mismatches(found, by_oracle(asked, wanted), asked, wanted)
        session.require(not lines, "; ".join(lines))


@CASES.behaviour()
def lengths(session: Session) -> None:
    """Query and key lengths are run-time values."""
    for mask in (None, "causal"):
        for q_length, kv_length in ((70, 64), (100, 90), (70, 64), (129, 33)):
            case = plain(session, "lengths", mask_mod=mask)
            compare(session, dataclasses.replace(case, q_length=q_length, kv_length=kv_length))


@CASES.behaviour()
def batch(session: Session) -> None:
    """Batch and the number of heads are run-time values."""
    for batch, heads in ((1, 2), (3, 2), (1, 4), (2, 4), (1, 2)):
        case = plain(session, "batch", batch=batch, heads=heads, kv_heads=heads)
        compare(session, case)


@CASES.behaviour()
def masks(session: Session) -> None:
    """A mask's runs are those of this call, not of the mask before."""
    for mask in ("causal", "anti_causal", "window_left", "causal"):
        compare(session, plain(session, "masks", mask_mod=mask))


def _documents(documents: Any) -> Callable[..., Any]:
    return lambda b, h, q, k: documents[q] == documents[k]


@CASES.behaviour()
def mask_rebuilt(session: Session) -> None:
    """A mask built again after its captured tensor has changed is another mask."""
    case = plain(session, "mask_rebuilt", mask_mod="causal")
    documents = torch.zeros(max(case.q_length, case.kv_length), dtype=torch.int64)
    drawn = case.draw(session.device)
    for ends in ((10, 20), (3, 33), (19, 21)):
        documents.zero_()
        for end in ends:
            documents[end:] += 1
        compare(session, case, _with_documents(drawn, documents, case))


def _with_documents(drawn: Drawn, documents: torch.Tensor, case: Any) -> Drawn:
    return with_mod(drawn, "mask", case, _documents, documents=documents)


@CASES.behaviour()
def in_place(session: Session) -> None:
    """Tensors that change in place between calls, query to captured, are read at each call."""
    modded = {"score_graph", "captured"} <= session.backend.capabilities.known_fields
    case = plain(session, "in_place", gradients=frozenset())
    tensors = list(case.draw(session.device).tensors.values())
    if modded:
        tensors.append(torch.randn(case.heads, case.kv_length, device=session.device))
    attention: ScoreMod = anyflex.flex_attention

    def call(given: list[torch.Tensor]) -> torch.Tensor:
        mod = _table(given[3]) if modded else None
        out: torch.Tensor = attention(*given[:3], mod, backend=session.name)
        return out

    call(tensors)
    copies: list[list[torch.Tensor]] = []
    for index, name in enumerate(("query", "key", "value", "a captured tensor")[: len(tensors)]):
        tensors[index].mul_(1.5).add_(0.25)
        # Other memory, the same values; kept, so that no address is used again.
        copies.append([tensor.clone() for tensor in tensors])
        wanted = call(copies[-1])
        session.require(
            same_bytes(call(tensors), wanted),
            f"after {name} was changed in place another result comes than from its copy",
        )
