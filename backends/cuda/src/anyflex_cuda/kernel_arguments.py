"""Arguments of this package's entry kernels beside those of `anyflex_triton.kernel_arguments`."""

from __future__ import annotations

from anyflex_triton.building import GIVEN, Arguments, Types, types_of

__all__ = ["ARGUMENTS", "ROW_STRIDES", "TYPES"]

ARGUMENTS = (
    # Tensors
    Arguments(("q_desc", "k_desc", "v_desc", "o_desc", "r_desc"), GIVEN,
              "descriptors of query, key, value, out and rest"),
    Arguments(("q2_desc", "k2_desc", "v2_desc", "o2_desc", "r2_desc"), GIVEN,
              "descriptors of the second part of their columns, or None"),
    Arguments(("query_2", "key_2", "value_2", "dout_2", "dq_2", "dk_2", "dv_2"), GIVEN,
              "descriptors of the second part of these tensors' columns, or None"),
    Arguments(("dq_sums",), "*fp32", "[B * Hq, padded_length * D / 32, 32], sums of dQ"),
    Arguments(("odd_rows",), "*i32", "for every 64 query rows 1 if dq is to be computed again"),
    Arguments(("counter",), "*i32",
              "0 before the launch: number of tiles taken beyond each program's first"),
    # Block mask
    Arguments(("key_offsets", "key_ends", "key_runs"), "*i32", "`MaskRows` of the transpose"),
    Arguments(("key_mask_strides",), ("i32", "i32"), "its strides"),
    Arguments(("tile_order",), "*i32", "`tile_order.TileOrder`'s tiles; None without a mask"),
    Arguments(("order_strides",), ("i32", "i32"), "its strides"),
    Arguments(("ordered",), "i32", "0: a head's last tiles come first"),
    Arguments(("RAGGED",), None, "whether some step has rows or keys past the end"),
    # Mods
    Arguments(("SCORE_MOD_OF_READ", "MASK_SCORES"), None,
              "functions of `anyflex_triton.mods` for the loops over steps"),
    Arguments(("READ_TILE", "READ_STEP"), None, "functions of `anyflex_triton.pair_reads`"),
    # Sizes
    Arguments(("OF_QUERIES",), None, "whether tiles are of query rows, or of keys"),
    Arguments(("units",), "i32", "number of heads, or of splits of heads, that tiles are of"),
    Arguments(("padded_length",), "i32", "L, padded to whole tiles"),
    Arguments(("row_tiles", "key_tiles"), "i32", "elements of odd_rows and odd_keys"),
    Arguments(("row_programs",), "i32", "number of programs, the first ones, that look at rows"),
    Arguments(("TILES",), None, "number of tiles that a program looks at"),
    Arguments(("tile_list",), "*i32", "what `packed_tile_list.tile_kernel` writes; or None"),
    Arguments(("short_rows",), "i32",
              "packed sequences with at most this many query rows aren't computed"),
    Arguments(("rows",), "i32", "number of rows of blocks of packed queries"),
    Arguments(("OF_HEADS",), None, "whether each head has a mask of its own"),
    # Decoding
    Arguments(("edges",), "*i32", "of `decode_steps.steps_kernel` or `packed_steps.share_kernel`"),
    Arguments(("counts",), "*i64", "number of a unit's parts that are written"),
    Arguments(("mark",), "i64", "argument of `decode_parts.begin_count`"),
    Arguments(("unit_steps", "most"), "i32",
              "number of a unit's steps without a mask; maximum number of them with one"),
    Arguments(("programs", "groups"), "i32",
              "number of programs that share all steps; number of groups of them"),
    Arguments(("entries",), "i32", "number of the mask's batch entries"),
    Arguments(("PLAN",), None, "constant of `decode_steps`: which units share a list of steps"),
    Arguments(("LISTED",), None, "whether a mask's steps are listed: see `packed_steps`"),
    Arguments(("most_rows",), "i32",
              "maximum number of query rows of a head of a unit; of a dense call L"),
    Arguments(("ALONE",), None,
              "whether no other kernel writes the padding rows of a packed call"),
    Arguments(("STORED",), None, "`Spec.kv_storage`"),
    Arguments(("ROWS",), None, "rows of a tile of a unit's query rows"),
    Arguments(("ADDS",), None, "whether the kernel also adds up the parts of units"),
    # Tiles and warps
    Arguments(("STAGES",), None, "pipeline stages: steps whose tiles are in shared memory"),
    Arguments(("DYNAMIC",), None, "whether programs take the next free tile; else every n-th"),
    Arguments(("PINNED", "SKIPS", "APART", "CHAINS", "SHARES_ROOM", "CONSUMERS",
               "QUERY_SLOTS"), None,
              "fields of `forward_call.Tiles`; whether out is stored from the queries' buffers"),
    Arguments(("PIECE",), None, "columns that a thread holds at a time"),
    Arguments(("CONSUMER_REGISTERS", "PRODUCER_REGISTERS", "GROUP_REGISTERS", "OTHER_REGISTERS"),
              None, "registers per thread of kinds of warps"),
)  # fmt: skip
TYPES = types_of(ARGUMENTS)
"""Types of those that aren't constants, by name."""
ROW_STRIDES: dict[str, Types] = dict.fromkeys(
    ("q_strides", "k_strides", "v_strides", "o_strides", "r_strides"), ("i64",) * 3
)
"""Types of strides (b, h, row) in elements, for kernels that take contiguous columns."""
