"""Refused spellings of mods: number, spelling, and the names in the error's text."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PURE", "REFUSED", "Refusal"]


@dataclass(frozen=True)
class Refusal:
    """One line of the list.

    Args:
        names: regular expressions that the message must match, each anywhere.
    """

    number: int
    expression: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"R{self.number}"


_LINES = r"""
1 s if q >= k else -s :: branch :: torch.where
2 (q >= k) and (k > 2) :: branch :: `&` :: parentheses
3 (q < k) or m :: branch :: `\|`
4 not m :: branch :: `~`
5 0 <= k < 5 :: chained comparison :: \(a <= x\) & \(x < b\)
6 min(s, 1.0) :: min\(\) :: torch.clamp :: torch.minimum
7 max(q, k) :: max\(\) :: torch.maximum
8 bool(m) :: branch on a symbol
9 int(q) :: int\(\) of a symbol :: `.int\(\)`
10 float(s) :: float\(\) :: `.float\(\)`
11 round(s) :: round\(\) :: torch.round
12 divmod(q, 3) :: divmod\(\) :: // and %
13 math.tanh(s) :: math :: torch.tanh
14 math.sqrt(k) :: math :: torch.sqrt
15 math.floor(s) :: math.floor :: torch.floor
16 [1.0, 2.0][q] :: Python integer :: captured tensor instead of a list
17 range(q) :: Python integer :: loop over Python numbers
18 pow(q, 2, 5) :: three arguments :: x \*\* y % z
19 s.item() :: Tensor.item
20 s.tolist() :: Tensor.tolist
21 s.numpy() :: Tensor.numpy
22 f'{s:.2f}' :: formatting
23 torch.rand(()) :: random :: captured table
24 torch.rand_like(s) :: random :: torch.rand_like
25 torch.randint(0, 4, ()) :: random :: torch.randint
26 torch.bernoulli(torch.sigmoid(s)) :: random :: torch.bernoulli
27 F.dropout(s, 0.5) :: random :: dropout
28 s.add_(1) :: in place :: add
29 w.add_(1) :: in place :: 'w'
30 w.__setitem__(q, 0.0) :: (in place|assign)
31 torch.add(s, 1, out=w[0]) :: out=
32 s.requires_grad_() :: autograd :: requires_grad_
33 s.backward() :: autograd inside a mod
34 s.sum() :: reduction :: sum
35 torch.softmax(s, -1) :: reduction :: one score
36 torch.cumsum(s, 0) :: reduction :: one score
37 w.sum() :: reduction :: 'w' :: outside
38 s + w :: row of shape \[16\] of captured tensor 'w' :: index :: sum
39 w[q:] :: slice
40 w[s] :: dtype torch.float32
41 w[m] :: dtype torch.bool :: torch.where
42 w[u8[k]] :: dtype torch.uint8 :: `.long\(\)`
43 w2[q, k, h] :: 3 indices :: rank 2
44 w2[q] :: row of shape \[16\] :: scalar is needed
45 w[:k] :: slice :: to a symbol :: torch.where
46 w.index_select(0, k) :: row of shape \[1\] where a scalar
47 s if (w2[q] > 0) else -s :: branch :: torch.where
48 F.embedding(k, w2) :: row of shape \[16\] of captured tensor 'w2'
49 float(w2[q]) :: row of shape \[16\] :: scalar is needed
50 w2[w2[q]] :: row of shape \[16\] :: scalar is needed
51 s.unsqueeze(0) :: row of shape \[1\] :: scalar
52 s.view(1) :: row of shape \[1\] :: scalar
53 s.expand(2) :: row of shape \[2\] :: scalar
54 torch.stack([s, s]) :: row of shape \[2\] :: scalar
55 torch.complex(s, s) :: complex
56 s + 1j :: complex
57 torch.maximum(s, 1.0) :: torch.maximum :: must be Tensor :: torch.clamp
58 torch.where(q, s, 0.0) :: condition :: != 0
59 torch.clamp(s) :: bounds :: min, max
60 m - m :: bool minus bool :: \^
61 -m :: minus on a bool :: `~`
62 ~s :: `~` on a float
63 s & m :: `&` on a float :: Compare first
64 s << 1 :: `<<` on a
65 torch.abs(m) :: abs of a bool
66 k ** -1 :: negative power :: 1.0 / x
67 q // 0 :: divided by zero
68 s.to('cuda') :: moving :: cuda
69 s.cuda() :: device
70 torch.frexp(s) :: more than one result
71 torch.equal(q, k) :: Python bool :: ==
72 torch.allclose(s, s) :: Python bool :: torch.isclose
73 torch.nonzero(q) :: depends on data
75 np.tanh(s) :: NumPy :: torch.tanh
76 np_table[q] :: NumPy :: torch.from_numpy
77 torch.compile(lambda x: x)(s) :: compiled function inside a mod
78 torch.vmap(torch.sin)(w) :: transform :: vmap
79 s.new_tensor(s) :: new_tensor :: `.clone\(\)`
"""


def _read() -> list[Refusal]:
    rows = []
    for line in _LINES.strip().splitlines():
        spelling, *names = line.split(" :: ")
        number, expression = spelling.split(" ", 1)
        rows.append(Refusal(int(number), expression, tuple(names)))
    return rows


REFUSED = _read()

PURE = {
    80: ("torch.nextafter(s, s)", "nextafter"),
    81: ("torch.lgamma(s)", "lgamma"),
    82: ("torch.special.i0(s)", "i0"),
    83: ("torch.erfinv(s)", "erfinv"),
    84: ("torch.polygamma(1, s)", "polygamma"),
    85: ("torch.gcd(q, k)", "gcd"),
}
"""Number -> (spelling, operation) of spellings that torch can vmap and a graph can't hold: the
reference runs it, with a warning that names the operation."""
