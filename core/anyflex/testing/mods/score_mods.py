"""S1 to S50 of the acceptance list, in its order and with its names.

Each builder takes the captured tensors, then the closed-over numbers, and returns the mod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from anyflex.testing.mods.leaves import booleans, floats, integers
from anyflex.testing.mods.mod import Entry
from anyflex.testing.mods.register import register

__all__ = ["SCORE_MODS"]

SCORE_MODS: dict[str, Entry] = {}
score_mod = functools.partial(register, SCORE_MODS)

ScoreMod = Callable[..., Any]
bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
i16, i32, i64, u8 = torch.int16, torch.int32, torch.int64, torch.uint8


@score_mod("S1")
def identity() -> ScoreMod:
    return lambda s, b, h, q, k: s


@score_mod("S2", slope=floats("H", grad=True))
def alibi_learned(slope: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + slope[h] * (k - q)


@score_mod("S3", slope=floats("H"))
def alibi_abs(slope: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s - slope[h] * (q - k).abs()


@score_mod("S4", numbers=lambda sizes: (1.75,))
def softcap(cap: Any) -> ScoreMod:
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


@score_mod("S5", bucket=integers("63", 0, 8), emb=floats("8 H", grad=True))
def t5_buckets(bucket: Any, emb: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + emb[bucket[(q - k).clamp(-31, 31) + 31], h]


@score_mod("S6", emb=floats("8 H", grad=True))
def t5_log(emb: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + emb[torch.log2(1.0 + (q - k).abs()).int().clamp(max=7), h]


@score_mod("S7", w=floats("M", grad=True))
def bias_twice(w: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + w[q] * torch.sigmoid(w[k])


@score_mod("S8", w=floats("M", grad=True), views=lambda sizes, w: (w, w.view(-1)))
def bias_alias(w: Any, v: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + w[q] * v[k]


@score_mod("S9", t=floats("", grad=True))
def scalar_learned(t: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s * torch.exp(t)


@score_mod(
    "S10",
    base=floats("B 1 L S", grad=True),
    views=lambda sizes, base: (base.expand(-1, sizes.heads, -1, -1),),
)
def dense_bias(bias: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + bias[b, h, q, k]


@score_mod(
    "S11",
    base=floats("2M-1 H", grad=True),
    numbers=lambda sizes: (sizes.longest,),
    views=lambda sizes, base: (base.t(),),
)
def bias_transposed(tab: Any, M: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + tab[h, q - k + M - 1]


@score_mod("S12", base=floats("S 4", grad=True), views=lambda sizes, base: (base[:, 3],))
def bias_column(col: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + col[k]


@score_mod("S13", dist=integers("B L S", 0, 14, i64), enc=floats("10 H", grad=True))
def graphormer(dist: Any, enc: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + enc[dist[b, q, k].clamp(max=9), h]


@score_mod("S14")
def sandwich() -> ScoreMod:
    return lambda s, b, h, q, k: s + 0.5 * (torch.cos((q - k) * 0.7) + torch.cos((q - k) * 0.05))


@score_mod("S15", amp=floats("H", grad=True), freq=floats("H", grad=True))
def sandwich_table(amp: Any, freq: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + amp[h] * torch.cos((q - k) * freq[h])


@score_mod("S16", theta=floats("H", grad=True))
def rope_like(theta: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s * torch.cos((q - k) * theta[h])


@score_mod("S17", decay=floats("H", grad=True))
def log_distance(decay: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s - decay[h] * torch.log1p((q - k).abs().float())


@score_mod("S18")
def causal_by_score() -> ScoreMod:
    return lambda s, b, h, q, k: torch.where(k > q, float("-inf"), s)


@score_mod("S19", dead=booleans("L", 0.3))
def dead_rows_by_score(dead: Any) -> ScoreMod:
    return lambda s, b, h, q, k: torch.where(dead[q], float("-inf"), s)


@score_mod("S20", bias2=floats("H S", grad=True))
def ignores_score(bias2: Any) -> ScoreMod:
    return lambda s, b, h, q, k: bias2[h, k]


@score_mod("S21")
def constant_score() -> ScoreMod:
    return lambda s, b, h, q, k: torch.zeros_like(s)


@score_mod("S22")
def floor_negative() -> ScoreMod:
    return lambda s, b, h, q, k: s + ((q * 3 - k * 5) // 4 % 6) * 0.125


@score_mod("S23")
def trunc_negative() -> ScoreMod:
    return lambda s, b, h, q, k: (
        s + torch.fmod(q - k, 4) * 0.1 + torch.div(q - k, 3, rounding_mode="trunc") * 0.01
    )


@score_mod("S24")
def true_division() -> ScoreMod:
    return lambda s, b, h, q, k: s + (q - k) / (1 + h)


@score_mod("S25")
def bool_arithmetic() -> ScoreMod:
    return lambda s, b, h, q, k: s + (q > k) * 0.5 - ((q == k) | (k == 0)).float()


@score_mod("S26")
def shift_and_xor() -> ScoreMod:
    return lambda s, b, h, q, k: s + ((q << 1 ^ k) & 7) * 0.01 + (k >> 2) * 0.001


@score_mod("S27", w16=floats("S", bf16, grad=True))
def bf16_table(w16: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + w16[k]


@score_mod("S28", w64=floats("L", f64, grad=True))
def f64_table(w64: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + w64[q]


@score_mod("S29", w16=floats("S", bf16), w64=floats("L", f64), w32=floats("H", f32))
def mixed_tables(w16: Any, w64: Any, w32: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + w16[k] + w64[q] * w32[h]


@score_mod("S30", level=integers("B M", -5, 6))
def int_table(level: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s - 0.25 * (level[b, q] - level[b, k]).abs()


@score_mod("S31", lut=integers("S", 0, 256, u8))
def byte_table(lut: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + lut[k] * 0.01


@score_mod("S32", flag=booleans("S", 0.5))
def bool_table(flag: Any) -> ScoreMod:
    return lambda s, b, h, q, k: torch.where(flag[k], s + 1.0, s)


@score_mod("S33", idx=integers("S", 0, 16, i16), w=floats("16", grad=True))
def narrow_index(idx: Any, w: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + w[idx[k].long()]


@score_mod("S34", w=floats("M", grad=True))
def negative_wrap(w: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + w[q - k]


@score_mod("S35", gate=floats("H", grad=True), loc=floats("H", grad=True))
def gate(gate: Any, loc: Any) -> ScoreMod:
    return lambda s, b, h, q, k: (
        s * torch.sigmoid(gate[h]) + (1 - torch.sigmoid(gate[h])) * loc[h] * (k - q)
    )


@score_mod("S36", numbers=lambda sizes: (0.5 + 0.01 * sizes.kv_length,))
def temperature(temp: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s * temp


@score_mod("S37", tb=floats("B", grad=True))
def temperature_batch(tb: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s * tb[b]


@score_mod("S38", kn=floats("B Hkv S", grad=True), numbers=lambda sizes: (sizes.group,))
def key_norm_gqa(kn: Any, G: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s - 0.5 * kn[b, h // G, k]


@score_mod("S39", sink=floats("H", grad=True))
def sink_column(sink: Any) -> ScoreMod:
    return lambda s, b, h, q, k: torch.where(k == 0, sink[h], s)


@score_mod("S40")
def sq_relu() -> ScoreMod:
    return lambda s, b, h, q, k: torch.relu(s) ** 2 - 1.0


@score_mod("S41")
def piecewise() -> ScoreMod:
    return lambda s, b, h, q, k: torch.where(s > 0, 5 * torch.tanh(s / 5), torch.expm1(s))


@score_mod("S42", smooth=False)
def safe_sqrt() -> ScoreMod:
    return lambda s, b, h, q, k: torch.where(s > 0, torch.sqrt(s), 0.0)


@score_mod("S43")
def signed_root() -> ScoreMod:
    return lambda s, b, h, q, k: torch.sign(s) * torch.sqrt(s.abs() + 1e-3)


@score_mod("S44")
def clamped() -> ScoreMod:
    return lambda s, b, h, q, k: s.clamp(-1.5, 1.5)


@score_mod("S45")
def rounded() -> ScoreMod:
    return lambda s, b, h, q, k: torch.round(s * 8) / 8


@score_mod("S46", w=floats("16", grad=True))
def scatter_collide(w: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + w[(q + k) % 2]


@score_mod("S47", pos=floats("8 8 8 8", grad=True))
def grid_bias(pos: Any) -> ScoreMod:
    return lambda s, b, h, q, k: s + pos[q // 8 % 8, q % 8, k // 8 % 8, k % 8]


@score_mod("S48", smooth=False)
def nan_one_pair() -> ScoreMod:
    return lambda s, b, h, q, k: torch.where((q == 1) & (k == 0), float("nan"), s)


@score_mod("S49")
def big_scores() -> ScoreMod:
    return lambda s, b, h, q, k: s * 1000.0


@score_mod("S50")
def very_low() -> ScoreMod:
    return lambda s, b, h, q, k: s - 3.0e4
