"""Calls that are wrong in one way each: anyflex must answer with the error of that way, whatever
the tensors are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import anyflex
from anyflex import (
    AnyflexError,
    ArgumentError,
    ArgumentTypeError,
    BackendRefused,
    BlockMaskError,
    ModIndexError,
    ModTraceError,
    PluginError,
    TensorFormError,
)

__all__ = ["WRONGS", "Wrong", "attempt", "is_refusal"]

Arguments = dict[str, Any]
Change = Callable[[random.Random, Arguments], None]


@dataclass(frozen=True)
class Wrong:
    """A way for a call to be wrong.

    Args:
        change: changes the arguments of a right call into those of a wrong one, or raises itself,
            where a block mask can't even be made.
        errors: the types that anyflex's error may have; their subclasses mean something else.
    """

    change: Change
    errors: tuple[type[AnyflexError], ...]


WRONGS: dict[str, Wrong] = {}


def refused_with(*errors: type[AnyflexError]) -> Callable[[Change], Change]:
    """Enter a change into `WRONGS`."""

    def enter(change: Change) -> Change:
        WRONGS[change.__name__] = Wrong(change, errors)
        return change

    return enter


def is_refusal(error: AnyflexError, errors: tuple[type[AnyflexError], ...]) -> bool:
    """Whether an error has one of the types and isn't a plugin's failure: an error that the wall
    around plugins catches is a missing check."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PluginError):
            return False
        cause = cause.__cause__
    return type(error) in errors and "is broken" not in str(error)


def attempt(arguments: Arguments) -> Any:
    """Make the call."""
    return anyflex.flex_attention(backend=arguments.pop("backend", "cpu"), **arguments)


def some_input(draw: random.Random) -> str:
    return draw.choice(["query", "key", "value"])


@refused_with(ArgumentError, TensorFormError)
def of_rank(draw: random.Random, a: Arguments) -> None:
    name = some_input(draw)
    a[name] = draw.choice(
        [a[name][None], a[name].flatten(0, 1), a[name].flatten(), a[name][..., 0]]
    )


@refused_with(ArgumentError, ArgumentTypeError, TensorFormError)
def of_head_dim(draw: random.Random, a: Arguments) -> None:
    name = draw.choice(["query", "key"])
    a[name] = torch.zeros(*a[name].shape[:3], a[name].shape[3] + draw.choice([1, 15]))


@refused_with(ArgumentError)
def of_length(draw: random.Random, a: Arguments) -> None:
    name = draw.choice(["key", "value"])
    batch, heads, length, dim = a[name].shape
    a[name] = a[name].new_zeros(batch, heads, length + draw.choice([1, 64]), dim)


@refused_with(ArgumentError)
def of_batch(draw: random.Random, a: Arguments) -> None:
    name = draw.choice(["key", "value"])
    batch, *rest = a[name].shape
    a[name] = a[name].new_zeros(batch + 3, *rest)


@refused_with(ArgumentError)
def of_heads(draw: random.Random, a: Arguments) -> None:
    name = draw.choice(["key", "value"])
    batch, heads, length, dim = a[name].shape
    a[name] = a[name].new_zeros(batch, heads + a["query"].shape[1], length, dim)


@refused_with(ArgumentError)
def groups_unasked(draw: random.Random, a: Arguments) -> None:
    query = a["query"]
    a["query"] = query.new_zeros(query.shape[0], a["key"].shape[1] * 2, *query.shape[2:])
    a["block_mask"] = None
    a["enable_gqa"] = False


@refused_with(ArgumentTypeError, TensorFormError)
def of_dtype(draw: random.Random, a: Arguments) -> None:
    name = some_input(draw)
    others = [torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64, torch.uint8]
    a[name] = a[name].nan_to_num().to(draw.choice(others))


@refused_with(ArgumentTypeError, BackendRefused)
def all_of_a_dtype(draw: random.Random, a: Arguments) -> None:
    dtype = draw.choice([torch.float64, torch.int64, torch.bool, torch.complex64, torch.int8])
    for name in ("query", "key", "value"):
        a[name] = a[name].nan_to_num().to(dtype)


@refused_with(BackendRefused)
def wide_heads(draw: random.Random, a: Arguments) -> None:
    dim = draw.choice([513, 1024])
    for name in draw.choice([("query", "key"), ("value",)]):
        a[name] = a[name].new_zeros(*a[name].shape[:3], dim)


@refused_with(ArgumentError)
def on_meta(draw: random.Random, a: Arguments) -> None:
    name = some_input(draw)
    a[name] = a[name].to("meta")


@refused_with(ArgumentTypeError)
def no_tensor(draw: random.Random, a: Arguments) -> None:
    name = some_input(draw)
    a[name] = draw.choice([None, 3, "query", a[name].detach().float().tolist(), object()])


@refused_with(TensorFormError)
def sparse(draw: random.Random, a: Arguments) -> None:
    name = some_input(draw)
    a[name] = a[name].detach().to_sparse()


@refused_with(ArgumentError)
def without_dims(draw: random.Random, a: Arguments) -> None:
    for name in ("query", "key"):
        a[name] = a[name][..., :0]


@refused_with(ArgumentError, ArgumentTypeError)
def of_scale(draw: random.Random, a: Arguments) -> None:
    a["scale"] = draw.choice([float("nan"), float("inf"), "1", True, 1j, torch.ones(2), 2**70])


@refused_with(BlockMaskError)
def mask_of_lengths(draw: random.Random, a: Arguments) -> None:
    rows, keys = a["query"].shape[2], a["key"].shape[2]
    more = draw.choice([(1, 0), (0, 1), (64, 64), (1000, 0)])
    a["block_mask"] = anyflex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, rows + more[0], keys + more[1], BLOCK_SIZE=32
    )


@refused_with(BlockMaskError)
def mask_of_batches(draw: random.Random, a: Arguments) -> None:
    batch, heads, rows, _ = a["query"].shape
    more = draw.choice([(batch + 2, 1), (1, heads + 2), (batch + 2, heads + 2)])
    # A mask mod that doesn't read them would serve any number of them.
    a["block_mask"] = anyflex.create_block_mask(
        lambda b, h, q, k: q + b + h >= k, *more, rows, a["key"].shape[2], BLOCK_SIZE=32
    )


@refused_with(ArgumentTypeError)
def no_mask(draw: random.Random, a: Arguments) -> None:
    a["block_mask"] = draw.choice([3, "causal", torch.ones(4, 4), lambda b, h, q, k: q >= k])


@refused_with(BlockMaskError)
def mask_of_wrong_runs(draw: random.Random, a: Arguments) -> None:
    """Runs with numbers that would lead a kernel outside, if they weren't checked."""
    rows, keys = a["query"].shape[2], a["key"].shape[2]
    blocks = -(-rows // 16)
    counts = torch.randint(0, 3, (blocks,)).cumsum(0).int()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), counts]).view(1, 1, -1)
    runs = torch.randint(-2, 40, (int(offsets[0, 0, -1]) + 1, 3), dtype=torch.int32)
    runs[:, 0] = 2**31 - 1
    way = draw.randrange(4)
    if way == 0:
        offsets = offsets.flip(-1) + 1
    elif way == 1:
        offsets = offsets * 1000 + 7
    elif way == 2:
        offsets = offsets - 3
    else:
        offsets = torch.cat([offsets, offsets[..., -1:] + 5], -1)
    a["block_mask"] = anyflex.BlockMask.from_runs(
        offsets, runs, seq_lengths=(rows, keys), block_size=16, mask_mod=lambda b, h, q, k: q >= k
    )


@refused_with(ArgumentError, ArgumentTypeError)
def of_options(draw: random.Random, a: Arguments) -> None:
    a["kernel_options"] = draw.choice(
        [{"cpu": {"mods": "fast"}}, {"cpu": {"mod": "jit"}}, {"cpu": 3}, {"mods": "jit"}, 7]
    )


@refused_with(ArgumentTypeError)
def of_aux(draw: random.Random, a: Arguments) -> None:
    a["return_aux"] = draw.choice([True, "lse", {"lse": True}])


@refused_with(ArgumentError, ArgumentTypeError, BackendRefused)
def of_backend(draw: random.Random, a: Arguments) -> None:
    a["backend"] = draw.choice(["cpus", "cuda", "cpu.nobodys", 3, ""])


@refused_with(ArgumentTypeError, ModTraceError)
def of_mod(draw: random.Random, a: Arguments) -> None:
    a["score_mod"] = draw.choice(
        [
            3,
            "softcap",
            lambda s, b, h, q: s,
            lambda s, b, h, q, k: None,
            lambda s, b, h, q, k: "s",
            lambda s, b, h, q, k: (s, s),
            lambda s, b, h, q, k: s.item(),
            lambda s, b, h, q, k: s if q > k else -s,
            lambda s, b, h, q, k: s + torch.randn(3),
            lambda s, b, h, q, k: s + torch.rand(()),
            lambda s, b, h, q, k: s.add_(1),
            lambda s, b, h, q, k: s.softmax(-1),
        ]
    )


@refused_with(ArgumentError, ArgumentTypeError)
def of_captured(draw: random.Random, a: Arguments) -> None:
    length = a["key"].shape[2] + 1
    table = draw.choice(
        [
            torch.zeros(length, device="meta"),
            torch.zeros(length, dtype=torch.complex64),
            torch.zeros(length).to_sparse(),
        ]
    )
    a["score_mod"] = lambda s, b, h, q, k: s + table[k]


@refused_with(ModIndexError)
def by_float(draw: random.Random, a: Arguments) -> None:
    table = torch.zeros(500)
    at = draw.choice([lambda s, k: s, lambda s, k: k * 0.5, lambda s, k: s.isnan()])
    a["score_mod"] = lambda s, b, h, q, k: s + table[at(s, k)]


@refused_with(ModIndexError)
def too_many_indices(draw: random.Random, a: Arguments) -> None:
    table = torch.zeros(500)
    a["score_mod"] = lambda s, b, h, q, k: s + table[q, k]
