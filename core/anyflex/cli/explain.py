"""``anyflex explain``: which backend takes a call, which variant, and why not the others."""

from __future__ import annotations

import argparse
import ast
import json
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anyflex.bench.usage_errors import WrongUsage
from anyflex.cli.exit_codes import ExitCode
from anyflex.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "add_parser", "kernel_option", "run", "shape"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Short names of types."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="which backend takes a call, and why",
        description=(
            "Shows what anyflex.flex_attention would do with a call, without computing it: every "
            "backend that was asked and what it answered, the variant of the kernel, the options "
            "that nobody uses, and the spec. Either the call is your own, given by a function in "
            "a file, or it is made from shapes and names. Exit status 3 if no backend takes it, 4 "
            "if the plugin that it needs is broken."
        ),
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="FILE.py::function",
        help=(
            "function() takes nothing and returns a dict of anyflex.flex_attention's arguments "
            "by name: query, key, value, and any others"
        ),
    )
    parser.add_argument("--q", type=shape, metavar="BxHxLxE", help="shape of query: 1x16x4096x128")
    parser.add_argument(
        "--kv", type=shape, metavar="BxHxSxE", help="shape of key and value (default: as --q)"
    )
    parser.add_argument("--dtype", choices=(*DTYPES, *DTYPES.values()))
    parser.add_argument("--device", help="default: cpu")
    parser.add_argument(
        "--mask",
        action="append",
        help=(
            "a function of anyflex.masks with its arguments: causal, causal_window:128, "
            "dilated:3,window=5, document_offsets:[0,100,256] (a list is a tensor); may be "
            "repeated: all of them hold"
        ),
    )
    parser.add_argument(
        "--mod",
        action="append",
        help=(
            "a function of anyflex.mods, likewise: alibi, softcap:30; may be repeated: one after "
            "the other"
        ),
    )
    parser.add_argument(
        "--backward", action="store_true", help="query, key and value need gradients"
    )
    parser.add_argument("--backend", help="force a backend, as with backend=")
    parser.add_argument(
        "--option",
        action="append",
        type=kernel_option,
        metavar="KEY=VALUE",
        help="an entry of kernel_options, for example BLOCK_M=64; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def shape(text: str, *, least: int = 0) -> tuple[int, ...]:
    """Parse BxHxLxE for argparse: four numbers, none below `least`."""
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        sizes = ()
    if len(sizes) != 4 or min(sizes) < least:
        raise argparse.ArgumentTypeError(f"must be four numbers like 1x16x4096x128, got {text!r}")
    if math.prod(max(size, 1) for size in sizes) * _WIDEST >= 2**63:
        raise argparse.ArgumentTypeError(
            f"must be the shape of a tensor of less than 2^63 bytes, got {text!r}: make it smaller"
        )
    return sizes


_WIDEST = 8
"""Maximum bytes of an element."""


def kernel_option(text: str) -> tuple[str, object]:
    """Parse KEY=VALUE for argparse: the value is a Python literal, or else the text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def run(args: argparse.Namespace) -> int:
    """Explain one call."""
    import anyflex

    arguments = _arguments_from_file(args) if args.target is not None else _made_arguments(args)
    with warnings.catch_warnings():
        # The explanation includes the warnings' contents.
        warnings.simplefilter("ignore", anyflex.PerformanceWarning)
        try:
            explanation = anyflex.explain(**arguments)
        except (ArgumentError, ArgumentTypeError) as error:
            if not args.option or "kernel_options" not in str(error):
                raise
            raise WrongUsage(
                f"{error}. With --option, a backend's own is written "
                "--option 'BACKEND={\"NAME\": VALUE}'"
            ) from error
    facts = explanation.to_dict()
    print(json.dumps(facts, indent=2) if args.json else explanation, file=args.out)
    if explanation.broken:
        return ExitCode.BROKEN
    taken = facts["backend"] is not None and not facts["problem"]
    return ExitCode.OK if taken else ExitCode.NOT_RUN


def _arguments_from_file(args: argparse.Namespace) -> dict[str, Any]:
    from anyflex.cli.user_function import call_function, checked_arguments

    made = ("q", "kv", "dtype", "device", "mask", "mod", "backward")
    given = [f"--{name}" for name in made if getattr(args, name) not in (None, False)]
    if given:
        raise WrongUsage(f"{', '.join(given)}: the function in {args.target} says this already")
    arguments = checked_arguments(args.target, call_function(args.target))
    if args.backend is not None:
        arguments["backend"] = args.backend
    options = arguments.get("kernel_options") or {}
    # Other values are refused as in a call.
    if args.option and isinstance(options, Mapping):
        arguments["kernel_options"] = {**options, **dict(args.option)}
    return arguments


def _made_arguments(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    import anyflex
    from anyflex.bench.drawn_patterns import PatternCall
    from anyflex.bench.patterns import make_mask_mod, make_score_mod
    from anyflex.cli.device_argument import present_device
    from anyflex.tensors.allocation import failed_allocation

    if args.q is None:
        raise WrongUsage("give FILE.py::function or --q BxHxLxE; see anyflex explain --help")
    q_shape = args.q
    kv_shape = q_shape if args.kv is None else args.kv
    device = present_device("cpu" if args.device is None else args.device)
    dtype: torch.dtype = getattr(torch, DTYPES.get(args.dtype, args.dtype) or "float32")

    # Never read, because explaining computes nothing. But a kernel is chosen by the memory layout
    # of tensors.
    shapes = (q_shape, kv_shape, kv_shape)
    try:
        query, key, value = (
            torch.empty(shape, dtype=dtype, device=device, requires_grad=args.backward)
            for shape in shapes
        )
    except (RuntimeError, MemoryError) as error:
        doing = f"there is not enough memory on {device} for query, key and value"
        if failure := failed_allocation(doing, error):
            raise failure from error
        raise
    batch, heads = q_shape[:2]
    lengths = q_shape[2], kv_shape[2]
    pattern_call = PatternCall((batch, heads, *lengths), device, dtype, args.backward)
    mask_mod = make_mask_mod(args.mask or (), pattern_call)
    mask = None
    if mask_mod is not None:
        mask = anyflex.create_block_mask(mask_mod, batch, heads, *lengths, device=device)
    return {
        "query": query,
        "key": key,
        "value": value,
        "score_mod": make_score_mod(args.mod or (), pattern_call),
        "block_mask": mask,
        "enable_gqa": heads != kv_shape[1],
        "kernel_options": dict(args.option) if args.option else None,
        "backend": args.backend,
    }
