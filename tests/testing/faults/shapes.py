"""Faults 39 to 51: tails, shapes, grouped heads, strides."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

SUM = "weights.sum(-1, keepdim=True)"
WRITE_OUT = "tile.of_rows(out.out, kv_heads).copy_(result)"
DIVIDED = "result = result / total.masked_fill(total == 0, 1)"
END = "min(last * kv_block, kv_length), keys_at_once)"

FAULTS = (
    Fault(
        39,
        "keys past S count as score 0",
        case="shapes/keys_past_the_end",
        says="out is ",
        changes=(
            Change("kernel.py", SUM, SUM + " + (-scores.shape[-1] % 16) * torch.exp(-shift)"),
        ),
    ),
    Fault(
        40,
        "last key dropped",
        case="shapes/last_key",
        says="out is ",
        changes=(
            Change("tiles.py", "in _cut(0, kv_length, keys", "in _cut(0, kv_length - 1, keys"),
        ),
    ),
    Fault(
        41,
        "FULL run not bounded at the ragged end",
        case="shapes/full_block_at_the_end",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                SUM,
                SUM + " + (call.mask is not None and not partial)"
                " * (-keys.stop % 16) * torch.exp(-shift)",
            ),
        ),
    ),
    Fault(
        42,
        "rows past L written",
        case="shapes/one_row_past_a_block",
        says="out: 4 bytes after its end were written",
        changes=(
            Change(
                "kernel.py",
                WRITE_OUT,
                WRITE_OUT + "\n            if tile.rows.stop % 16:\n"
                "                past = out.out.storage_offset() + out.out.numel()\n"
                "                torch.as_strided(out.out, (1,), (1,), past).zero_()",
            ),
        ),
    ),
    Fault(
        43,
        "only lengths that are multiples of 8 are right",
        case="shapes/length_13",
        says="out is ",
        changes=(Change("tiles.py", END, END.replace("kv_length", "kv_length // 8 * 8")),),
    ),
    Fault(
        44,
        "S = 0 returns garbage",
        case="shapes/empty_5_0",
        says="elements of out were not written",
        changes=(
            Change(
                "tiles.py",
                "if call.query.numel() == 0:",
                "if call.query.numel() == 0 or call.key.numel() == 0:",
            ),
        ),
    ),
    Fault(
        45,
        "GQA head map h % Hkv for h // G",
        case="shapes/gqa_4_2",
        says="out is ",
        changes=(
            Change(
                "tiles.py",
                "grouped = torch.unflatten(tensor, 1, (kv_heads, -1))",
                "grouped = torch.unflatten(tensor, 1, (-1, kv_heads)).transpose(1, 2)",
            ),
            Change(
                "tiles.py",
                "view(call.key.shape[1], -1)",
                "view(-1, call.key.shape[1]).t()",
            ),
        ),
    ),
    Fault(
        46,
        "GQA only for power-of-two ratios",
        case="shapes/gqa_6_2",
        says="out is 0 ",
        changes=(
            Change(
                "kernel.py",
                DIVIDED,
                DIVIDED + "\n            known = 1 << (query.shape[2].bit_length() - 1)"
                "\n            result[:, :, known:] = 0",
            ),
        ),
    ),
    Fault(
        47,
        "B_kv = 1 reads batch b",
        case="shapes/one_key_batch_gqa",
        says="Error|out is ",
        changes=(
            Change(
                "tiles.py",
                "tensor[self.batch if tensor.shape[0] > 1 else ALL, self.kv_heads, keys]",
                "tensor[self.batch, self.kv_heads, keys]",
            ),
        ),
    ),
    Fault(
        48,
        "k or v assumed contiguous",
        case="layouts/heads_last",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                "return tile.of_keys(tensor, keys)",
                "dense = torch.empty(tensor.shape, device='meta').stride()\n"
                "        tensor = torch.as_strided(tensor, tensor.shape, dense)\n"
                "        return tile.of_keys(tensor, keys)",
            ),
        ),
    ),
    Fault(
        49,
        "Ev taken as E for v's row stride",
        case="shapes/larger_value_dim",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                "value = self._keys(tile, call.value, keys)\n                scores, _, _",
                "like_key = torch.as_strided(call.value, call.value.shape, call.key.stride())\n"
                "                value = self._keys(tile, like_key, keys)\n"
                "                scores, _, _",
            ),
        ),
    ),
    Fault(
        50,
        "output strides ignore q's order",
        case="layouts/heads_last_long",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                WRITE_OUT,
                "dense = torch.empty(out.out.shape, device='meta').stride()\n"
                "            target = torch.as_strided(out.out, out.out.shape, dense)\n"
                "            tile.of_rows(target, kv_heads).copy_(result)",
            ),
        ),
    ),
    Fault(
        51,
        "decode path ignores the score mod",
        case="decoding/1_4_4_200",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                "if self.score_mod is not None:",
                "if self.score_mod is not None and query.shape[3] > 1:",
            ),
        ),
    ),
)
