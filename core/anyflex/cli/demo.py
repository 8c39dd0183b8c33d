"""``anyflex demo``: train a small transformer on this machine, and check it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anyflex.bench.usage_errors import NotRun, WrongUsage
from anyflex.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from anyflex.demo.run import DemoResult

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``demo``."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small transformer on packed documents, about a minute",
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
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
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


_SEEDS = 2**63
"""torch's generators take any of these, and the next one."""


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the demo. Progress goes to stderr, the outcome to stdout."""
    from anyflex.cli.device_argument import present_device
    from anyflex.demo.plots import plotting_available
    from anyflex.demo.run import DemoSettings, run_demo

    if args.plots is not None and not plotting_available():
        raise NotRun(
            '--plots needs matplotlib; install it: pip install ".[demo]" in a checkout of anyflex'
        )
    if args.plots is not None:
        try:  # now, not after the training
            args.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WrongUsage(f"--plots must be a folder, or be free for one: {error}") from error
    settings = DemoSettings(
        seconds=args.seconds,
        steps=args.steps,
        seed=args.seed,
        device=str(present_device(args.device)),
        backend=args.backend,
        dtype=args.dtype,
        sample=args.sample,
        plots=args.plots,
    )
    try:
        result = run_demo(settings, report=lambda line: print(line, file=sys.stderr, flush=True))
    except FileNotFoundError as error:
        raise NotRun(str(error)) from error
    text = json.dumps(result.to_dict(), indent=2) if args.json else _text(result)
    print(text, file=args.out)
    return ExitCode.OK if result.passed else ExitCode.CHECK_FAILED


def _text(result: DemoResult) -> str:
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
