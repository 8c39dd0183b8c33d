"""S1 to S50 of the acceptance list, in its order and with its names.

Each builder takes the captured tensors, then the closed-over numbers, and returns the mod.
"""

from __future__ import annotations

import torch

from anyflex.testing.mods.leaves import booleans, floats, integers
from anyflex.testing.mods.mod import mod, numbered

__all__ = ["SCORE_MODS"]

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
i16, i32, i64, u8 = torch.int16, torch.int32, torch.int64, torch.uint8

SCORE_MODS = numbered(
    "S",
    identity=mod(lambda: lambda s, b, h, q, k: s),
    alibi_learned=mod(
        lambda slope: lambda s, b, h, q, k: s + slope[h] * (k - q), slope=floats("H", grad=True)
    ),
    alibi_abs=mod(
        lambda slope: lambda s, b, h, q, k: s - slope[h] * (q - k).abs(), slope=floats("H")
    ),
    softcap=mod(
        lambda cap: lambda s, b, h, q, k: cap * torch.tanh(s / cap), numbers=lambda sizes: (1.75,)
    ),
    t5_buckets=mod(
        lambda bucket, emb: lambda s, b, h, q, k: s + emb[bucket[(q - k).clamp(-31, 31) + 31], h],
        bucket=integers("63", 0, 8),
        emb=floats("8 H", grad=True),
    ),
    t5_log=mod(
        lambda emb: (
            lambda s, b, h, q, k: s + emb[torch.log2(1.0 + (q - k).abs()).int().clamp(max=7), h]
        ),
        emb=floats("8 H", grad=True),
    ),
    bias_twice=mod(
        lambda w: lambda s, b, h, q, k: s + w[q] * torch.sigmoid(w[k]), w=floats("M", grad=True)
    ),
    bias_alias=mod(
        lambda w, v: lambda s, b, h, q, k: s + w[q] * v[k],
        w=floats("M", grad=True),
        views=lambda sizes, w: (w, w.view(-1)),
    ),
    scalar_learned=mod(lambda t: lambda s, b, h, q, k: s * torch.exp(t), t=floats("", grad=True)),
    dense_bias=mod(
        lambda bias: lambda s, b, h, q, k: s + bias[b, h, q, k],
        base=floats("B 1 L S", grad=True),
        views=lambda sizes, base: (base.expand(-1, sizes.heads, -1, -1),),
    ),
    bias_transposed=mod(
        lambda tab, M: lambda s, b, h, q, k: s + tab[h, q - k + M - 1],
        base=floats("2M-1 H", grad=True),
        numbers=lambda sizes: (sizes.longest,),
        views=lambda sizes, base: (base.t(),),
    ),
    bias_column=mod(
        lambda col: lambda s, b, h, q, k: s + col[k],
        base=floats("S 4", grad=True),
        views=lambda sizes, base: (base[:, 3],),
    ),
    graphormer=mod(
        lambda dist, enc: lambda s, b, h, q, k: s + enc[dist[b, q, k].clamp(max=9), h],
        dist=integers("B L S", 0, 14, i64),
        enc=floats("10 H", grad=True),
    ),
    sandwich=mod(
        lambda: (
            lambda s, b, h, q, k: s + 0.5 * (torch.cos((q - k) * 0.7) + torch.cos((q - k) * 0.05))
        )
    ),
    sandwich_table=mod(
        lambda amp, freq: lambda s, b, h, q, k: s + amp[h] * torch.cos((q - k) * freq[h]),
        amp=floats("H", grad=True),
        freq=floats("H", grad=True),
    ),
    rope_like=mod(
        lambda theta: lambda s, b, h, q, k: s * torch.cos((q - k) * theta[h]),
        theta=floats("H", grad=True),
    ),
    log_distance=mod(
        lambda decay: lambda s, b, h, q, k: s - decay[h] * torch.log1p((q - k).abs().float()),
        decay=floats("H", grad=True),
    ),
    causal_by_score=mod(lambda: lambda s, b, h, q, k: torch.where(k > q, float("-inf"), s)),
    dead_rows_by_score=mod(
        lambda dead: lambda s, b, h, q, k: torch.where(dead[q], float("-inf"), s),
        dead=booleans("L", 0.3),
    ),
    ignores_score=mod(
        lambda bias2: lambda s, b, h, q, k: bias2[h, k], bias2=floats("H S", grad=True)
    ),
    constant_score=mod(lambda: lambda s, b, h, q, k: torch.zeros_like(s)),
    floor_negative=mod(lambda: lambda s, b, h, q, k: s + ((q * 3 - k * 5) // 4 % 6) * 0.125),
    trunc_negative=mod(
        lambda: (
            lambda s, b, h, q, k: (
                s + torch.fmod(q - k, 4) * 0.1 + torch.div(q - k, 3, rounding_mode="trunc") * 0.01
            )
        )
    ),
    true_division=mod(lambda: lambda s, b, h, q, k: s + (q - k) / (1 + h)),
    bool_arithmetic=mod(
        lambda: lambda s, b, h, q, k: s + (q > k) * 0.5 - ((q == k) | (k == 0)).float()
    ),
    shift_and_xor=mod(
        lambda: lambda s, b, h, q, k: s + ((q << 1 ^ k) & 7) * 0.01 + (k >> 2) * 0.001
    ),
    bf16_table=mod(lambda w16: lambda s, b, h, q, k: s + w16[k], w16=floats("S", bf16, grad=True)),
    f64_table=mod(lambda w64: lambda s, b, h, q, k: s + w64[q], w64=floats("L", f64, grad=True)),
    mixed_tables=mod(
        lambda w16, w64, w32: lambda s, b, h, q, k: s + w16[k] + w64[q] * w32[h],
        w16=floats("S", bf16),
        w64=floats("L", f64),
        w32=floats("H", f32),
    ),
    int_table=mod(
        lambda level: lambda s, b, h, q, k: s - 0.25 * (level[b, q] - level[b, k]).abs(),
        level=integers("B M", -5, 6),
    ),
    byte_table=mod(
        lambda lut: lambda s, b, h, q, k: s + lut[k] * 0.01, lut=integers("S", 0, 256, u8)
    ),
    bool_table=mod(
        lambda flag: lambda s, b, h, q, k: torch.where(flag[k], s + 1.0, s),
        flag=booleans("S", 0.5),
    ),
    narrow_index=mod(
        lambda idx, w: lambda s, b, h, q, k: s + w[idx[k].long()],
        idx=integers("S", 0, 16, i16),
        w=floats("16", grad=True),
    ),
    negative_wrap=mod(lambda w: lambda s, b, h, q, k: s + w[q - k], w=floats("M", grad=True)),
    gate=mod(
        lambda gate, loc: (
            lambda s, b, h, q, k: (
                s * torch.sigmoid(gate[h]) + (1 - torch.sigmoid(gate[h])) * loc[h] * (k - q)
            )
        ),
        gate=floats("H", grad=True),
        loc=floats("H", grad=True),
    ),
    temperature=mod(
        lambda temp: lambda s, b, h, q, k: s * temp,
        numbers=lambda sizes: (0.5 + 0.01 * sizes.kv_length,),
    ),
    temperature_batch=mod(lambda tb: lambda s, b, h, q, k: s * tb[b], tb=floats("B", grad=True)),
    key_norm_gqa=mod(
        lambda kn, G: lambda s, b, h, q, k: s - 0.5 * kn[b, h // G, k],
        kn=floats("B Hkv S", grad=True),
        numbers=lambda sizes: (sizes.group,),
    ),
    sink_column=mod(
        lambda sink: lambda s, b, h, q, k: torch.where(k == 0, sink[h], s),
        sink=floats("H", grad=True),
    ),
    sq_relu=mod(lambda: lambda s, b, h, q, k: torch.relu(s) ** 2 - 1.0),
    piecewise=mod(
        lambda: lambda s, b, h, q, k: torch.where(s > 0, 5 * torch.tanh(s / 5), torch.expm1(s))
    ),
    safe_sqrt=mod(
        lambda: lambda s, b, h, q, k: torch.where(s > 0, torch.sqrt(s), 0.0), smooth=False
    ),
    signed_root=mod(lambda: lambda s, b, h, q, k: torch.sign(s) * torch.sqrt(s.abs() + 1e-3)),
    clamped=mod(lambda: lambda s, b, h, q, k: s.clamp(-1.5, 1.5)),
    rounded=mod(lambda: lambda s, b, h, q, k: torch.round(s * 8) / 8),
    scatter_collide=mod(
        lambda w: lambda s, b, h, q, k: s + w[(q + k) % 2], w=floats("16", grad=True)
    ),
    grid_bias=mod(
        lambda pos: lambda s, b, h, q, k: s + pos[q // 8 % 8, q % 8, k // 8 % 8, k % 8],
        pos=floats("8 8 8 8", grad=True),
    ),
    nan_one_pair=mod(
        lambda: lambda s, b, h, q, k: torch.where((q == 1) & (k == 0), float("nan"), s),
        smooth=False,
    ),
    big_scores=mod(lambda: lambda s, b, h, q, k: s * 1000.0),
    very_low=mod(lambda: lambda s, b, h, q, k: s - 3.0e4),
)
