"""Blind faults: what public reports say that attention kernels have got wrong.

Chosen by the reports alone: one search of public issue threads for each kind of symptom, and from
each the first report that names its condition or cause, lies in what a backend does here, and can
be written as a few lines of the example plugin. The kit's cases had not been read when these 12
were written down and committed, and nothing had been run.

First run: the quick subset as it was then, processes and torch.compile included, caught 10 of the
12 (83 %; at least nine of ten were wanted). It missed

- 411: every mask of the kit had a function that compares indices;
- 412: where Ev differs from E, one of them was 1 or E was 16.

402 and 408 say the same as faults by subject; of the other ten 8 were caught.

For them the kit was given `structure/lists_without_a_function`, `_with_a_constant_function` and
`shapes/unequal_head_dims`. 404 was seen by max_scores alone, which a backend need not declare:
`structure/dead_then_low` sees it by out. All 12 are caught now, which is no new measure.
"""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

_FORWARD = (
    "        kv_heads = call.key.shape[1]\n"
    "        for tile in tiles(call, self.keys_at_once):\n"
    "            query = tile.of_rows(call.query, kv_heads).to(self.dtype)\n"
    "            result"
)

FAULTS = (
    # XunhaoLai/native-sparse-attention-triton#27, the second of its two defects.
    Fault(
        401,
        "dP is a product over as many channels of v as q has: the others don't count",
        (
            Change(
                "kernel.py",
                "dout @ value.mT",
                "dout[..., : key.shape[-1]] @ value[..., : key.shape[-1]].mT",
            ),
        ),
        "shapes/larger_value_dim",
        "dq is",
    ),
    # pytorch/pytorch#101967
    Fault(
        402,
        "NaN in v at a masked key reaches out",
        (
            Change(
                "kernel.py",
                "_product(weights, value, scores != -torch.inf)",
                "weights @ value",
            ),
        ),
        "inputs/nan_in_dead_keys",
        "out is nan",
    ),
    # flagos-ai/FlagGems#5235
    Fault(
        403,
        "a short query's rows of out are written at strides of another dimension order",
        (
            Change(
                "kernel.py",
                "            tile.of_rows(out.out, kv_heads).copy_(result)\n",
                "            target = out.out\n"
                "            if target.shape[2] <= 64:\n"
                "                packed = torch.empty(target.shape, device='meta').stride()\n"
                "                target = target.as_strided(target.shape, packed)\n"
                "            tile.of_rows(target, kv_heads).copy_(result)\n",
            ),
        ),
        "layouts/heads_last",
        "out is",
    ),
    # Dao-AILab/flash-attention#2082
    Fault(
        404,
        "after keys that are all masked the running maximum is 0, and lower scores don't lower it",
        (
            Change(
                "kernel.py",
                "                maximum = higher\n",
                "                maximum = shift\n",
            ),
        ),
        "structure/dead_then_low",
        "out is",
    ),
    # pytorch/pytorch#185991
    Fault(
        405,
        "the backward fails where the score mod doesn't depend on the score",
        (
            Change(
                "kernel.py",
                "return None if passed is None else passed.expand",
                "return passed.expand",
            ),
        ),
        "mods/ignores_score",
        "NoneType",
    ),
    # triton-lang/triton#621
    Fault(
        406,
        "the head dimension is 64: channels beyond it don't count, and aren't written",
        (
            Change(
                "kernel.py",
                "        raw = query @ self._keys(tile, call.key, keys).mT * call.scale\n",
                "        key = self._keys(tile, call.key, keys)\n"
                "        raw = query[..., :64] @ key[..., :64].mT * call.scale\n",
            ),
            Change(
                "kernel.py",
                "tile.of_rows(out.out, kv_heads).copy_(result)",
                "tile.of_rows(out.out, kv_heads)[..., :64].copy_(result[..., :64])",
            ),
        ),
        "shapes/head_dims",
        "E 72, Ev 72: forward: 32 of 288 elements of out were not written",
    ),
    # Dao-AILab/flash-attention#708
    Fault(
        407,
        "one query: its group of heads becomes its length, which must not exceed the keys'",
        (
            Change(
                "kernel.py",
                _FORWARD,
                _FORWARD.replace(
                    "        for tile",
                    "        length = call.query.shape[2]\n"
                    "        if length == 1:\n"
                    "            length = call.query.shape[1] // kv_heads\n"
                    "        if call.query.shape[2] <= call.key.shape[2] < length:\n"
                    "            raise RuntimeError('the query is longer than the keys')\n"
                    "        for tile",
                ),
            ),
        ),
        "decode/one_key",
        "the query is longer",
    ),
    # pytorch/pytorch#100318
    Fault(
        408,
        "a row whose keys are all masked is NaN",
        (
            Change(
                "kernel.py",
                "result = result / total.masked_fill(total == 0, 1)",
                "result = result / total",
            ),
        ),
        "structure/no_live_pair",
        "out is nan",
    ),
    # intel/torch-xpu-ops#5179
    Fault(
        409,
        "16 keys or fewer, several tiles of rows: one of the tiles isn't written",
        (
            Change(
                "kernel.py",
                "            tile.of_rows(out.out, kv_heads).copy_(result)\n",
                "            last = tile.rows.stop == call.query.shape[2]\n"
                "            if call.key.shape[2] > 16 or tile.rows.start == 0 or not last:\n"
                "                tile.of_rows(out.out, kv_heads).copy_(result)\n",
            ),
        ),
        "shapes/one_row_past_a_block",
        "of out were not written",
    ),
    # ml-explore/mlx#2909
    Fault(
        410,
        "the gradient of what is added to scores is 0 without a word",
        (
            Change(
                "kernel.py",
                "            accumulator += total\n",
                "            accumulator += 0 * total\n",
            ),
        ),
        "mods/square_bias",
        "base is 0",
    ),
    # pytorch/pytorch#188322
    Fault(
        411,
        "the forward doesn't look at the lists of blocks where the mask function is trivial",
        (
            Change(
                "kernel.py",
                _FORWARD,
                _FORWARD.replace(
                    "tiles(call, self.keys_at_once)",
                    "tiles(call, self.keys_at_once, sparse=self.mask_mod is not None)",
                ),
            ),
            Change(
                "tiles.py",
                "def tiles(call: Call, keys_at_once: int)",
                "def tiles(call: Call, keys_at_once: int, sparse: bool = True)",
            ),
            Change(
                "tiles.py",
                "    if call.mask is None:\n",
                "    if call.mask is None or not sparse:\n",
            ),
        ),
        "structure/lists_without_a_function",
        "out is",
    ),
    # Dao-AILab/flash-attention#2552
    Fault(
        412,
        "dv is stored in steps of dk's width: columns of a half that it doesn't divide are wrong",
        (
            Change(
                "kernel.py",
                "        for target, total in ((grads.dk, dk), (grads.dv, dv)):\n",
                "        half = (call.value.shape[3] + 15) // 16 * 8\n"
                "        step = math.gcd(32, (call.key.shape[3] + 15) // 16 * 8)\n"
                "        if dv is not None and call.key.shape[3] >= 128 and half % step:\n"
                "            rest = dv[..., half // step * step : half]\n"
                "            rest.copy_(rest.flip(-1))\n"
                "        for target, total in ((grads.dk, dk), (grads.dv, dv)):\n",
            ),
            Change(
                "kernel.py",
                "from __future__ import annotations\n",
                "from __future__ import annotations\n\nimport math\n",
            ),
        ),
        "shapes/unequal_head_dims",
        "E 128, Ev 40: dv is",
    ),
)
