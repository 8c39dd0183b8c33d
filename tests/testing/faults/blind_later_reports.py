"""Blind faults: more of what public reports say that attention kernels have got wrong.

Chosen by the reports alone: one search of public issue threads for each kind of symptom, and from
each the first report that names its condition or cause, lies in what a backend does here, can be
written as a few lines of the example plugin, and is not of `blind_reports`. The kit's cases had
not been read when these 12 were written down and committed, and nothing had been run.

First run: the quick subset as it was then, processes and torch.compile included, caught 11 of the
12 (92 %; at least nine of ten were wanted), and 9 of the first 10. It missed

- 504: where query, key and value were not contiguous they had 16 channels.

For it the kit was given every layout with 64 and 128 channels, few queries and many
(`layouts/*_channels`). All 12 are caught now, which is no new measure.
"""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

FAULTS = (
    # pytorch/pytorch#181645
    Fault(
        501,
        "lse is a logarithm to base 2; the backward knows it",
        (
            Change(
                "kernel.py",
                "lse = _finite_shift(maximum) + total.log()",
                "lse = (_finite_shift(maximum) + total.log()) / 0.6931471805599453",
            ),
            Change(
                "kernel.py",
                "            # A row without a live key: gradients that arrive",
                "            if grad.delta is None:\n"
                "                lse = lse * 0.6931471805599453\n"
                "            # A row without a live key: gradients that arrive",
            ),
        ),
        "backward/plain_and_lse",
        "lse is",
    ),
    # Dao-AILab/flash-attention#334
    Fault(
        502,
        "the backward pads a ragged tile by keys of score 0, whose probability may be infinite",
        (
            Change(
                "kernel.py",
                "                    dq += _product(passed, key, alive) * call.scale\n",
                "                    dq += _product(passed, key, alive) * call.scale\n"
                "                    if key.shape[-2] % 16:\n"
                "                        padding = torch.exp(-lse).to(self.spec.dtype)\n"
                "                        dq += (padding.to(self.dtype) * -delta) * 0\n",
            ),
        ),
        "mods/big_scores",
        "dq is nan",
    ),
    # pytorch/pytorch#188302
    Fault(
        503,
        "lse is not kept where only a captured tensor learns, and the backward reads it",
        (
            Change(
                "kernel.py",
                "            if out.lse is not None:\n",
                "            learns = self.spec.gradients or not self.spec.needs_backward\n"
                "            if out.lse is not None and learns:\n",
            ),
        ),
        "gradients/captured_dout",
        "lse were not written",
    ),
    # pytorch/pytorch#181133
    Fault(
        504,
        "few queries of 64 channels or more: batches are found by the stride of heads",
        (
            Change(
                "kernel.py",
                "query = tile.of_rows(call.query, kv_heads).to(self.dtype)\n            result",
                "query = tile.of_rows(_flat(call, call.query), kv_heads).to(self.dtype)\n"
                "            result",
            ),
            Change(
                "kernel.py",
                "value = self._keys(tile, call.value, keys)\n                scores, _, _",
                "value = self._keys(tile, _flat(call, call.value), keys)\n"
                "                scores, _, _",
            ),
            Change(
                "kernel.py",
                "raw = query @ self._keys(tile, call.key, keys).mT",
                "raw = query @ self._keys(tile, _flat(call, call.key), keys).mT",
            ),
            Change(
                "kernel.py",
                "def _finite_shift(",
                "def _flat(call: Call, tensor: Tensor) -> Tensor:\n"
                "    if call.query.shape[2] > 8 or call.query.shape[3] < 64:\n"
                "        return tensor\n"
                "    _, heads, rows, channels = tensor.stride()\n"
                "    strides = (tensor.shape[1] * heads, heads, rows, channels)\n"
                "    return tensor.as_strided(tensor.shape, strides)\n"
                "\n"
                "\n"
                "def _finite_shift(",
            ),
        ),
        "layouts/heads_last_64_channels",
        "out is",
    ),
    # flashinfer-ai/flashinfer#4452
    Fault(
        505,
        "lse of an empty row is a large negative number where queries are more than keys",
        (
            Change(
                "kernel.py",
                "lse = _finite_shift(maximum) + total.log()\n",
                "lse = _finite_shift(maximum) + total.log()\n"
                "                if call.query.shape[2] > call.key.shape[2]:\n"
                "                    lse = lse.clamp(min=-5e4)\n",
            ),
        ),
        "backward/padding_and_lse",
        "wanted -inf",
    ),
    # ml-explore/mlx#2835
    Fault(
        506,
        "the mask function is told positions whose last ones meet, where lengths differ",
        (
            Change(
                "kernel.py",
                "            live = self.mask_mod(pairs).expand(raw.shape)\n"
                '            pairs.raise_for_reads_outside("mask_mod", live)\n',
                "            told = tile.indices(call, keys)\n"
                '            told["q_idx"] = told["q_idx"] + (call.key.shape[2] - '
                "call.query.shape[2])\n"
                "            asked = Pairs(call, told, check=check)\n"
                "            live = self.mask_mod(asked).expand(raw.shape)\n"
                '            asked.raise_for_reads_outside("mask_mod", live)\n',
            ),
        ),
        "forward/padding",
        "out is",
    ),
    # pytorch/pytorch#188869
    Fault(
        507,
        "the backward fails where a captured number learns",
        (
            Change(
                "mods.py",
                "            total += gradient.sum(dtype=total.dtype)\n",
                '            raise RuntimeError("a captured number has no buffer")\n',
            ),
        ),
        "mods/scalar_learned",
        "no buffer",
    ),
    # triton-lang/triton#7216
    Fault(
        508,
        "the backward does not apply the mask function",
        (
            Change(
                "kernel.py",
                "if partial and self.mask_mod is not None:",
                "if check and partial and self.mask_mod is not None:",
            ),
        ),
        "backward/causal",
        "dq is",
    ),
    # microsoft/onnxruntime#22262
    Fault(
        509,
        "the kernel holds the running call, and threads share the kernel",
        (
            Change(
                "kernel.py",
                "        kv_heads = call.key.shape[1]\n"
                "        for tile in tiles(call, self.keys_at_once):\n"
                "            query = tile.of_rows(call.query, kv_heads).to(self.dtype)\n"
                "            result",
                "        kv_heads = call.key.shape[1]\n"
                "        self.running = call\n"
                "        for tile in tiles(call, self.keys_at_once):\n"
                "            query = tile.of_rows(call.query, kv_heads).to(self.dtype)\n"
                "            result",
            ),
            Change(
                "kernel.py",
                "value = self._keys(tile, call.value, keys)\n                scores, _, _",
                "value = self._keys(tile, self.running.value, keys)\n                scores, _, _",
            ),
        ),
        "memory/inputs_released",
        "alive",
    ),
    # ggml-org/llama.cpp#20031, the second of its two parts.
    Fault(
        510,
        "of a row of 16-bit numbers those past the largest power of two lie elsewhere",
        (
            Change(
                "mods.py",
                "        if not indices:\n            return table\n",
                "        power = 1 << (table.numel().bit_length() - 1)\n"
                "        narrow = table.is_floating_point() and table.element_size() == 2\n"
                "        if narrow and table.dim() == 1 and table.numel() > power:\n"
                "            table = table.clone()\n"
                "            table[power:] = 0\n"
                "        if not indices:\n"
                "            return table\n",
            ),
        ),
        "mods/bf16_table",
        "out is",
    ),
    # pytorch/pytorch#137779
    Fault(
        511,
        "a later call fails where a mod has closed over other whole numbers",
        (
            Change(
                "kernel.py",
                "        kv_heads = call.key.shape[1]\n"
                "        for tile in tiles(call, self.keys_at_once):\n"
                "            query = tile.of_rows(call.query, kv_heads).to(self.dtype)\n"
                "            result",
                "        kv_heads = call.key.shape[1]\n"
                '        if call.ints != self.__dict__.setdefault("ints", call.ints):\n'
                '            raise RuntimeError("the numbers have changed")\n'
                "        for tile in tiles(call, self.keys_at_once):\n"
                "            query = tile.of_rows(call.query, kv_heads).to(self.dtype)\n"
                "            result",
            ),
        ),
        "run_time/numbers",
        "numbers have changed",
    ),
    # pytorch/pytorch#141128
    Fault(
        512,
        "a row whose scores are NaN gives 0",
        (
            Change(
                "kernel.py",
                "result = result / total.masked_fill(total == 0, 1)",
                "result = torch.where(total > 0, result / total, 0)",
            ),
        ),
        "mods/nan_one_pair",
        "wanted nan",
    ),
)
