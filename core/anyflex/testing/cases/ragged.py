"""Packed sequences and keys in pages: each sequence has what it has alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

import anyflex
from anyflex.errors import BackendRefused, ModIndexError
from anyflex.plugin import Rejected
from anyflex.testing.attention_case import ALL, LSE, QKV, AttentionCase
from anyflex.testing.case_types import BehaviourCase, Group, Row, row
from anyflex.testing.checking import plain
from anyflex.testing.guarded_tensors import same_bytes
from anyflex.testing.ragged_case import Ragged, RaggedCase, int32
from anyflex.testing.ragged_check import (
    budgets_of,
    check,
    compare_ragged,
    declares_layout,
    run,
)
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("ragged")

_OWN = frozenset(field.name for field in dataclasses.fields(RaggedCase)) - {"call"}


def _case(name: str, given: Row) -> RaggedCase:
    own = {key: given[key] for key in _OWN & given.keys()}
    call = AttentionCase(f"ragged/{name}", **{k: v for k, v in given.items() if k not in _OWN})
    return RaggedCase(call, **own)


def _compare(common: Row, **rows: Row) -> None:
    """Enter a comparison for each row: arguments of `AttentionCase` and `RaggedCase`."""
    for name, special in rows.items():
        case = _case(name, {**common, **special})
        run_it = functools.partial(compare_ragged, case=case)
        CASES.enter(BehaviourCase(case.call.name, case.call.shows, run_it, case.call.quick))


def _row(
    shows: str | None = None,
    *,
    lengths: tuple[tuple[int, int], ...] | None = None,
    **special: Any,
) -> Row:
    """Return a row of `_compare`: `lengths` are those of each sequence."""
    return row(shows, **special) | ({} if lengths is None else {"lengths": lengths})


_MODS = _row(heads=(4, 2), head_dims=(16, 8), score_mod="int_table", mask_mod="prefix_batch")
_FEW = ((5, 5), (0, 7), (1, 20), (30, 33))
_DECODING = ((1, 130), (1, 7), (5, 50))

_compare(
    _MODS,
    one=_row("one sequence", lengths=((70, 70),)),
    none=_row("no sequence: all are padding rows", lengths=(), spare=5),
    no_rows=_row("sequences without query rows", lengths=((0, 5), (0, 0))),
    no_rows_between=_row("a sequence without query rows between others", lengths=_FEW),
    no_keys=_row("rows without keys have out 0 and lse -inf", lengths=((3, 0), (4, 9), (2, 0))),
    no_key_at_all=_row("a call without any key", lengths=((3, 0), (2, 0))),
    padding_rows=_row(
        "rows behind the last sequence have out 0 and lse -inf", lengths=_FEW, spare=5
    ),
    slots_out_of_order=_row("mods see slots, in any order", lengths=_FEW, slots=(5, 0, 9, 2)),
    explicit_starts=_row(
        "q_starts say where positions begin", lengths=((5, 20), (9, 9), (1, 6)), starts=(3, 0, 17)
    ),
    more_rows_than_keys=_row(
        "positions before the first key are negative", lengths=((4, 2), (9, 3))
    ),
    long_beside_short=_row(
        "a long sequence beside short ones", lengths=((2, 3), (5, 700), (1, 1), (300, 300))
    ),
    half=_row("packed bfloat16", lengths=_FEW, slots=(5, 0, 9, 2), dtype=torch.bfloat16),
)
_compare(
    {**_MODS, "page": 16},
    paged=_row("keys in pages", lengths=_FEW, spare=3),
    paged_slots=_row("a page table's rows are those of slots", lengths=_FEW, slots=(5, 0, 9, 2)),
    paged_no_keys=_row("no key, and no page", lengths=((3, 0), (4, 9), (2, 0))),
    paged_half=_row("bfloat16 in pages", lengths=_DECODING, dtype=torch.bfloat16),
    page_edges=_row(
        "lengths beside a page's end; stale rows behind them are NaN and infinite",
        lengths=((1, 1), (2, 15), (16, 16), (3, 17), (1, 32), (1, 33)),
    ),
    prefill_and_decoding=_row(
        "a whole prompt, a chunk of one and decoded rows in one call",
        lengths=((40, 40), (1, 70), (1, 33), (16, 90)),
    ),
    shared_prefix=_row(
        "sequences share the pages of a prefix", lengths=((1, 40), (7, 39), (1, 32)), prefix=32
    ),
    a_page_twice=_row("a page comes twice in a sequence", lengths=((1, 50), (3, 37)), twice=True),
    rows_first=_row("a pool that has its rows before its heads", lengths=_FEW, pool="rows_first"),
    slices=_row("key and value are slices of one tensor", lengths=_FEW, pool="slices"),
    layers=_row("layers lie page by page in one tensor", lengths=_FEW, pool="layers"),
    value_in_key=_row(
        "value is the first numbers of key", lengths=_DECODING, pool="value_in_key", heads=(4, 1)
    ),
    far_pages=_row(
        "pages lie farther apart than 2^31 elements",
        lengths=((1, 40), (3, 20)),
        pool="far",
        dtype=torch.bfloat16,
        quick=False,
    ),
)
_compare(
    _MODS,
    **{
        f"pages_of_{page}": _row(f"pages of {page} rows", lengths=_DECODING, page=page)
        for page in (1, 24, 32, 48, 64, 128)
    },
    **{
        f"heads_{q}_of_{kv}": _row(
            f"{q} query heads of {kv}", lengths=_FEW, heads=(q, kv), page=16
        )
        for q, kv in ((3, 3), (7, 1), (8, 1), (14, 2))
    },
)


def _in_turn(*names: str) -> list[tuple[str, bool]]:
    """Return names, and whether the quick subset has them in pages: it has each mod once."""
    return [(name, bool(number % 2)) for number, name in enumerate(names)]


_compare(
    _row(heads=(4, 2), lengths=((40, 40), (9, 75), (1, 64)), slots=(1, 3, 0)),
    causal=_row("the diagonal ends where the keys end", mask_mod="causal"),
    causal_in_pages=_row("the same over pages", mask_mod="causal", page=16),
    **{
        f"{mask}{ending}": _row(
            f"mask {mask}, {where}", mask_mod=mask, page=page, quick=in_turn != (page is None)
        )
        for mask, in_turn in _in_turn(
            "window_left",
            "chunked_local",
            "dilated_head",
            "doc_batch",
            "tree_parents",
            "batch_head_mix",
        )
        for ending, where, page in (("", "packed", None), ("_in_pages", "in pages", 16))
    },
    **{
        f"{score}{ending}": _row(
            f"score mod {score}, {where}",
            score_mod=score,
            mask_mod="causal",
            page=page,
            quick=in_turn != (page is None),
        )
        for score, in_turn in _in_turn("dense_bias", "softcap", "temperature_batch")
        for ending, where, page in (("", "packed", None), ("_in_pages", "in pages", 16))
    },
)


def _nan_in_one_sequence(tensors: dict[str, Tensor]) -> None:
    if tensors["key"].shape[2] == 33:
        tensors["key"][..., 3, :] = torch.nan
        tensors["value"][..., 5, :] = torch.inf


_compare(
    _row(heads=(4, 2), lengths=((5, 20), (30, 33), (9, 9)), values=_nan_in_one_sequence),
    own_nan=_row("a sequence's NaN stays its own"),
    own_nan_in_pages=_row("a sequence's NaN in a page stays its own", page=16),
)
_SINKS = (0.3, -torch.inf, 2.0, -1.0)
_compare(
    _row(heads=(4, 2), lengths=((5, 20), (2, 0), (9, 9)), sinks=_SINKS, mask_mod="window_left"),
    sinks=_row("sinks take their part once, and lse leaves them out"),
    sinks_in_pages=_row("the same over pages", page=16),
)
_compare(
    _row(heads=(4, 2), lengths=((5, 20), (1, 40), (9, 9)), slots=(2, 0, 3), mask_mod="causal"),
    **{
        f"{str(stored).removeprefix('torch.')}_by_{by}{ending}": _row(
            f"{stored} with a scale for each {by}, {where}",
            stored=stored,
            scales=by,
            score_mod="softcap",
            page=page,
            quick=stored is torch.int8 or by == "token",
        )
        for stored in (torch.int8, torch.float8_e4m3fn)
        for by in ("tensor", "head", "token")
        for ending, where, page in (("", "packed", None), ("_in_pages", "in pages", 16))
    },
)
_compare(
    _row(heads=(4, 2), gradients=ALL, dlse=True, mask_mod="causal"),
    training=_row(
        "gradients are those of each sequence alone", lengths=((40, 40), (7, 7), (1, 1))
    ),
    training_empty=_row("empty documents", lengths=((3, 3), (0, 0), (9, 9), (0, 0)), spare=3),
    training_keys=_row("keys of their own, some padding", lengths=((5, 20), (0, 7), (4, 0))),
    training_bias=_row(
        "a learned bias for each slot, row and key",
        lengths=((40, 40), (20, 30)),
        slots=(2, 0),
        score_mod="dense_bias",
    ),
    training_slopes=_row(
        "learned slopes under windows", lengths=_FEW, score_mod="alibi_learned", spare=3
    ),
    training_half=_row(
        "gradients in bfloat16", lengths=((70, 70), (33, 33)), dtype=torch.bfloat16
    ),
)


def _drawn(session: Session, **given: Any) -> Ragged:
    own = {key: given.pop(key) for key in _OWN & given.keys()}
    call = plain(session, "ragged", **{"gradients": frozenset(), **given})
    return RaggedCase(call, **own).fitted(session.backend.capabilities).draw(session.device)


@CASES.behaviour()
def page_outside(session: Session) -> None:
    """A page id outside of the pool raises on a CPU and is clamped into the pool elsewhere."""
    ragged = _drawn(session, lengths=((1, 20), (2, 40)), page=16)
    pages = ragged.memory["key"].shape[0]
    for wrong in (pages, -1, 2**31 - 1):
        ragged.memory["page_table"][1, 1] = wrong
        if session.device.type == "cpu":
            try:
                run(session, ragged)
            except ModIndexError as error:
                session.require(f"page {wrong} " in str(error), f"the error says {error}")
            else:
                session.require(False, f"page {wrong} of {pages} was read without an error")
            continue
        found = run(session, ragged)["out"][1:]
        ragged.memory["page_table"][1, 1] = min(max(wrong, 0), pages - 1)
        session.require(
            same_bytes(found, run(session, ragged)["out"][1:]), f"page {wrong} isn't clamped"
        )


@CASES.behaviour()
def chunks(session: Session) -> None:
    """A prompt in chunks has what it has as a whole."""
    ragged = _drawn(session, lengths=((40, 40),), page=16, mask_mod="causal")
    wanted = budgets_of(ragged)
    parts: list[dict[str, Tensor]] = []
    for begin, end in ((0, 16), (16, 17), (17, 40)):
        batch = anyflex.Packed(
            int32(0, end - begin).to(session.device),
            int32(end).to(session.device),
            page_table=ragged.memory["page_table"],
        )
        memory = {**ragged.memory, "query": ragged.memory["query"][begin:end]}
        parts.append(run(session, dataclasses.replace(ragged, memory=memory), batch.begin()))
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    check(session, ragged, whole, wanted)


@CASES.behaviour()
def masks_of_a_step(session: Session) -> None:
    """Layers with other masks share a step; a number that changes compiles nothing."""
    for page in (None, 16):
        ragged = _drawn(session, lengths=((40, 40), (3, 70)), page=page, heads=4)
        step = ragged.batch().begin()
        compiled: list[int] = []
        for window in (70, 11, 12, 11):
            masked = ragged.with_mask(_window, window)
            check(session, masked, run(session, masked, step))
            compiled.append(len(session.journal.compiled))
        masked = ragged.with_mask(lambda: lambda b, h, q, k: q >= k)
        check(session, masked, run(session, masked, step))
        # A number is a constant until it has changed once.
        session.require(compiled[1] == compiled[-1], "another number compiled another kernel")


def _window(size: int) -> Any:
    return lambda b, h, q, k: (q >= k) & (q - k < size)


@CASES.behaviour()
def parts_of_the_keys(session: Session) -> None:
    """Two parts of the keys, merged, are the whole, also where a part has no key."""
    session.needs("lse" in session.backend.capabilities.aux, "lse isn't declared")
    common = {"heads": 4, "aux": LSE}
    ragged = _drawn(session, lengths=((3, 41), (2, 7), (1, 0)), page=16, **common)
    wanted = budgets_of(ragged)
    found = []
    table = ragged.memory["page_table"]
    q_offsets, q_starts = int32(0, 3, 5, 6), int32(38, 5, -1)
    for lengths, pages in (((16, 0, 0), table), ((25, 7, 0), _behind_the_first_page(table))):
        batch = anyflex.Packed(
            q_offsets.to(session.device),
            int32(*lengths).to(session.device),
            page_table=pages,
            q_starts=q_starts.to(session.device),
        )
        part = run(session, ragged, batch.begin())
        found += [part["out"], part["lse"]]
    out, lse = anyflex.merge_attention(*found)
    check(session, ragged, {"out": out, "lse": lse}, wanted)


def _behind_the_first_page(table: Tensor) -> Tensor:
    """The first sequence's pages but the first."""
    moved = table.clone()
    moved[0, :-1] = table[0, 1:]
    return moved


@CASES.behaviour()
def alone(session: Session) -> None:
    """A sequence's bits don't depend on other sequences, bounds, padding rows or page ids where a
    call asks for that; where it isn't declared, such a call is refused."""
    if "batch_invariant" not in session.backend.capabilities.known_fields:
        few = _drawn(session, lengths=((1, 20), (5, 5)))
        try:
            run(session, few, batch_invariant=True)
        except BackendRefused:
            session.needs(False, "it isn't declared")
        session.require(False, "batch_invariant isn't declared, and a call with it was taken")
    # How work is split may depend on how many threads share it.
    torch.set_num_threads(4)
    try:
        _compare_bits(session)
    finally:
        torch.set_num_threads(1)


def _compare_bits(session: Session) -> None:
    mods = {"score_mod": "temperature_batch", "mask_mod": "window_left"}
    for page, given in ((None, {}), (16, mods)):
        others = tuple((1 + 3 * i % 7, 5 + 37 * i % 300) for i in range(1, 9))
        lengths = ((1, 900), (40, 41), (3, 600), *others)
        ragged = _drawn(session, lengths=lengths, page=page, heads=4, kv_heads=2, **given)
        together = run(session, ragged, batch_invariant=True)
        check(session, ragged, together)
        for number in range(3):
            case = dataclasses.replace(
                ragged.case,
                call=dataclasses.replace(ragged.case.call, seed=number),
                lengths=lengths[number : number + 1],
                slots=(number,),
                spare=number,
            )
            one = dataclasses.replace(case.draw(session.device), mods=ragged.mods)
            for name, tensor in run(session, one, batch_invariant=True).items():
                session.require(
                    same_bytes(
                        tensor[: lengths[number][0]], together[name][ragged.parts[number].rows]
                    ),
                    f"{name} of sequence {number} has other bits beside others",
                )
    session.require(
        all(spec.batch_invariant for spec in session.journal.forwards),
        "a kernel ran whose spec doesn't ask for it",
    )


@CASES.behaviour()
def gradient_into_pages(session: Session) -> None:
    """A gradient through pages is refused with the reason, before anything runs."""
    ragged = _drawn(session, lengths=((2, 20),), page=16)
    for name in ("query", "key", "value"):
        learned = ragged.memory[name].detach().requires_grad_()
        given = {**ragged.memory, name: learned}
        before = len(session.journal.forwards)
        try:
            anyflex.flex_attention_packed(
                given["query"],
                given["key"],
                given["value"],
                ragged.batch().begin(),
                backend=session.name,
            )
        except BackendRefused as error:
            session.require(f"{name} requires grad" in str(error), f"the refusal says {error}")
        else:
            session.require(False, f"{name} in pages requires grad, and nothing was refused")
        session.require(len(session.journal.forwards) == before, "a kernel ran all the same")


@CASES.behaviour()
def undeclared_layouts(session: Session) -> None:
    """Specs of layouts that aren't declared are refused; the calls run by dense kernels."""
    check(session, ragged := _drawn(session, lengths=((5, 5), (9, 9))), run(session, ragged))
    spec = dataclasses.replace(session.journal.forwards[-1], q_layout="dense", kv_layout="dense")
    packed = dataclasses.replace(spec, q_layout="packed", kv_layout="packed")
    paged = dataclasses.replace(packed, kv_layout="paged", page_size=16)
    for asked in (packed, paged):
        if not declares_layout(session, paged=asked is paged):
            session.require(
                isinstance(session.ask(asked), Rejected),
                f"keys that are {asked.kv_layout} aren't declared",
            )


@CASES.behaviour(quick=False)
def documents(session: Session) -> None:
    """Thousands of documents in one call, forward and backward."""
    ragged = _drawn(
        session,
        lengths=((1, 1), (3, 3), (0, 0), (2, 2), (4, 4)),
        mask_mod="causal",
        gradients=QKV & plain(session, "documents").gradients,
    )
    rounds, rows = 1000, ragged.memory["query"].shape[0]
    memory = {
        name: tensor.repeat(rounds, *[1] * (tensor.dim() - 1))
        for name, tensor in ragged.memory.items()
    }
    lengths = torch.tensor([queries for queries, _ in ragged.case.lengths]).repeat(rounds)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    batch = anyflex.Packed(offsets.to(session.device))
    found = run(session, dataclasses.replace(ragged, memory=memory), batch.begin())
    wanted = budgets_of(ragged)
    for begin in range(0, rounds * rows, rows):
        one = {name: tensor[begin : begin + rows] for name, tensor in found.items()}
        check(session, ragged, one, wanted)


@CASES.behaviour(quick=False)
def compiled(session: Session) -> None:
    """torch.compile(fullgraph=True) of packed calls computes the same, for all lengths by two
    graphs at most."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    attention = torch.compile(anyflex.flex_attention_packed, fullgraph=True, backend=compiler)
    for lengths in (((3, 3), (9, 9)), ((4, 4), (10, 10)), ((7, 7), (2, 2))):
        ragged = _drawn(
            session, lengths=lengths, mask_mod="causal", gradients=plain(session, "c").gradients
        )
        check(session, ragged, run(session, ragged, attention=attention))
    session.require(len(graphs) <= 2, f"three lengths made {len(graphs)} graphs")


@CASES.behaviour()
def captured_graph(session: Session) -> None:
    """A captured graph replays with lengths and pages that were written since; the batch may
    shrink."""
    session.needs(session.device.type == "cuda", "no graphs of the device can be captured here")
    ragged = _drawn(session, lengths=((1, 40), (1, 70), (1, 33)), page=16, mask_mod="causal")
    batch = anyflex.Packed.with_capacity(
        4, max_q=1, max_kv=80, page_table=ragged.memory["page_table"]
    )
    batch.set([1, 1, 1], [40, 70, 33])
    graph = torch.cuda.CUDAGraph()
    with session.unwatched():
        torch.accelerator.synchronize()
        with torch.Stream(device=session.device):
            run(session, ragged, batch.begin())
        torch.accelerator.synchronize()
        with torch.cuda.graph(graph):
            found = run(session, ragged, batch.begin())
        graph.replay()
        check(session, ragged, found)
        # The second sequence leaves, and the third one's pages move to its row.
        table = ragged.memory["page_table"]
        table[1] = table[2].clone()
        batch.set([1, 1], [40, 33], [0, 1])
        query = ragged.memory["query"]
        query[1] = query[2].clone()
        graph.replay()
    kept = (ragged.parts[0], ragged.parts[2]._replace(rows=slice(1, 2)))
    check(session, dataclasses.replace(ragged, parts=kept), found)
