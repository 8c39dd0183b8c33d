"""``anyflex warm``: compile ahead of a program's calls, in parallel processes.

Exit codes: 0 all were warmed; the failures' own code where they share one, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from anyflex.bench.usage_errors import WrongUsage
from anyflex.cli.exit_codes import ExitCode, UserFileFailed, code_of
from anyflex.errors import AnyflexError, ArgumentError
from anyflex.plugin import hookimpl
from anyflex.process.progress_line import ProgressLine
from anyflex.registry import register_hooks

__all__ = ["add_parser", "run"]

_BAR = 30
"""Characters of the progress bar."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One spec or function to warm.

    Args:
        name: for messages.
        backend, spec: of a line of a file; "" for a function, whose name is ``FILE.py::function``.
    """

    name: str
    backend: str = ""
    spec: str = ""


@dataclass(frozen=True, slots=True)
class _Result:
    """Outcome of a task: how many kernels are ready, or why not."""

    kernels: int
    code: int = ExitCode.OK
    reason: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``warm``."""
    parser = subparsers.add_parser(
        "warm",
        help="compile kernels ahead, in parallel processes",
        description=(
            "Compiles kernels into the disk cache before they are called. A function of yours "
            "makes its calls as usual, forward and backward; a file of specs is what `anyflex "
            "cache specs` prints, and each line is warmed by small calls. Needs the device that "
            "the kernels are for. Exit status 0 if all were warmed."
        ),
    )
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="FILE.py::function | SPECS",
        help=(
            "function() takes nothing and makes the calls, or returns a dict of "
            "anyflex.flex_attention's arguments by name, as for `anyflex explain`"
        ),
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        metavar="N",
        help="processes (default: one for each processor, at most 8 and one for each target)",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Warm everything; return the exit code."""
    from anyflex.runtime import disk_cache

    tasks = [task for target in args.targets for task in _tasks_of(target)]
    store = disk_cache.store()
    if not store.usable(create=True):
        raise ArgumentError(
            f"the cache {store.folder} can't be used ({store.problem}), and nothing else would "
            "keep what is warmed; set ANYFLEX_CACHE_DIR to a writable folder of your own"
        )
    began = time.monotonic()
    jobs = args.jobs or min(os.cpu_count() or 1, 8)
    failures: list[tuple[_Task, _Result]] = []
    kernels = 0
    progress = ProgressLine(sys.stderr)
    results = _results(tasks, min(jobs, max(len(tasks), 1)))
    for done, (task, result) in enumerate(results, 1):
        kernels += result.kernels
        if result.code != ExitCode.OK:
            failures.append((task, result))
            progress.clear()
            reason = result.reason.removeprefix(f"{task.name}: ")
            print(f"anyflex warm: {task.name}: {reason}", file=sys.stderr)
        filled = _BAR * done // len(tasks)
        bar = "#" * filled + "." * (_BAR - filled)
        progress.show(f"[{bar}] {done} of {len(tasks)}, {len(failures)} failed")
    progress.clear()
    facts = {
        "targets": len(tasks),
        "warmed": len(tasks) - len(failures),
        "kernels": kernels,
        "seconds": round(time.monotonic() - began, 3),
        "failed": [{"target": task.name, "reason": result.reason} for task, result in failures],
    }
    text = f"warmed {facts['warmed']} of {len(tasks)}: {kernels} kernels, {facts['seconds']:.1f} s"
    print(json.dumps(facts, indent=2) if args.json else text, file=args.out)
    codes = {result.code for _, result in failures}
    if not codes:
        return ExitCode.OK
    return codes.pop() if len(codes) == 1 else ExitCode.CHECK_FAILED


def _tasks_of(target: str) -> list[_Task]:
    if "::" in target:
        return [_Task(target)]
    try:
        text = Path(target).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUsage(
            f"{target}: must be FILE.py::function or a file that `anyflex cache specs` has "
            f"written: {error}"
        ) from error
    tasks = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            tasks.append(_task_of(line, f"{target}:{number}"))
    return tasks


def _task_of(line: str, place: str) -> _Task:
    from anyflex.contract.spec import Spec
    from anyflex.runtime.compiled_kernel import summary

    try:
        facts = json.loads(line)
        backend, text = facts["backend"], facts["spec"]
        said = summary(Spec.from_text(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongUsage(
            f"{place}: must be a line of `anyflex cache specs` of this version: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _Task(f"{place} ({backend}: {said})", backend, text)


def _results(tasks: list[_Task], jobs: int) -> Iterator[tuple[_Task, _Result]]:
    left = []
    # Spawned: an accelerator can't be used in a process that was forked beside one.
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), initializer=_share_processors, initargs=(jobs,)
    ) as pool:
        futures: dict[Future[_Result], _Task] = {pool.submit(_warm, task): task for task in tasks}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                left.append(futures[future])
    # A process that dies takes its pool with it; a process per task tells which task it was.
    for task in left:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                result = pool.submit(_warm, task).result()
            except BrokenProcessPool:
                result = _Result(0, ExitCode.BROKEN, "its process died")
        yield task, result


def _share_processors(jobs: int) -> None:
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


def _warm(task: _Task) -> _Result:
    from anyflex.registry.plugin_errors import first_line

    # The output is the command's own: prints of a user's function go elsewhere.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            if task.spec:
                from anyflex.contract.spec import Spec
                from anyflex.runtime.warming import warm_spec

                warm_spec(Spec.from_text(task.spec), task.backend)
                return _Result(1)
            return _call(task.name)
        except AnyflexError as error:
            reason = " ".join(str(error).splitlines())
            if isinstance(error, UserFileFailed) and error.__cause__ is not None:
                reason = first_line(error.__cause__)
            return _Result(0, code_of(error), reason)
        # Errors of a device: out of memory, a driver that is too old.
        except RuntimeError as error:
            return _Result(0, ExitCode.CHECK_FAILED, first_line(error))


def _call(target: str) -> _Result:
    from anyflex.cli.user_function import call_function, checked_arguments, failed

    heard = _heard_in_this_process()
    heard.compiled = heard.launched = 0
    returned = call_function(target)
    if isinstance(returned, dict):
        arguments = checked_arguments(target, returned)
        try:
            _run_call(arguments)
        except AnyflexError:
            raise
        # A mod is user code too, and may raise anything.
        except Exception as error:
            raise failed(target, error) from error
    if not heard.launched:
        raise WrongUsage(f"{target}: the function made no call of anyflex")
    return _Result(heard.compiled)


class _Heard:
    """Hook plugin that counts compilations."""

    compiled = 0
    launched = 0

    @hookimpl
    def anyflex_compiled(self) -> None:
        self.compiled += 1

    @hookimpl
    def anyflex_launched(self) -> None:
        self.launched += 1


@functools.cache
def _heard_in_this_process() -> _Heard:
    heard = _Heard()
    register_hooks(heard, "warm")
    return heard


def _run_call(arguments: dict[str, Any]) -> None:
    import torch

    import anyflex

    out = anyflex.flex_attention(**arguments)
    first = out[0] if isinstance(out, tuple) else out
    if isinstance(first, torch.Tensor) and first.requires_grad:
        torch.autograd.backward(first, torch.zeros_like(first))
