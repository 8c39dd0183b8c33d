"""Arguments of entry kernels, described once for the kernels and for the hosts that launch them.

An entry kernel takes pointers, numbers and constants, because a launch can't take records; it
packs them into records first. A name means the same in each kernel, so a kernel's parameters are
its whole signature: `Programs.program` looks up their types here, and a test checks that each is
described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyflex_triton.arguments import Types

__all__ = ["ARGUMENTS", "ELEMENTS", "GIVEN", "Arguments", "types_of"]

ELEMENTS = "elements"
"""Type of a pointer to elements of the spec's dtype."""
GIVEN = "given"
"""Type that the spec, or the code that makes the program, determines."""


@dataclass(frozen=True)
class Arguments:
    """Arguments with one type and one meaning.

    Args:
        names: each kernel takes those that it needs, in this order.
        type: Triton's, ELEMENTS or GIVEN; None: they are constants.
        meaning: text for readers.
    """

    names: tuple[str, ...]
    type: Types | None
    meaning: str


def types_of(arguments: Sequence[Arguments]) -> dict[str, Types]:
    """Return the types of the arguments that aren't constants, by name."""
    return {name: each.type for each in arguments if each.type is not None for name in each.names}


ARGUMENTS = (
    # Tensors, and the layout of their rows
    Arguments(("query", "key", "value"), ELEMENTS,
              "[B, H, rows, columns]; descriptors where a kernel's docstring says so"),
    Arguments(("dout",), ELEMENTS, "gradient of out, which backward reads"),
    Arguments(("query_rows", "key_rows", "value_rows", "dout_rows"), ELEMENTS,
              "pointers to these tensors, whatever DESCRIBED says"),
    Arguments(("out", "rest"), ELEMENTS, "result of forward, and its rounding residual"),
    Arguments(("dq", "dk", "dv"), ELEMENTS, "gradients that backward writes"),
    Arguments(("q_strides", "k_strides", "v_strides", "o_strides", "r_strides", "do_strides",
               "dq_strides", "dk_strides", "dv_strides"), ("i64",) * 4,
              "(b, h, row, column), all but the last in units of UNITS elements; the last counts "
              "where SCATTERED says so"),
    Arguments(("dl_strides",), ("i64",) * 3, "strides (b, h, row) of dlse"),
    Arguments(("DIM", "VALUE_DIM"), None, "head dims of queries and keys, and of values"),
    Arguments(("D", "DV"), None, "columns of a tile, or of a part of it (`column_parts`)"),
    Arguments(("UNITS", "SCATTERED"), None, "for each tensor that has strides: its `Layout`'s"),
    Arguments(("UNIT",), None, "UNITS of the only tensor that has strides"),
    Arguments(("WIDE",), None, "offsets within a head are 64-bit"),
    Arguments(("PRECISION",), None, "input precision of products"),
    Arguments(("DESCRIBED",), None,
              "how the tensors that a loop steps over are loaded. 'host': by descriptors of all "
              "rows of all heads, of tiles of a step. 'kernel': by those that the kernel makes of "
              "a head's rows. None: by pointers"),
    Arguments(("BESIDE",), None, "for each of these tensors: see `tiles.head_at`"),
    # Values of rows
    Arguments(("tops",), "*fp32",
              "[B, Hq, L, 2], for backward: row_max of `final_scores`, and the logarithm to base "
              "2 of row_sum relative to it"),
    Arguments(("lse", "max_scores", "given"), "*fp32",
              "[B, Hq, L]; the last is sum(out * dout), where IS_GIVEN"),
    Arguments(("dlse",), "*fp32", "gradient of lse"),
    Arguments(("row_values", "values_by_row"), "*fp32",
              "output of `backward.row_kernel`, [4, values_in_all]; values_by_row is always a "
              "pointer"),
    Arguments(("values_of_head",), "i32",
              "L, or a little more: descriptors also load values past the last row, which must be "
              "those of rows without a live key, because 0 times NaN is NaN"),
    Arguments(("values_in_all",), "i64", "B * Hq * values_of_head"),
    Arguments(("partial_out",), "*fp32", "workspace of decoding: see `decode.decode_kernel`"),
    Arguments(("key_sums",), "*fp32",
              "dK and dV of the splits of KV heads: see `backward_keys.sum_kernel`"),
    Arguments(("odd_keys",), "*i32", "for every 64 keys 1 if some dk or dv is non-finite, else 0"),
    Arguments(("sums_at",), "i64", "offset of the splits' sums in partial_out"),
    Arguments(("WANT_LSE", "WANT_MAX", "WANT_REST", "WANT_TOPS", "WANT_DELTA", "WANT_DQ",
               "WANT_DK", "WANT_DV"), None, "results that are wanted; dV alone needs no delta"),
    Arguments(("HAS_DLSE", "IS_GIVEN", "HAS_REST"), None, "whether there is dlse, given, rest"),
    # Block mask
    Arguments(("offsets", "ends", "runs"), "*i32", "`MaskRows` of the mask"),
    Arguments(("mask_strides",), ("i32", "i32"), "strides (b, h) of offsets and ends"),
    Arguments(("HAS_MASK",), None, "whether there is a block mask"),
    Arguments(("Q_BLOCK", "KV_BLOCK"), None, "block sizes of the mask, which no tile crosses"),
    Arguments(("PAGE",), None, "rows of a page of a packed call's keys; 0: they aren't in pages"),
    Arguments(("MASK_READS",), None,
              "whether the mask mod reads elements that row and key decide together"),
    Arguments(("EVEN",), None,
              "whether lengths and the mask's blocks are multiples of a step of the loop"),
    # Mods
    Arguments(("tables", "ints", "floats"), GIVEN, "tensors and numbers that mods capture"),
    Arguments(("totals",), GIVEN, "accumulators of captured tensors' gradients"),
    Arguments(("shifts",), ("i32",) * 4, "numbers added to b, h, q_idx, kv_idx for mods"),
    Arguments(("scale",), "fp32", "factor of raw products"),
    Arguments(("dropout",), ("i32", "i32", "i32", "fp32"),
              "two words of the seed, threshold, scale: see `dropout.Dropout`; or None"),
    Arguments(("sinks",), "*fp32",
              "[Hq], one more score a head without a value, which lse lacks, tops have; or None"),
    # Packed sequences
    Arguments(("sequences",), ("*i32",) * 8 + ("i32",) * 4 + ("i64",) + ("i32",) * 3,
              "a packed call's `PackedRows`, as `forward_call.packed_values` has it; or None"),
    Arguments(("k_scale", "v_scale"), ("*fp32", "i64", "i64", "i64"),
              "where key and value are stored in 8 bits, the scale of each row, and its strides "
              "(page, head, row); or None"),
    Arguments(("READ_ROWS", "READ_COLUMNS"), None,
              "early reads, or None; with them SCORE_MOD and MASK_MOD are the functions of read"),
    Arguments(("SCORE_MOD", "SCORE_MOD_BACKWARD", "CAPTURED_GRADIENTS", "MASK_MOD"), None,
              "functions of `anyflex_triton.mods`, or None"),
    Arguments(("SCORED",), None, "whether there is a score mod"),
    # Sizes
    Arguments(("batch_heads", "batch", "heads"), "i32", "B * Hq, B, Hq"),
    Arguments(("kv_batch_heads", "kv_heads"), "i32", "key's batch entries times Hkv, and Hkv"),
    Arguments(("q_length", "kv_length"), "i32", "numbers of queries and of keys"),
    Arguments(("padded_keys",), "i32", "S, padded to whole tiles or not"),
    Arguments(("tiles", "head_group"), "i32",
              "number of tiles of a head; number of heads that run at a time"),
    Arguments(("splits", "split_length"), "i32",
              "number of splits of the keys; number of keys of one, a multiple of BLOCK_N"),
    Arguments(("head_splits", "split_heads"), "i32",
              "number of splits of the query heads that read a KV head; number of those of one"),
    Arguments(("GROUP", "PACKED"), None,
              "query heads of a KV head; those of a decoding tile, GROUP or 1"),
    Arguments(("KV_SHARED",), None, "whether all batch entries have the same keys"),
    Arguments(("SPLITS", "BLOCK_M", "BLOCK_N", "BLOCK"), None,
              "splits, query rows, keys, elements that are processed at a time"),
    # Order of execution
    Arguments(("OVERLAP", "PARTS"), None, "fields of `Config`"),
    Arguments(("LOOPED",), None, "whether the loop over query heads stays one for one head"),
    Arguments(("FOLLOWS",), None, "whether the launch may begin before the one before it ends"),
    Arguments(("DECODED",), None,
              "in a batch-invariant call the most query rows of a decoded sequence, else 0"),
    Arguments(("LEADS",), None, "whether the next launch may begin before this one ends"),
    # Sums that repeat: see `operations.accumulate`
    Arguments(("total",), "*fp32", "gradient of a captured tensor, [count]"),
    Arguments(("integers", "counts"), "*i64", "sum and number of its additions as integers"),
    Arguments(("largest",), "*i32", "bits of its largest addition"),
    Arguments(("count",), "i64", "number of elements of total"),
    # Finer masks: see `mask_refinement_kernels`
    Arguments(("kinds",), "*i8", "kinds of tiles"),
    Arguments(("new_edges", "new_runs"), "*i32", "`MaskRows` of the finer mask"),
    Arguments(("length", "column_length", "columns", "chunks"), "i32",
              "lengths along rows and columns, tiles of a row, chunks of a row"),
    Arguments(("TRANSPOSED", "ROW_BLOCK", "COLUMN_BLOCK", "ROWS", "COLUMNS", "CHUNK"), None,
              "which mask it is; sizes of its blocks, of a tile, and of a chunk in tiles"),
)  # fmt: skip
