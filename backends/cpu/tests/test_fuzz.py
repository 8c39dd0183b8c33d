"""Random calls, right and wrong: each is right by the formula or refused with the error that says
what is wrong, none ends the process.

`make soak` makes 100,000, in processes of `CHUNK` calls: a crash then names its call.
`python fuzz_calls.py N 1` makes call N again.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fuzz_calls
import pytest
import torch
from fuzz_drawing import Call, draw_call
from fuzz_formula import Expected
from fuzz_paths import OF_LARGE, Paths
from fuzz_wrong import WRONGS, is_refusal
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex import ArgumentError, BackendRefused, BlockMaskError, PluginError
from anyflex_cpu import library

ENOUGH_CALLS = 400
CALLS = 100_000 if SOAK else ENOUGH_CALLS
CHUNK = 2000
SECONDS = 900
"""Time limit of one process in seconds: a call that never returns is a failure too."""
SCRIPT = Path(__file__).parent / "fuzz_calls.py"


def made(first: int, count: int, folder: Path, script: Path = SCRIPT) -> tuple[str, str]:
    """Make calls in a process of their own; return its counts, and its failures."""
    progress = folder / f"call-{first}"
    line = [sys.executable, "-X", "faulthandler", str(script), str(first), str(count)]
    environment = os.environ | {
        "ANYFLEX_CACHE_DIR": str(folder / "cache"),
        # Folders where tests find the packages.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    try:
        done = subprocess.run(
            [*line, str(progress)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", f"call {progress.read_text()} doesn't end within {SECONDS} s"
    if done.returncode != 0:
        where = progress.read_text() if progress.exists() else "none"
        return "", f"call {where.strip()}, status {done.returncode}:\n{done.stderr[-4000:]}"
    return done.stdout, ""


def test_random_calls_are_right_or_refused(tmp_path: Path) -> None:
    starts = range(0, CALLS, CHUNK)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(
            pool.map(lambda first: made(first, min(CHUNK, CALLS - first), tmp_path), starts)
        )
    assert [wrong for _, wrong in outcomes if wrong] == []
    counts: Counter[str] = Counter()
    paths: Counter[str] = Counter()
    for printed, _ in outcomes:
        of_kinds, of_paths = printed.split(fuzz_calls.PATHS_TITLE)
        counts.update(numbers_in(of_kinds))
        paths.update(numbers_in(of_paths))
    print(dict(counts))
    print(fuzz_calls.PATHS_TITLE, dict(paths))
    assert sum(counts.values()) == CALLS
    # No call may be left out by chance, or by an error that passes for a refusal.
    assert counts["right"] > CALLS * 0.4
    assert counts["wrong, refused"] > CALLS * 0.2
    assert counts["right, with non-finite inputs"] > CALLS * 0.04
    # Calls are the same in every run: those of the default number reach each way.
    if CALLS >= ENOUGH_CALLS:
        assert [path for path in OF_LARGE if not paths[path]] == []


def numbers_in(printed: str) -> dict[str, int]:
    return {name: int(number) for number, name in re.findall(r"(\d+)  (.+)", printed)}


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch, threads: None) -> Paths:
    """Paths that the library's calls take in one test, with two threads."""
    loaded = library.load()
    for name in ("forward", "backward"):
        monkeypatch.setattr(loaded, name, getattr(loaded, name))
    torch.set_num_threads(2)
    return Paths(loaded)


def attend(length: int, keys: int, mask: anyflex.BlockMask | None = None, heads: int = 1) -> None:
    query = torch.ones(1, heads, length, 64, requires_grad=True)
    key = torch.ones(1, 1, keys, 64)
    out = anyflex.flex_attention(query, key, key, block_mask=mask, enable_gqa=True, backend="cpu")
    out.sum().backward()


@pytest.mark.parametrize(
    ("length", "keys", "taken"),
    [
        (1, 1024, set()),
        (1, 1025, {"decode in splits"}),
        # Keys and values of 1 MB.
        (1, 2000, {"decode in splits", "decode in splits on several threads"}),
    ],
)
def test_decoding_is_split_where_its_plan_says(
    length: int, keys: int, taken: set[str], paths: Paths, level: str
) -> None:
    attend(length, keys)
    assert paths.taken == taken | {"decode", "backward", "backward in several parts"}


def test_decoding_of_many_rows_is_noted(paths: Paths) -> None:
    attend(4, 100, heads=5)
    many = {"decode", "decode of more than 16 rows"}
    assert paths.taken == many | {"backward"}
    for length, keys, taken in ((64, 256, many), (65, 256, {"prefill"}), (64, 255, {"prefill"})):
        paths.taken.clear()
        attend(length, keys)
        assert paths.taken == taken | {"backward"}


@pytest.mark.parametrize(("keys", "several"), [(384, set()), (385, {"backward in several parts"})])
def test_backward_has_parts_of_two_tiles_at_least(
    keys: int, several: set[str], paths: Paths, level: str
) -> None:
    attend(80, keys)
    assert paths.taken == several | {"prefill", "prefill over several tiles of keys", "backward"}


def test_gaps_of_a_mask_are_noted(paths: Paths) -> None:
    mask = anyflex.create_block_mask(lambda b, h, q, k: (k < 200) | (k >= 600), None, None, 1, 700)
    attend(1, 700, mask)
    gaps = "a mask with gaps over several tiles of keys"
    assert paths.taken == {"decode", gaps, "backward", "backward in several parts"}


def test_a_crash_names_its_call(tmp_path: Path) -> None:
    program = tmp_path / "fuzz_calls.py"
    program.write_text(
        "import os, sys, ctypes\n"
        "open(sys.argv[3], 'w').write(f'{int(sys.argv[1]):12d}')\n"
        "ctypes.string_at(0)\n",
        encoding="utf-8",
    )
    printed, wrong = made(7, 1, tmp_path, program)
    assert printed == "" and re.match(r"call 7, status -\d+:", wrong), wrong


def some_call(seed: int) -> Call:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    return draw_call(draw)


class Choosing(random.Random):
    """Draws one way to be wrong, and everything else at random."""

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self.name = name

    def choice(self, seq: object) -> object:  # type: ignore[override]
        return self.name if seq == list(WRONGS) else super().choice(seq)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WRONGS)
def test_every_way_to_be_wrong_is_refused_with_its_errors(name: str) -> None:
    draw = Choosing(name)
    for seed in range(6):
        assert fuzz_calls.judge_wrong(draw, some_call(seed)) in ("wrong, refused", "reads outside")


def broken_plugin() -> PluginError:
    return PluginError("plugin 'cpu' of some 1.0 is broken", plugin="cpu", distribution="some 1.0")


def test_what_a_plugin_broke_with_is_no_refusal() -> None:
    assert is_refusal(ArgumentError("head dims differ"), (ArgumentError,))
    assert not is_refusal(broken_plugin(), (ArgumentError,))
    # An error of the right type isn't a refusal if its text or cause reports a broken plugin.
    assert not is_refusal(BackendRefused("cpu: plugin 'cpu' is broken"), (BackendRefused,))
    told = BackendRefused("backend='cpu' is refused")
    told.__cause__ = broken_plugin()
    assert not is_refusal(told, (BackendRefused,))
    # A subclass means something else.
    assert not is_refusal(BlockMaskError("lengths differ"), (ArgumentError,))


@pytest.mark.parametrize("error", [broken_plugin(), BlockMaskError("something else"), None])
def test_a_wrong_call_with_another_answer_fails_the_fuzz(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(arguments: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(fuzz_calls, "attempt", answer)
    with pytest.raises(fuzz_calls.Mistaken, match=r"of_rank is (not )?refused"):
        fuzz_calls.judge_wrong(Choosing("of_rank"), some_call(0))


@pytest.mark.usefixtures("threads")
def test_a_read_outside_that_breaks_a_plugin_fails_the_fuzz(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_down(call: Call, seed: int) -> None:
        raise broken_plugin()

    def no_parts(place: int) -> Tensor:
        raise AssertionError("nothing is compared")

    expected = Expected([], [], no_parts, 0.0, [], must_fail=True, may_fail=True)
    monkeypatch.setattr(fuzz_calls, "expected_of", lambda call, seed: expected)
    monkeypatch.setattr(fuzz_calls, "results_of", break_down)
    monkeypatch.setattr(fuzz_calls, "judge_wrong", lambda draw, call: "wrong")
    monkeypatch.setattr(type(library.load()), "set_isa", lambda self, name: None)
    with pytest.raises(fuzz_calls.Mistaken, match="is broken"):
        for seed in range(20):
            fuzz_calls.judge(seed)
