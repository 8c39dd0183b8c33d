"""Faults 701 to 728: packed sequences and pages, in core's relabelling and in a layout of one's
own."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault
from tests.testing.faults.packed_path import MODEL

__all__ = ["FAULTS", "OWN"]

_TABLES, _PAGES, _CALL = "row_tables.py", "pages.py", "core_layout.py"
_OFFSETS = 'object.__setattr__(one, "index_offsets", (slot, 0, start, 0))'
_VALUES = "self.dense.forward(one, Outputs(out.out[:, :, begin:end], lse, maxima))"
_FOUND = "ids = table[table_row, position // page].long()"


def _fault(number: int, what: str, case: str, says: str, *changes: tuple[str, str, str]) -> Fault:
    return Fault(number, what, tuple(Change(*each) for each in changes), f"ragged/{case}", says)


FAULTS = (
    _fault(
        701,
        "mods see a sequence's number for its slot",
        "slots_out_of_order",
        "is ",
        (_TABLES, "RowTables(of_rows(packed.slots),", "RowTables(owner.to(torch.int32),"),
    ),
    _fault(
        702,
        "positions begin at 0, whatever keys came before",
        "causal",
        "is ",
        (_TABLES, "of_rows(packed.q_starts - packed.q_offsets[:-1])", "-begin"),
    ),
    _fault(
        703,
        "given q_starts are ignored",
        "explicit_starts",
        "is ",
        ("packed.py", "if q_starts is None else q_starts", "if True else q_starts"),
    ),
    _fault(
        704,
        "sequence i reads row i of the page table, not its slot's",
        "paged_slots",
        "",
        (_PAGES, "packed.table_rows[owner].long()\n", "owner\n"),
    ),
    _fault(
        705,
        "the last key is left out",
        "one",
        "sequence 0: ",
        (_TABLES, "begin + of_rows(packed.kv_lengths)", "begin + of_rows(packed.kv_lengths - 1)"),
    ),
    _fault(
        706,
        "the row behind the last key is read",
        "own_nan",
        "not finite alike",
        (_TABLES, "begin + of_rows(packed.kv_lengths)", "begin + of_rows(packed.kv_lengths + 1)"),
    ),
    _fault(
        707,
        "a page begins one row early",
        "page_edges",
        "",
        (_PAGES, "page = (position // page_size)", "page = ((position + 1) // page_size)"),
    ),
    _fault(
        708,
        "score mods see the packed row for kv_idx",
        "no_rows_between",
        "is ",
        (
            _TABLES,
            "return score_mod(score, slot[q_idx].long(), h, position, kv_idx - begin[q_idx])",
            "return score_mod(score, slot[q_idx].long(), h, position, kv_idx.clamp(max=19))",
        ),
    ),
    _fault(
        709,
        "a page id outside of the pool is clamped without a word",
        "page_outside",
        "without an error",
        (_PAGES, "            _check(found[inside], pages)\n", "            pass\n"),
    ),
    _fault(
        710,
        "lse has the sinks in it",
        "sinks",
        "lse ",
        (
            _CALL,
            "        sinks=sinks,\n        backend=backend,\n    )\n",
            "        sinks=sinks,\n        backend=backend,\n    )\n"
            "    if sinks is not None and more.lse is not None:\n"
            "        more = more._replace(lse=torch.logaddexp(more.lse, sinks[:, None]))\n",
        ),
    ),
    _fault(
        711,
        "a scale for each head is read by token",
        "int8_by_head",
        "",
        (
            _CALL,
            "scale = scale[:, None]",
            "scale = scale.repeat(stored.shape[0])[: stored.shape[0], None, None]",
        ),
    ),
    _fault(
        712,
        "values are multiplied by the keys' scale",
        "int8_by_tensor",
        "out is ",
        (_CALL, "_scaled(value, v_scale,", "_scaled(value, k_scale,"),
    ),
    _fault(
        713,
        "padding rows attend to the last sequence",
        "padding_rows",
        "",
        (_TABLES, "numbers.new_zeros(1)", "numbers[-1:]"),
    ),
    _fault(
        714,
        "a mask's blocks are kept for another number",
        "masks_of_a_step",
        "is ",
        (
            _CALL,
            "key += known.text, *map(id, known.captured), *known.ints, *known.floats",
            "key += (known.text,)",
        ),
    ),
    _fault(
        715,
        "two parts without keys make NaN",
        "parts_of_the_keys",
        "nan",
        ("merge.py", "share = torch.where(total == 0, 1.0, total)", "share = total"),
    ),
    _fault(
        716,
        "gradients through pages are dropped without a word",
        "gradient_into_pages",
        "nothing was refused",
        (
            "arguments.py",
            '            if _learns(tensor):\n                fail(\n                    "B',
            '            if False:\n                fail(\n                    "B',
        ),
    ),
)
"""In core's relabelling, found by a backend that takes dense calls only."""

OWN = (
    _fault(
        717,
        "core never asks for the layout that is declared",
        "one",
        "declared layout was not taken",
        ("own_layout.py", "if 0 in (packed", "if True or 0 in (packed"),
    ),
    _fault(
        718,
        "stale rows of the last page are multiplied by weights of 0",
        "page_edges",
        "not finite alike",
        (
            MODEL,
            _VALUES,
            f"{_VALUES}\n            if length and end > begin and rows.page_table is not None:\n"
            "                whole = self.keys(call, call.value, i, -(-length // 16) * 16)\n"
            "                out.out[:, :, begin:end] += 0 * whole.sum()",
        ),
    ),
    _fault(
        719,
        "the last page is read to its end",
        "own_nan_in_pages",
        "not finite alike",
        (MODEL, "torch.arange(length)", "torch.arange(-(-length // page) * page)"),
    ),
    _fault(
        720,
        "the first position is ignored",
        "causal_in_pages",
        "is ",
        (MODEL, _OFFSETS, _OFFSETS.replace("start, 0))", "0, 0))")),
    ),
    _fault(
        721,
        "mods see the sequence's number for its slot",
        "paged_slots",
        "is ",
        (MODEL, _OFFSETS, _OFFSETS.replace("(slot,", "(i,")),
    ),
    _fault(
        722,
        "the table's rows are taken in the order of the sequences",
        "paged_slots",
        "",
        (MODEL, "i if rows.table_rows is None else int(rows.table_rows[i])", "i"),
    ),
    _fault(
        723,
        "the table's rows are taken to lie one behind the other",
        "paged",
        "",
        (
            MODEL,
            _FOUND,
            _FOUND.replace("table[", "table.as_strided(table.shape, (table.shape[1], 1))["),
        ),
    ),
    _fault(
        724,
        "every sequence has the first one's blocks",
        "long_beside_short",
        "is ",
        (MODEL, "                block_row += blocks\n", ""),
    ),
    _fault(
        725,
        "query heads read another KV head",
        "paged",
        "is ",
        (MODEL, "transpose(0, 1)[None]", "transpose(0, 1)[None].flip(1)"),
    ),
    _fault(
        726,
        "padding rows are not written",
        "padding_rows",
        "were not written",
        (MODEL, "        out.out.zero_()\n", "        out.out[:, :, :-5] = 0\n"),
    ),
    _fault(
        727,
        "a sequence is summed in other steps where others are in the call",
        "alone",
        "other bits",
        (
            MODEL,
            "        block_row = 0\n",
            "        block_row = 0\n"
            "        self.dense.keys_at_once = 128 if len(rows.slots) == 1 else 48\n",
        ),
    ),
    _fault(
        728,
        "ids behind a length are cleaned in the caller's table",
        "paged",
        "page_table was written to",
        (MODEL, _FOUND, f"table.clamp_(0, memory.shape[0] - 1)\n        {_FOUND}"),
    ),
    _fault(
        729,
        "a decoded row is summed in other steps where a prefill is in the call",
        "alone",
        "other bits",
        (
            MODEL,
            "        block_row = 0\n",
            "        block_row = 0\n"
            "        self.dense.keys_at_once = 128 if rows.max_q == 1 else 48\n",
        ),
    ),
)
"""In a backend's own kernel for these layouts."""
