"""Command line of the demo: ``anyflex demo``, or ``python examples/packed_training``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from packed_training import run as demo
from packed_training.plots import plotting_available

__all__ = ["FAILED", "NOT_RUN", "main"]

FAILED = 1
"""Exit status: the held-out loss did not fall, or gradients differ from the dense formula."""

NOT_RUN = 3
"""Exit status: a device, a package or the training text is missing on this machine."""

_SEEDS = 2**63
"""torch's generators take any seed below this one; the demo also uses the next one."""


def main(arguments: Sequence[str] | None = None, name: str = "packed_training") -> int:
    """Run the demo. Progress goes to stderr, the outcome to stdout.

    Args:
        arguments: without the program's name; None for ``sys.argv``.
        name: what ``--help`` and messages call the program.

    Returns:
        0, or `FAILED`. Raises SystemExit for ``--help``, wrong usage (2) and `NOT_RUN`.
    """
    parser = _parser(name)
    args = parser.parse_args(arguments)
    if args.plots is not None:
        if not plotting_available():
            parser.exit(
                NOT_RUN,
                f"{name}: --plots needs matplotlib; install it: pip install "
                '".[demo]" in a checkout of anyflex\n',
            )
        try:  # before the training, not after it
            args.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--plots must be a folder, or be free for one: {error}")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        parser.exit(NOT_RUN, f"{name}: --device {args.device} is not on this machine: {error}\n")
    settings = demo.DemoSettings(
        seconds=args.seconds,
        steps=args.steps,
        seed=args.seed,
        device=str(args.device),
        backend=args.backend,
        dtype=args.dtype,
        sample=args.sample,
        plots=args.plots,
    )
    # Where JSON is the output, what a plugin prints must not stand in it.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        try:
            result = demo.run_demo(
                settings, report=lambda line: print(line, file=sys.stderr, flush=True)
            )
        except FileNotFoundError as error:
            parser.exit(NOT_RUN, f"{name}: {error}\n")
    print(json.dumps(result.to_dict(), indent=2) if args.json else _text(result))
    return 0 if result.passed else FAILED


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=name,
        description=(
            "A byte-level causal transformer trains on the source files of Python's standard "
            "library, packed as documents into rows: a mask function keeps every position inside "
            "its own document, a score function adds distances that each head learns. Then the "
            "gradients of all parameters, through the whole model, are compared with a dense "
            "float64 formula, and the model writes some text. Fails (1) if the loss on held-out "
            "documents did not fall or the gradients differ."
        ),
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=50.0,
        help="wall clock to train for (default: %(default)s)",
    )
    parser.add_argument("--steps", type=_count, help="end after so many steps at the latest")
    parser.add_argument("--seed", type=_seed, default=0, help="default: %(default)s")
    parser.add_argument("--device", type=_device, default="cpu", help="default: %(default)s")
    parser.add_argument("--backend", help="force a backend (default: the registry chooses)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16 trains under autocast (default: %(default)s)",
    )
    parser.add_argument(
        "--sample",
        type=_count,
        default=300,
        metavar="BYTES",
        help="how much text to write (default: %(default)s)",
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="write block_mask.png and loss.png there (needs the extra demo)",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < _SEEDS:
        raise argparse.ArgumentTypeError(f"must be 0 to {_SEEDS - 1}, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"torch knows no such device type, got {text}") from error


def _text(result: demo.DemoResult) -> str:
    training, check = result.run, result.gradients
    lines = [
        "",
        *("    " + line for line in result.text.splitlines()),
        "",
        f"attention   backend {result.selection.get('backend')}, "
        f"variant {result.selection.get('variant')}, on {result.settings.device}",
        f"training    {len(training.losses)} steps, {training.tokens:,} tokens in "
        f"{training.seconds:.1f} s: {training.tokens / training.seconds:,.0f} tokens/s",
        f"loss        {result.loss_before:.3f} -> {result.loss_after:.3f} nats a byte on held-out "
        f"documents: {'PASS' if result.loss_fell else 'FAIL, it did not fall'}",
        f"gradients   {check.parameters} parameters against a dense float64 formula, worst "
        f"{check.worst}: relative error {check.error:.1e}, allowed {check.limit:.1e}: "
        f"{'PASS' if check.passed else 'FAIL'}",
    ]
    lines += [f"picture     {path}" for path in result.pictures]
    return "\n".join(lines)
