"""Block masks whose memory was overwritten past torch's version counter: no call may crash."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from soak import SOAK

import anyflex

# Program of a process of its own, because a failure crashes it. The sizes are a decoding step,
# whole tiles and ragged ones.
PROGRAM = """
import itertools
import sys
import torch
import anyflex
from anyflex_cpu import library


def overwrite(mask, way):
    offsets, runs = mask.offsets.data, mask.runs.data
    generator = torch.Generator().manual_seed(0)
    if way == "beyond":
        runs.add_(500)
    elif way == "far":
        mask.runs.numpy()[:] = 2**30
    elif way == "before":
        runs.fill_(-5)
    elif way == "wide":
        runs.copy_(torch.tensor([-(2**31), 2**31 - 1, 2]))
    elif way == "backwards":
        runs.copy_(runs.flip(1))
    elif way == "anything":
        runs.copy_(torch.randint(-3, 9, runs.shape, generator=generator))
    elif way == "doubled":
        runs.copy_(torch.tensor([0, 9, 1]))
    elif way == "late rows":
        offsets.add_(10**6)
    elif way == "early rows":
        offsets.sub_(10**6)
    else:
        assert way == "long rows"
        flat = offsets.view(-1)
        flat.fill_(-(2**31))
        flat[1::2] = 2**31 - 1


def mixed(b, h, q, k):
    return (q // 64 >= k // 64) & ((q + k) % 7 != 0) | (k < 40)


def by_head(b, h, q, k):
    return mixed(b, h, q, k) | (h == 1)


def call(way, lengths, block, heads, dtype, when):
    torch.manual_seed(0)
    query = torch.randn(1, 2, lengths[0], 32, dtype=dtype, requires_grad=True)
    key = torch.randn(1, 2, lengths[1], 32, dtype=dtype, requires_grad=True)
    mod = mixed if heads is None else by_head
    mask = anyflex.create_block_mask(mod, None, heads, *lengths, BLOCK_SIZE=block)
    if when == "forward":
        overwrite(mask, way)
    out = anyflex.flex_attention(query, key, key, block_mask=mask, backend="cpu")
    if when == "backward":
        # Overwrites the transposed runs that backward reads, which are derived before.
        mask.views().transposed()
        overwrite(mask.views().transposed(), way)
    elif when == "deriving":
        overwrite(mask, way)
    try:
        torch.autograd.grad(out.sum(), (query, key))
    except anyflex.BlockMaskError:
        assert when != "backward"


WAYS = (
    "beyond",
    "far",
    "before",
    "wide",
    "backwards",
    "anything",
    "doubled",
    "late rows",
    "early rows",
    "long rows",
)
LENGTHS = (
    ((1, 900), 128),
    ((3, 900), 128),
    ((300, 300), 128),
    ((640, 700), (64, 128)),
    ((257, 1025), (128, 64)),
    ((256, 256), 128),
)
CALLS = list(
    itertools.product(
        WAYS,
        LENGTHS,
        (None, 2),
        (torch.float32, torch.bfloat16),
        ("forward", "backward", "deriving"),
    )
)
for level in library.load().available():
    library.load().set_isa(level)
    for way, (lengths, block), heads, dtype, when in CALLS[:: int(sys.argv[1])]:
        print(level, way, lengths, block, heads, dtype, when, flush=True)
        call(way, lengths, block, heads, dtype, when)
print("no crash")
"""


def test_no_call_crashes_at_any_level() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "1" if SOAK else "13"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    said = result.stdout[-200:] + result.stderr[-2000:]
    assert result.returncode == 0, f"{result.returncode}: {said}"
    assert result.stdout.endswith("no crash\n")


def test_a_backward_that_derives_from_such_runs_says_what_is_wrong() -> None:
    query = torch.randn(1, 1, 256, 32, requires_grad=True)
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    out = anyflex.flex_attention(query, query, query, block_mask=mask, backend="cpu")
    mask.runs.data.add_(500)
    with pytest.raises(anyflex.BlockMaskError, match="covers blocks 500:501; there are 2"):
        out.sum().backward()
