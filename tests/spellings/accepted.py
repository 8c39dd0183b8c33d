"""Accepted spellings of mods: each with its number and the type of its result.

`s` is a float32 score, `q` and `k` are int32 indices, `m` is ``q >= k``; the captured tensors are
those of `tests.spellings.surroundings.tables`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ACCEPTED", "COUNT", "Spelling"]

COUNT = 295


@dataclass(frozen=True)
class Spelling:
    """One line of the list."""

    number: int
    result: str
    expression: str

    def __str__(self) -> str:
        return f"{self.number}"


LINES = {
    "arithmetic": """
1 float32 s + 1.5
2 float32 2.0 - s
3 float32 s * k
4 float32 s / 8
5 float32 1 / (1 + k)
6 float32 -s
7 float32 +s
8 float32 abs(s)
9 float32 s ** 2
10 float32 s ** 0.5
11 float32 2.0 ** s
12 int32 k ** 2
13 float32 s ** k
14 float32 pow(s, 3)
15 float32 sum([s, s, s])
16 float32 torch.add(s, k, alpha=2)
17 float32 torch.sub(s, 1.0)
18 float32 torch.subtract(s, 1.0)
19 float32 torch.rsub(s, 1.0)
20 float32 torch.mul(s, 0.5)
21 float32 torch.multiply(s, s)
22 float32 torch.div(s, 3)
23 float32 torch.true_divide(q, 3)
24 float32 torch.divide(s, 2)
25 float32 s.add(1)
26 float32 s.sub(1)
27 float32 s.mul(2)
28 float32 s.div(2)
29 float32 torch.neg(s)
30 int32 torch.negative(q)
31 float32 torch.positive(s)
32 float32 torch.pow(s, 2)
33 float32 torch.pow(2.0, s)
34 float32 s.pow(3)
35 int32 torch.square(k)
36 float32 s.square()
37 float64 torch.float_power(s, 2)
38 float32 operator.add(s, 1)
    """,
    "integer division, remainder, bits": """
39 int32 q // 3
40 int32 q % 3
41 int32 7 // (k + 1)
42 int32 7 % (k + 1)
43 float32 s // 0.5
44 float32 s % 0.5
45 int32 torch.floor_divide(q, 3)
46 int32 torch.div(q, 3, rounding_mode='floor')
47 int32 torch.div(q - k, 3, rounding_mode='trunc')
48 int32 torch.remainder(q - k, 3)
49 int32 q.remainder(4)
50 int32 torch.fmod(q - k, 3)
51 float32 s.fmod(0.5)
52 int32 q & 3
53 int32 q | 1
54 int32 q ^ k
55 int32 ~q
56 int32 1 << (k % 8)
57 int32 q << 2
58 int32 (q - k) >> 1
59 int32 torch.bitwise_and(q, k)
60 int32 torch.bitwise_or(q, 1)
61 int32 torch.bitwise_xor(q, k)
62 int32 q.bitwise_xor(k)
63 int32 torch.bitwise_not(q)
64 int32 torch.bitwise_left_shift(q, 1)
65 int32 torch.bitwise_right_shift(q, 1)
66 bool m & (q > 2)
67 int32 m & q
68 int32 q ^ True
    """,
    "comparison and logic": """
69 bool q >= k
70 bool q > k
71 bool q <= k
72 bool q < 5
73 bool q == k
74 bool q != k
75 bool 5 > q
76 bool q < 2.5
77 bool s == 0
78 bool torch.ge(q, k)
79 bool torch.gt(q, k)
80 bool torch.le(q, 3)
81 bool torch.lt(q, k)
82 bool torch.eq(q, k)
83 bool torch.ne(q, 0)
84 bool q.ge(k)
85 bool q.eq(k)
86 bool q.not_equal(k)
87 bool torch.greater_equal(q, k)
88 bool torch.less(q, k)
89 bool (q >= k) & (q - k < 8) & (k > 0)
90 bool m | (k == 0)
91 bool ~m
92 bool m ^ (k > 2)
93 bool torch.logical_and(q >= k, m)
94 bool torch.logical_or(q, k)
95 bool torch.logical_not(m)
96 bool torch.logical_xor(m, k > 1)
97 bool m.logical_and(q > k)
98 bool torch.isnan(s)
99 bool torch.isinf(s)
100 bool torch.isfinite(s)
101 bool torch.isneginf(s)
102 bool torch.isposinf(s)
103 bool s.isnan()
104 bool torch.signbit(s)
105 bool torch.isclose(s, s + 1e-9)
    """,
    "selection and bounds": """
106 float32 torch.where(m, s, float('-inf'))
107 float32 torch.where(m, s, 0.0)
108 float32 torch.where(m, 1.0, 0.0)
109 float32 torch.where(m, q, 1.5)
110 int32 torch.where(m, q, k)
111 float32 s.where(m, s * 2)
112 float32 s.masked_fill(m, float('-inf'))
113 float32 torch.masked_fill(s, ~m, 0.0)
114 float32 torch.clamp(s, -1, 1)
115 float32 torch.clamp(s, min=0.0)
116 float32 torch.clamp(s, max=2.0)
117 float32 torch.clamp(s, min=s - 1, max=s + 1)
118 float32 s.clamp(-1.0)
119 float32 s.clip(0, 1)
120 int32 torch.clip(q, 0, 5)
121 float32 torch.clamp(q, -2.5, 2.5)
122 float32 torch.clamp(s, 2.0, 1.0)
123 float32 torch.clamp_min(s, 0)
124 float32 s.clamp_max(3)
125 float32 torch.maximum(s, s * 2)
126 int32 torch.minimum(q, k)
127 float32 torch.maximum(q, s)
128 float32 torch.max(s, s * 2)
129 int32 torch.min(q, k)
130 float32 s.maximum(s * 0)
131 float32 torch.fmax(s, s * 2)
132 float32 torch.fmin(s, s * 2)
133 float32 torch.nan_to_num(s, 0.0)
134 float32 torch.lerp(s, s * 2, 0.25)
135 float32 torch.heaviside(s, s * 0)
136 float32 torch.copysign(s, q - k)
    """,
    "rounding and sign": """
137 float32 torch.floor(s)
138 float32 s.ceil()
139 float32 torch.round(s)
140 float32 torch.round(s, decimals=2)
141 float32 torch.trunc(s)
142 float32 torch.fix(s)
143 float32 torch.frac(s)
144 int32 torch.floor(q)
145 float32 torch.sign(s)
146 float32 torch.sgn(s)
147 float32 torch.abs(s)
148 int32 (q - k).abs()
149 float32 torch.absolute(s)
    """,
    "exponential and logarithm": """
150 float32 torch.exp(s)
151 float32 s.exp()
152 float32 torch.exp2(s)
153 float32 torch.expm1(s)
154 float32 torch.log(s)
155 float32 torch.log2(1.0 + k)
156 float32 torch.log10(s)
157 float32 torch.log1p(s)
158 float32 torch.sqrt(k)
159 float32 s.sqrt()
160 float32 torch.rsqrt(s)
161 float32 torch.reciprocal(s)
162 float32 torch.logaddexp(s, s * 2)
163 float32 torch.logaddexp2(s, s)
164 float32 torch.xlogy(s, s)
165 float32 torch.hypot(s, s + 1)
166 float32 torch.ldexp(s, k)
    """,
    "trigonometric and hyperbolic": """
167 float32 torch.sin(s)
168 float32 (q - k).sin()
169 float32 torch.cos(s)
170 float32 torch.tan(s)
171 float32 torch.asin(s)
172 float32 torch.arcsin(s)
173 float32 torch.acos(s)
174 float32 torch.atan(s)
175 float32 torch.arctan(s)
176 float32 torch.atan2(s, s + 1)
177 float32 torch.arctan2(s, s)
178 float32 torch.sinh(s)
179 float32 torch.cosh(s)
180 float32 torch.tanh(s)
181 float32 s.tanh()
182 float32 torch.asinh(s)
183 float32 torch.acosh(s + 2)
184 float32 torch.atanh(s)
185 float32 torch.sinc(s)
186 float32 torch.deg2rad(s)
187 float32 torch.rad2deg(s)
    """,
    "special functions": """
188 float32 torch.erf(s)
189 float32 s.erf()
190 float32 torch.erfc(s)
191 float32 torch.special.erf(s)
192 float32 torch.special.erfc(s)
193 float32 torch.special.expit(s)
194 float32 torch.special.expm1(s)
195 float32 torch.special.exp2(s)
196 float32 torch.special.log1p(s)
197 float32 torch.special.xlogy(s, s)
198 float32 torch.special.logit(s, 1e-6)
199 float32 torch.special.ndtr(s)
200 float32 torch.special.round(s)
201 float32 torch.special.sinc(s)
202 float32 torch.special.entr(s)
203 float32 torch.logit(s)
    """,
    "activations": """
204 float32 torch.sigmoid(s)
205 float32 s.sigmoid()
206 float32 torch.relu(s)
207 float32 s.relu()
208 float32 F.relu(s)
209 float32 F.relu6(s)
210 float32 F.leaky_relu(s, 0.1)
211 float32 F.elu(s)
212 float32 F.selu(s)
213 float32 F.celu(s)
214 float32 F.gelu(s)
215 float32 F.gelu(s, approximate='tanh')
216 float32 F.silu(s)
217 float32 F.mish(s)
218 float32 F.softplus(s)
219 float32 F.softplus(s, beta=2.0)
220 float32 F.logsigmoid(s)
221 float32 F.softsign(s)
222 float32 F.tanhshrink(s)
223 float32 F.hardtanh(s)
224 float32 F.hardsigmoid(s)
225 float32 F.hardswish(s)
226 float32 F.softshrink(s)
227 float32 F.threshold(s, 0.1, 0.0)
228 float32 F.sigmoid(s)
229 float32 F.tanh(s)
230 float32 F.dropout(s, 0.5, training=False)
    """,
    "types and casts": """
231 float32 s.to(torch.float32)
232 float32 k.to(dtype=torch.float32)
233 float32 k.to(s.dtype)
234 float32 k.to(s)
235 float32 k.type_as(s)
236 float32 k.type(torch.float32)
237 float32 k.float()
238 float64 s.double()
239 float16 s.half()
240 bfloat16 s.bfloat16()
241 int32 s.int()
242 int64 s.long()
243 int16 k.short()
244 bool k.bool()
245 int32 m.int()
246 float32 m.float()
247 int64 k.to(torch.int64)
248 float32 s.clone()
249 float32 s.contiguous()
250 float32 s.detach()
251 float32 torch.promote_types(s.dtype, k.dtype) is s.dtype and s
    """,
    "constants and constructors": """
252 float32 torch.zeros_like(s)
253 int32 torch.ones_like(q)
254 bool torch.ones_like(q, dtype=torch.bool)
255 float32 torch.full_like(s, 2.0)
256 int32 torch.full_like(k, 2.7)
257 float32 s.new_zeros(())
258 float32 s.new_ones(())
259 float32 s.new_full((), 3.0)
260 float32 torch.tensor(3.0)
261 float32 torch.scalar_tensor(3.0)
262 float32 torch.zeros(())
263 float32 torch.full((), 0.5)
264 bool torch.zeros((), dtype=torch.bool)
265 float32 s + math.log(2.0)
266 float32 s * math.pi
267 float32 s * torch.pi
268 float32 s + torch.finfo(torch.float32).min
269 int32 torch.iinfo(torch.int32).max - q
    """,
    "reading captured tensors": """
270 float32 w[q]
271 float32 w[q - 3]
272 float32 w2[q, k]
273 float32 w2[q][k]
274 float32 w2[q, ...][k]
275 float32 w2[..., k][q]
276 float32 w2[:, k][q]
277 float32 w2[0, k]
278 float32 w2[0][k]
279 float32 w[i16[k].long()]
280 float32 w[i16[k]]
281 float32 w[m.int()]
282 float32 torch.select(w2, 0, 1)[k]
283 float32 w2.t()[k, q]
284 float32 w.view(4, 4)[q // 4 % 4, q % 4]
285 float32 t0 * s
286 float32 t0.exp() * s
287 float32 w.detach()[q]
    """,
    "facts a mod may ask for": """
288 float32 s.dtype == torch.float32 and s
289 float32 s if s.ndim == 0 else None
290 float32 s.shape == () and s
291 float32 s.device is not None and s
292 float32 s.is_floating_point() and s
293 float32 torch.is_tensor(s) and s
294 float32 isinstance(s, torch.Tensor) and s
295 float32 torch.is_floating_point(k) or s
    """,
}


def _read() -> list[Spelling]:
    rows = []
    for lines in LINES.values():
        for line in lines.strip().splitlines():
            number, result, expression = line.strip().split(" ", 2)
            rows.append(Spelling(int(number), result, expression))
    return rows


ACCEPTED = _read()
