"""Faults to seed into the kernels' text: barriers that are left out, indices and bounds that are
swapped."""

from __future__ import annotations

import re
from typing import NamedTuple

from packed_faults import PACKED_TABLE

from anyflex_mps.arguments import place

__all__ = ["BARRIERS", "FAULTS", "Barrier", "Fault", "kernel_of", "places_of"]


def kernel_of(text: str) -> str:
    """Return the name of a source's kernel."""
    (name,) = re.findall(r"^kernel void (\w+)\(", text, re.MULTILINE)
    return str(name)


_TRAINING, _DECODING = "training", "decoding"
_NONFINITE = "training beyond finite numbers"

# Barriers

_STEP = ("before a step's loads", "after a step's loads")
_ZEROS = ("before a step's zeros", "after a step's zeros")
_FLAGS = ("before flags are read",)
_PLACES = {
    "self_test": ("after its loads",),
    "forward": (*_STEP, *_FLAGS),
    "decode": (*_STEP, *_FLAGS),
    "combine": (),
    "rows": (),
    "keys": (*_STEP, *_ZEROS, *_FLAGS),
    "queries": (*_STEP, *_ZEROS, *_FLAGS),
    "totals": (),
}
"""Where each kernel's barriers are, in order."""
_BARRIER = re.compile(r"^ *\w*barrier\(.*\);\n", re.MULTILINE)


def places_of(text: str) -> tuple[str, ...]:
    """Return where a source's barriers are, in order."""
    kernel = kernel_of(text)
    # The pass that makes no dQ has no second pass either.
    return _STEP if kernel == "queries" and "* dq" not in text else _PLACES[kernel]


class Barrier(NamedTuple):
    """A barrier of a kernel.

    Args:
        kernel: name of the kernel.
        place: where it is.
        call: name of the call that needs it.
    """

    kernel: str
    place: str
    call: str = ""

    def seeded(self, text: str) -> str:
        """Return a kernel's source without the barrier, which it may not have.

        The source must have as many barriers as are known, each a statement on a line of its own.
        """
        found = list(_BARRIER.finditer(text))
        places = places_of(text)
        assert len(found) == len(places) == text.count("barrier("), self.kernel
        if self.place not in places:
            return text
        left_out = found[places.index(self.place)]
        return text[: left_out.start()] + text[left_out.end() :]


def _calls_of(kernel: str) -> tuple[str, ...]:
    # Packed keys and pages share the statements around barriers.
    if kernel == "decode":
        return _DECODING, "packed decoding"
    if kernel == "forward":
        return _NONFINITE, "paged beyond finite numbers"
    return (_NONFINITE,)


BARRIERS = [
    Barrier(kernel, place, call)
    for kernel, places in _PLACES.items()
    for call in _calls_of(kernel)
    for place in places
]
"""All barriers of all kernels, of dense and of packed calls."""


# Indices and bounds


class Fault(NamedTuple):
    """A place of a kernel's source that another text replaces.

    Args:
        kernel: name of the kernel.
        call: name of the call that finds the fault.
        name: of the fault.
        old: text that is replaced. It is there once, in some source of the kernel.
        new: text in its place.
    """

    kernel: str
    call: str
    name: str
    old: str
    new: str

    def seeded(self, text: str) -> str:
        """Return a kernel's source with the fault, or the source itself where `old` isn't."""
        assert text.count(self.old) <= 1, self
        return text.replace(self.old, self.new)


_DEAD = "training with dead rows and keys"
_REPEATABLE = "repeatable training"
_NONFINITE_DECODING = "decoding beyond finite numbers"

_TABLE: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("forward", _TRAINING): {
        # Rows, keys, heads and runs
        "strides of query": (
            "(int)P[query.row], (int)P[query.column],",
            "(int)P[query.column], (int)P[query.row],",
        ),
        "KV head by remainder": ("kv_head = h / 2;", "kv_head = h % 2;"),
        "batch of keys": ("kv_batch = b;", "kv_batch = 0;"),
        "strides of the mask": (
            "b * P[mask_batch] + h * P[mask_head]",
            "b * P[mask_head] + h * P[mask_batch]",
        ),
        "runs of the next block": ("P[mask_head] + block;", "P[mask_head] + block + 1;"),
        "last run left out": ("offsets[runs_at + 1];", "offsets[runs_at + 1] - 1;"),
        "begin of a run": ("runs[3 * run] * 24", "runs[3 * run + 1] * 24 - 24"),
        "run past the last key": (
            "min(runs[3 * run + 1] * 24, kv_length)",
            "runs[3 * run + 1] * 24",
        ),
        "partial runs taken as full": ("runs[3 * run + 2] == 1", "runs[3 * run + 2] != 1"),
        "steps that overlap": ("first_key += 32", "first_key += 24"),
        "key past the end": ("live = at < end", "live = at <= end"),
        "row past the tile": ("if (row < end_row) {", "if (row <= end_row) {"),
        "tile past its block": ("min((block + 1) * 40, q_length)", "q_length"),
        "staged row past the end": ("row < end && column", "row <= end && column"),
        "staged column past the end": ("column < dim)", "column <= dim)"),
        "stored column past the end": ("column >= 12", "column > 12"),
        "row within the tile for mods": ("q_idx = min(row,", "q_idx = -first_row + min(row,"),
        "query and key of the score mod": (
            "score = score_mod(raw, b + (int)P[batch_shift], h + (int)P[head_shift], q_idx + "
            "(int)P[row_shift], kv_idx",
            "score = score_mod(raw, b + (int)P[batch_shift], h + (int)P[head_shift], kv_idx + "
            "(int)P[row_shift], q_idx",
        ),
        # Lanes and fragments
        "row of a lane": ("lane / 2 % 4", "lane % 4"),
        "columns of a lane": ("(lane / 4 & 2) * 2", "(lane / 4 & 2)"),
        "largest score of half a row": (
            "high = max(high, simd_shuffle_xor(high, (ushort)8));",
            "",
        ),
        "sum of another row": ("shuffle_xor(sum, (ushort)8)", "shuffle_xor(sum, (ushort)4)"),
        "keys not transposed": ("28, ulong2(0), true", "28, ulong2(0), false"),
        "row and column of a value": (
            "v_rows + j * 8 * 20 + d * 8",
            "v_rows + d * 8 * 20 + j * 8",
        ),
        "element not rescaled": ("acc[d].thread_elements()[1] *= factor;", ""),
        "sum not rescaled": ("sum *= factor;", ""),
        "scale forgotten": ("thread_elements()[j % 2] * F[0]", "thread_elements()[j % 2]"),
    },
    ("forward", _NONFINITE): {
        "second pass by simdgroup": ("odd || flags[i] != 0u", "flags[sg] != 0u"),
        "non-finite addition of dead pairs": ("of_row != -INFINITY && at", "at"),
        "column of another lane": ("(j & 4) << 1", "(j & 4) >> 1"),
    },
    ("forward", _DEAD): {
        "non-finite values staged": ("pass == 1, tid", "false, tid"),
        "sum of both passes": ("      sum = 0.0f;\n", ""),
    },
    ("decode", _DECODING): {
        "splits that overlap": (
            "min(split_begin + (int)P[split_length],",
            "min(split_begin + (int)P[split_length] + 1,",
        ),
        "split past the last key": (
            "min(split_begin + (int)P[split_length], (int)P[kv_length])",
            "split_begin + (int)P[split_length]",
        ),
        "tile taken for the split": ("(int)group.x % splits", "(int)group.x / splits"),
        "head of a packed row": ("packed_row / q_length)", "packed_row % q_length)"),
        "head of a row's mods": ("end_row - 1) / q_length", "end_row - 1) / (q_length + 1)"),
        "one place for all splits": ("* splits + split;", "* splits;"),
        "row past the tile": ("if (row < end_row) {", "if (row <= end_row) {"),
        "stored column past the end": ("if (column < 12)", "if (column <= 12)"),
    },
    ("decode", _NONFINITE_DECODING): {
        "non-finite values staged": ("pass == 1, tid", "false, tid"),
    },
    ("combine", _DECODING): {
        "last split left out": (
            "i < splits; i++) {\n      const float part",
            "i < splits - 1; i++) {\n      const float part",
        ),
        "largest score for the sum": ("sums[3 * i + 1] *", "sums[3 * i] *"),
        "sums of another row": ("partial_sums + at * splits * 3", "partial_sums + at * 3"),
        "parts relative to their own splits": ("part * factor : part", "part : part"),
        "row past the end": ("row >= q_length", "row > q_length"),
    },
    ("combine", _NONFINITE_DECODING): {
        "infinite part of a vanished weight": (
            "isfinite(part) ? part * factor : part",
            "part * factor",
        ),
    },
    ("rows", _TRAINING): {
        "sign of dlse": ("sum -= dlse", "sum += dlse"),
        "columns of dout": ("(int)column * (int)P[dout.column]", "(int)column * (int)P[dout.row]"),
        "column past the end": ("column < 12", "column <= 12"),
        "row past the end": ("row >= (int)P[q_length]", "row > (int)P[q_length]"),
        "sum of one lane": ("sum = simd_sum(sum);", ""),
    },
    ("keys", _TRAINING): {
        "scale forgotten": ("P, F) * F[0] : 0.0f", "P, F) : 0.0f"),
        "sign of delta": ("dweight - delta", "dweight + delta"),
        "one query head of a KV head": ("h < (kv_head + 1) * 2", "h < kv_head * 2 + 1"),
        "size for delta": ("[2 * P[row_plane] + q_idx]", "[P[row_plane] + q_idx]"),
        "row values of another head": ("P[heads] + h) * q_length", "P[heads]) * q_length"),
        "queries not transposed": ("8, 28, ulong2(0), true", "8, 28, ulong2(0), false"),
        "scores' gradients for weights": ("dv_sums[d], p[j], x", "dv_sums[d], ds[j], x"),
        "blocks of keys for blocks of rows": ("runs[3 * run + 1] * 40", "runs[3 * run + 1] * 24"),
        "strides of dk": ("(int)row * (int)P[dk.row]", "(int)row * (int)P[dk.column]"),
        "key past the tile": ("if (row < end_row) {", "if (row <= end_row) {"),
        "weights of dead pairs": ("weight = live ? fast", "weight = inside ? fast"),
        "row past the end": ("q_idx = min(at, end - 1)", "q_idx = at"),
    },
    ("keys", _DEAD): {
        "non-finite queries staged": ("q_rows[i] = (float)0.0f;", "q_rows[i] = q_rows[i];"),
        "sums of both passes": (
            "break;\n      for (int d = 0; d < 3; d++)",
            "break;\n      for (int d = 0; d < 0; d++)",
        ),
    },
    ("keys", _NONFINITE): {
        "second pass by simdgroup": ("odd || flags[i] != 0u", "flags[sg] != 0u"),
        "non-finite addition of dead pairs": (
            "seen != 0u && first_query + j < end && column < 20",
            "first_query + j < end && column < 20",
        ),
        "bit of another pair": ("1u << (uint)(j * 2 + i)", "1u << (uint)(j + i)"),
    },
    ("queries", _TRAINING): {
        "scale forgotten": ("P, F) * F[0] : 0.0f", "P, F) : 0.0f"),
        "columns of dq": ("(int)column * (int)P[dq.column]", "(int)column * (int)P[dq.row]"),
        "size for delta": ("rows[2 * P[row_plane] + at_row]", "rows[P[row_plane] + at_row]"),
        "additions of dead pairs": ("-INFINITY && (full ||", "-INFINITY && (true ||"),
        "additions past the last key": ("inside = at < end", "inside = at <= end"),
        "place of an addition": ("op_add_float(g1 + v11, v9)", "op_add_float(g1, v9)"),
        "one row's share of an addition": ("op_sum_of_rows(live ? grad : 0.0f)", "grad"),
        "half of a row's sum": (
            "row_sums[i] += simd_shuffle_xor(row_sums[i], (ushort)8);",
            "row_sums[i] += 0.0f;",
        ),
        "a row's sum by every lane": ("if (row < end_row && c == 0)", "if (row < end_row)"),
        "own rows of the first simdgroup": ("g_rows + (int)sg * 8 * 20", "g_rows"),
    },
    ("queries", _DEAD): {
        "additions of both passes": ("if (pass == 0)\n              captured", "captured"),
        "non-finite keys staged": ("k_rows[i] = (float)0.0f;", "k_rows[i] = k_rows[i];"),
        "sums of both passes": (
            "break;\n      for (int d = 0; d < 3; d++)",
            "break;\n      for (int d = 0; d < 0; d++)",
        ),
    },
    ("queries", _NONFINITE): {
        "second pass by simdgroup": ("odd || flags[i] != 0u", "flags[sg] != 0u"),
    },
    ("queries", _REPEATABLE): {
        "words of an exact sum": ("s1 + 5 * v11", "s1 + 4 * v11"),
        "count of additions": ("op_add_long(words + 3, 1ul);", ""),
    },
    ("totals", _REPEATABLE): {
        "element past the end": ("at < P[elements]", "at <= P[elements]"),
        "halves of an exact sum": (
            "words[1] << 32 | (ulong)words[0]",
            "words[0] << 32 | (ulong)words[1]",
        ),
    },
}
"""Old and new text of each fault's name, by kernel and call. ``P[query.row]`` stands for the place
of that number in ``P``."""


def _with_places(text: str) -> str:
    return re.sub(
        r"\bP\[([a-z]\w*)\.?(\w*)\]", lambda found: place(found[1], found[2] or None), text
    )


FAULTS = [
    Fault(kernel, call, name, *map(_with_places, texts))
    for (kernel, call), faults in [*_TABLE.items(), *PACKED_TABLE.items()]
    for name, texts in faults.items()
]
