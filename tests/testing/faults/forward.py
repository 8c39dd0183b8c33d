"""Faults 1 to 20: scores and mods."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

RAW = "raw = query @ self._keys(tile, call.key, keys).mT * call.scale"
BINARY = '**{name: f"torch.{name}({{0}}, {{1}})" for name in _BINARY},'
TABLE = "table = self.call.captured[position]"

FAULTS = (
    Fault(
        1,
        "scale applied after the score mod",
        case="mods/scale",
        says="out is ",
        changes=(
            Change("kernel.py", RAW, RAW.replace(" * call.scale", "")),
            Change(
                "kernel.py",
                "return scores.masked_fill(~live, -torch.inf), live, pairs",
                "return (scores * call.scale).masked_fill(~live, -torch.inf), live, pairs",
            ),
        ),
    ),
    Fault(
        2,
        "scale applied twice",
        case="mods/scale_alone",
        says="out is ",
        changes=(Change("kernel.py", RAW, RAW + " * call.scale"),),
    ),
    Fault(
        3,
        "default scale from Ev, not from E",
        case="shapes/smaller_value_dim",
        says="out is ",
        changes=(
            Change("kernel.py", RAW, RAW.replace("call.scale", "call.value.shape[-1] ** -0.5")),
        ),
    ),
    Fault(
        4,
        "maximum not subtracted",
        case="mods/big_scores",
        says="out is nan .*not finite alike",
        changes=(
            Change(
                "kernel.py", "shift = _finite_shift(higher)", "shift = torch.zeros_like(higher)"
            ),
            Change("kernel.py", "lse = _finite_shift(maximum) + total.log()", "lse = total.log()"),
            Change("kernel.py", "factor = torch.exp(maximum - shift)", "factor = 1"),
        ),
    ),
    Fault(
        5,
        "running maximum not rescaled at the second kv tile",
        case="inputs/larger_scores_later",
        says="out is ",
        changes=(Change("kernel.py", "factor = torch.exp(maximum - shift)", "factor = 1"),),
    ),
    Fault(
        6,
        "mod skipped on FULL blocks",
        case="mods/full_blocks",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                "if self.score_mod is not None:",
                "if self.score_mod is not None and (partial or call.mask is None):",
            ),
        ),
    ),
    Fault(
        7,
        "mod gets block-local, not global, q index",
        case="mods/past_the_first_block",
        says=r"out is .* at \[0, \d, 128, \d+\]",
        changes=(
            Change(
                "tiles.py",
                "torch.arange(self.rows.start, self.rows.stop, device=device)",
                "torch.arange(self.rows.stop - self.rows.start, device=device)",
            ),
        ),
    ),
    Fault(
        8,
        "mod gets kv head instead of query head",
        case="mods/query_heads",
        says="out is ",
        changes=(
            Change(
                "tiles.py",
                "h + grouped[self.kv_heads, self.group]",
                "h + (grouped[self.kv_heads, self.group] // grouped.shape[1])",
            ),
        ),
    ),
    Fault(
        9,
        "mod gets batch 0 always",
        case="mods/temperature_batch",
        says=r"out is .* at \[1,",
        changes=(
            Change(
                "tiles.py",
                "b + torch.arange(batch, device=device)",
                "b + 0 * torch.arange(batch, device=device)",
            ),
        ),
    ),
    Fault(
        10,
        "captured bias read transposed",
        case="mods/square_bias",
        says="out is ",
        changes=(
            Change(
                "mods.py",
                TABLE,
                TABLE + "\n        if table.dim() > 1 and table.shape[-1] == table.shape[-2]:"
                "\n            table = table.mT",
            ),
        ),
    ),
    Fault(
        11,
        "captured tensor assumed contiguous",
        case="mods/bias_transposed",
        says="out is ",
        changes=(
            Change(
                "mods.py",
                TABLE,
                TABLE + "\n        dense = torch.empty(table.shape, device='meta').stride()"
                "\n        table = torch.as_strided(table, table.shape, dense)",
            ),
        ),
    ),
    Fault(
        12,
        "storage offset of a captured view dropped",
        case="mods/bias_column",
        says="out is ",
        changes=(
            Change(
                "mods.py",
                TABLE,
                TABLE + "\n        strides = table.stride()"
                "\n        table = torch.as_strided(table, table.shape, strides, 0)",
            ),
        ),
    ),
    Fault(
        13,
        "negative index clamped to 0 instead of wrapped",
        case="mods/negative_index",
        says="out is ",
        changes=(
            Change(
                "mods.py",
                "torch.where(index < 0, index + size, index).clamp(0, size - 1)",
                "index.clamp(0, size - 1)",
            ),
        ),
    ),
    Fault(
        14,
        "// and % truncate towards 0",
        case="mods/floor_negative",
        says="out is ",
        changes=(
            Change(
                "mods.py",
                '"floordiv:int": f"torch.floor_divide({{0}}, {_DIVISOR})"',
                '"floordiv:int": f"torch.div({{0}}, {_DIVISOR}, rounding_mode=\'trunc\')"',
            ),
            Change(
                "mods.py",
                '"mod:int": f"torch.remainder({{0}}, {_DIVISOR})"',
                '"mod:int": f"torch.fmod({{0}}, {_DIVISOR})"',
            ),
        ),
    ),
    Fault(
        15,
        "int / int stays an integer",
        case="mods/true_division",
        says="out is ",
        changes=(
            Change("mods.py", "torch.true_divide({0}, {1})", "torch.floor_divide({0}, {1})"),
        ),
    ),
    Fault(
        16,
        "index product in int32 overflows",
        case="structure/far_keys",
        says="out is ",
        changes=(
            Change(
                "mods.py",
                BINARY,
                BINARY + '\n        "mul:int": "({0}.int() * {1}.int()).to({type})",',
            ),
        ),
    ),
    Fault(
        17,
        "NaN from a mod spreads to other rows",
        case="mods/nan_one_pair",
        says="out is nan .*not finite alike",
        changes=(
            Change(
                "kernel.py",
                "weights = torch.exp(scores - shift)",
                "weights = torch.exp(scores - shift)\n"
                "                weights = weights + 0 * weights.sum((-1, -2), keepdim=True)",
            ),
        ),
    ),
    Fault(
        18,
        "NaN in a masked pair reaches the output (0 * NaN)",
        case="inputs/nan_in_dead_keys",
        says="out is nan .*not finite alike",
        changes=(Change("kernel.py", "and not bool(strange.any()):", "or True:"),),
    ),
    Fault(
        19,
        "tanh with 1e-3 error",
        case="precision/tanh",
        says="out is ",
        changes=(
            Change("mods.py", BINARY, BINARY + '\n        "tanh": "(torch.tanh({0}) * 1.001)",'),
        ),
    ),
    Fault(
        20,
        "NaN loses against a number in maximum",
        case="inputs/nan_through_maximum",
        says="out is .* wanted nan",
        changes=(
            Change("mods.py", BINARY, BINARY + '\n        "maximum": "torch.fmax({0}, {1})",'),
        ),
    ),
)
