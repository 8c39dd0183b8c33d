"""Faults 21 to 38: masks and block structure."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

IF_PARTIAL = "if partial and self.mask_mod is not None:"
RUNS = "for first, last, kind in runs[begin:end]"
LIVE = "live = self.mask_mod(pairs).expand(raw.shape)"
HIGHER = "higher = torch.maximum(maximum, scores.amax(-1, keepdim=True))"
NEW_TOTAL = "total = torch.zeros_like(maximum)"
SHIFT = "shift = _finite_shift(higher)"

FAULTS = (
    Fault(
        21,
        "mask function skipped on PARTIAL blocks",
        case="structure/causal_in_one_block",
        says="out is ",
        changes=(Change("kernel.py", IF_PARTIAL, "if False:"),),
    ),
    Fault(
        22,
        "mask function applied to FULL blocks too",
        case="structure/full_where_the_function_is_false",
        says="out is ",
        changes=(Change("kernel.py", IF_PARTIAL, "if self.mask_mod is not None:"),),
    ),
    Fault(
        23,
        "blocks not listed are visited",
        case="structure/unlisted_where_the_function_is_true",
        says="out is ",
        changes=(
            Change(
                "tiles.py",
                RUNS,
                "for first, last, kind in [(0, -(-kv_length // kv_block), PARTIAL)]",
            ),
        ),
    ),
    Fault(
        24,
        "last run of a row dropped",
        case="structure/last_block_only",
        says="out is ",
        changes=(
            Change("tiles.py", RUNS, "for first, last, kind in runs[begin : max(begin, end - 1)]"),
        ),
    ),
    Fault(
        25,
        "run end treated as inclusive",
        case="structure/end_of_a_run",
        says="out is ",
        changes=(
            Change(
                "tiles.py",
                "min(last * kv_block, kv_length), keys_at_once)",
                "min((last + 1) * kv_block, kv_length), keys_at_once)",
            ),
        ),
    ),
    Fault(
        26,
        "only the first run of a row used",
        case="structure/two_runs",
        says="out is ",
        changes=(Change("tiles.py", RUNS, "for first, last, kind in runs[begin:end][:1]"),),
    ),
    Fault(
        27,
        "mask batch index always 0",
        case="structure/per_batch",
        says=r"out is .* at \[[1-5],",
        changes=(
            Change("tiles.py", "in enumerate(of_batch):", "in enumerate(offsets.tolist()[0]):"),
        ),
    ),
    Fault(
        28,
        "mask head index taken modulo Hkv",
        case="masks/window_head",
        says="out is ",
        changes=(
            Change(
                "tiles.py",
                "slice(g, g + 1), of_head",
                "slice(g, g + 1), of_batch[h % call.key.shape[1]]",
            ),
        ),
    ),
    Fault(
        29,
        "mask with B' = 1 read at batch b",
        case="structure/broadcast_over_batch",
        says="IndexError",
        changes=(
            Change(
                "tiles.py",
                "for b, of_batch in enumerate(offsets.tolist()):",
                "for b in range(call.query.shape[0]):\n        of_batch = offsets.tolist()[b]",
            ),
            Change(
                "tiles.py",
                "batch = slice(b, b + 1) if len(offsets) > 1 else ALL",
                "batch = slice(b, b + 1)",
            ),
        ),
    ),
    Fault(
        30,
        "rectangular block size used as square",
        case="structure/rectangular_blocks",
        says="out is ",
        changes=(
            Change(
                "tiles.py",
                "q_block, kv_block = mask.block_size",
                "q_block, kv_block = mask.block_size[:1] * 2",
            ),
        ),
    ),
    Fault(
        31,
        "bottom-right causal done as top-left",
        case="structure/bottom_right",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                LIVE,
                'moved = {"q_idx": pairs.inputs["q_idx"] - call.key.shape[2]\n'
                "                     + call.query.shape[2]}\n"
                "            seen = Pairs(call, {**pairs.inputs, **moved}, check=check)\n"
                "            live = self.mask_mod(seen).expand(raw.shape)",
            ),
        ),
    ),
    Fault(
        32,
        "dead row gives 0/0 = NaN",
        case="masks/random_spans",
        says="out is nan .*not finite alike",
        changes=(
            Change(
                "kernel.py",
                "result = result / total.masked_fill(total == 0, 1)",
                "result = result / total",
            ),
        ),
    ),
    Fault(
        33,
        "dead row gives the mean of v",
        case="structure/no_live_pair",
        says="out is .* wanted 0",
        changes=(
            Change(
                "kernel.py",
                "return scores.masked_fill(~live, -torch.inf), live, pairs",
                "return scores.masked_fill(~live, -1e30), live, pairs",
            ),
        ),
    ),
    Fault(
        34,
        "row dead in the first block stays dead",
        case="structure/dead_then_live",
        says="out is 0 ",
        changes=(
            Change(
                "kernel.py",
                HIGHER,
                "if keys != tile.pieces[0][0]:\n                    "
                "scores = scores.masked_fill(maximum == -torch.inf, -torch.inf)\n"
                "                " + HIGHER,
            ),
        ),
    ),
    Fault(
        35,
        "row dead by the mod (-inf) not treated as dead",
        case="mods/dead_rows_by_score",
        says="out is nan .*not finite alike",
        changes=(
            Change("kernel.py", NEW_TOTAL, NEW_TOTAL + "\n            unseen = True"),
            Change("kernel.py", "scores, _, _ = self._scores", "scores, live, _ = self._scores"),
            Change(
                "kernel.py",
                SHIFT,
                "unseen = unseen & ~live.any(-1, keepdim=True)\n"
                "                shift = higher.masked_fill(unseen, 0)",
            ),
        ),
    ),
    Fault(
        36,
        "row at -3e4 taken for dead",
        case="mods/very_low",
        says="out is 0 ",
        changes=(
            Change(
                "kernel.py",
                "return maximum.masked_fill(maximum == -torch.inf, 0)",
                "return maximum.masked_fill(maximum < -2e4, 0)",
            ),
        ),
    ),
    Fault(
        37,
        "stale mask data: runs of the previous mask used",
        case="structure/one_after_another",
        says="out is ",
        changes=(
            Change("tiles.py", "ALL = slice(None)", "ALL = slice(None)\nKEPT = {}"),
            Change(
                "tiles.py",
                'mask = call.mask.on(torch.device("cpu"))',
                "mask = KEPT.setdefault(call.query.shape, call.mask)",
            ),
        ),
    ),
    Fault(
        38,
        "stale mask after a captured tensor changed",
        case="structure/rebuilt",
        says="out is ",
        changes=(
            Change("mods.py", "Lines = list[str]", "Lines = list[str]\nKEPT = {}"),
            Change(
                "mods.py",
                "table = self.call.captured[position]",
                "table = self.call.captured[position]\n"
                "        table = KEPT.setdefault((position, table.shape), table)",
            ),
        ),
    ),
)
