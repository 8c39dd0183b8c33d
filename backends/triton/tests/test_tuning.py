"""Autotuning: the fastest config is found once, used, kept and found again."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.plugin import (
    Artifacts,
    Call,
    Kernel,
    PerformanceWarning,
    PluginError,
    Spec,
    isolated,
    register,
)
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from triton.errors import TritonError

from anyflex_triton import backend, configs, launch, tuning
from anyflex_triton.backend import TritonBackend
from anyflex_triton.configs import Config, KernelName, Target, Traits, around, config_for
from anyflex_triton.options import STAGES, TILES, WARPS
from anyflex_triton.program import Options, Program

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Tile = tuple[object, object]
TABLES = (64, 32)
"""Table's tile of forward for the target below."""


class Kept:
    """Artifacts in memory instead of on disk."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.stored.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.stored[name] = data


class Machine:
    """Clock for which one tile is the fastest, and a record of all launches.

    Attributes:
        fastest: BLOCK_M and BLOCK_N.
        too_large: tiles that fit no multiprocessor.
        timed: tiles in the order of their timing.
        run: tiles in the order of their launches, including timed ones.
        kept: artifacts by spec.
    """

    def __init__(self) -> None:
        self.fastest: Tile = (128, 32)
        self.too_large: set[Tile] = set()
        self.timed: list[Tile] = []
        self.run: list[Tile] = []
        self.kept: dict[str, Kept] = {}
        self.computes = False

    def milliseconds(self, timed: Callable[[], None]) -> float:
        timed()
        self.timed.append(self.run[-1])
        return 1.0 if self.run[-1] == self.fastest else 2.0 + len(self.timed)

    def backend(self, target: Target = "ampere") -> type[TritonBackend]:
        machine = self

        class Timed(TritonBackend):
            def target(self) -> Target:
                return target

            def milliseconds(self, launch: Callable[[], None]) -> float:
                return machine.milliseconds(launch)

            def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
                return super().compile(spec, machine.kept.setdefault(spec.digest(), Kept()))

        return Timed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Launches compute nothing unless a test says so."""
    machine = Machine()
    original = Program.launch

    def note(program: Program, grid: int, device: torch.device, values: Mapping[str, Any]) -> None:
        tile = (program.constants.get("BLOCK_M"), program.constants.get("BLOCK_N"))
        if tile in machine.too_large:
            raise TritonError("shared memory")
        machine.run.append(tile)
        if machine.computes:
            original(program, grid, device, values)

    monkeypatch.setattr(Program, "launch", note)
    forward = Config(*TABLES, Options(8, 2))
    for table in (configs._HALF, configs._FLOAT32):
        monkeypatch.setitem(table["ampere"], "forward", (forward,) * 3)
    return machine


@pytest.fixture(autouse=True)
def gpu(machine: Machine) -> Iterator[None]:
    with isolated(), posing("cuda"):
        register("cuda.mine", machine.backend())
        yield


def options(**more: object) -> dict[str, object]:
    return {"backend": "cuda.mine", "kernel_options": {"cuda.mine": {"autotune": True, **more}}}


def attention(length: int = 200, *, batch: int = 1, keys: int = 200, **more: object) -> Tensor:
    query = torch.zeros(batch, 1, length, 16)
    key = torch.zeros(batch, 1, keys, 16)
    out = anyflex.flex_attention(query, key, key, **(more or options()))  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return out


def variant(length: int = 200) -> str:
    query, key = torch.zeros(1, 1, length, 16), torch.zeros(1, 1, 200, 16)
    return anyflex.explain(query, key, key, **options()).variant  # type: ignore[arg-type]


def tried(kernel: KernelName = "forward") -> int:
    """Return the number of configs for float32 of head dim 16."""
    return 1 + len(around(kernel, config_for("ampere", kernel, Traits(16, 4))))


def test_the_fastest_is_found_at_the_first_call_and_used_from_then_on(machine: Machine) -> None:
    assert variant() == "prefill 64x32, not tuned yet"
    attention()
    assert machine.timed[0] == TABLES and len(machine.timed) == tried()
    assert machine.run[tried() :] == [machine.fastest]
    assert variant() == "prefill 128x32, tuned"
    attention()
    assert machine.run[tried() :] == [machine.fastest] * 2


def test_what_is_timed_once_is_a_power_of_two_of_lengths_and_heads(machine: Machine) -> None:
    attention(200, keys=200)
    attention(256, keys=129)
    assert len(machine.timed) == tried()
    for count, sizes in enumerate(((257, 200, 1), (200, 257, 1), (200, 200, 2)), start=2):
        length, keys, batch = sizes
        attention(length, keys=keys, batch=batch)
        assert len(machine.timed) == count * tried()


def test_decoding_is_tuned_by_keys_of_a_tile(machine: Machine) -> None:
    machine.fastest = (16, 64)
    assert variant(1) == "decode splits=1, not tuned yet"
    attention(1)
    assert len(machine.timed) == tried("decode")
    assert {tile[0] for tile in machine.timed} == {16}
    assert machine.run[-2] == machine.fastest
    assert variant(1) == "decode splits=1, tuned"


def test_the_users_options_are_held(machine: Machine) -> None:
    attention(**options(block_m=32, num_warps=8))
    assert {tile[0] for tile in machine.timed} == {32}
    assert {tile[1] for tile in machine.timed} == {16, 32, 64}
    machine.timed.clear()
    all_given = options(block_m=32, block_n=16, num_warps=8, num_stages=1)
    attention(**all_given)
    assert not machine.timed and machine.run[-1] == (32, 16)
    query = torch.zeros(1, 1, 200, 16)
    assert anyflex.explain(query, query, query, **all_given).variant == "prefill 32x16"  # type: ignore[arg-type]


def test_tiles_are_no_larger_than_a_masks_blocks(machine: Machine) -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    mask = anyflex.create_block_mask(causal, None, None, 200, 200, BLOCK_SIZE=32)
    attention(block_mask=mask, **options())
    assert {tile[0] for tile in machine.timed} == {16, 32}


def test_nothing_is_tuned_unless_it_is_asked_for(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    attention(backend="cuda.mine")
    attention(**options(autotune=False))
    assert machine.run == [TABLES] * 2 and not machine.timed
    assert capsys.readouterr() == ("", "")
    attention()
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1] == (
        "anyflex: tuned cuda.mine forward of up to 1 heads, 256 rows and 256 keys on cpu: "
        "128x32, 8 warps, 2 stages: 1 ms (the table's 64x32, 8 warps, 2 stages: 3 ms)"
    )
    # Calls without autotuning don't use the result.
    attention(backend="cuda.mine")
    assert machine.run[-1] == TABLES


def test_progress_is_shown(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(tuning.ProgressLine, "show", lambda _, text: shown.append(text))
    attention()
    assert shown == [
        f"anyflex: tuning cuda.mine forward: timed {done}/{tried()}" for done in range(tried())
    ]


def test_what_fits_no_core_is_left_out_and_named(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.too_large = {machine.fastest, TABLES}
    attention()
    assert machine.run[-1] == machine.timed[0] not in machine.too_large
    (kept,) = (json.loads(data) for k in machine.kept.values() for data in tuned(k).values())
    assert kept["failed"]["128x32, 8 warps, 2 stages"] == "TritonError: shared memory"
    assert kept["chosen"] == next(iter(kept["milliseconds"]))
    assert not kept["failed"].keys() & kept["milliseconds"].keys()
    said = capsys.readouterr().err.splitlines()[-1]
    assert "(the table's 64x32, 8 warps, 2 stages: failed)" in said
    assert said.endswith(f"; {len(kept['failed'])} of {tried()} failed")


def test_if_none_works_the_tables_error_is_raised(machine: Machine) -> None:
    machine.too_large = {(m, n) for m in TILES for n in TILES}
    with pytest.raises(PluginError, match="shared memory"):
        attention()


def tuned(kept: Kept) -> dict[str, bytes]:
    return {name: data for name, data in kept.stored.items() if name.startswith("tuned-")}


def test_another_process_finds_it_for_the_same_device_only(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention()
    for device, times in (("cpu", 1), ("NVIDIA H200", 2), ("NVIDIA H200", 2), ("cpu", 2)):
        monkeypatch.setattr(tuning, "device_name", lambda _, name=device: name)
        # The kernels of earlier processes are gone.
        with isolated():
            register("cuda.mine", machine.backend())
            attention()
        assert len(machine.timed) == times * tried()
        assert machine.run[-1] == machine.fastest
    assert sorted(name for kept in machine.kept.values() for name in tuned(kept)) == [
        "tuned-forward-1-256-256-NVIDIA_H200.json",
        "tuned-forward-1-256-256-cpu.json",
    ]


def test_with_other_sources_it_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint() -> str:
        backend.checksum_of.cache_clear()
        return TritonBackend("cuda.mine", "cuda").fingerprint()

    installed = fingerprint()
    copied = shutil.copytree(Path(backend.__file__).parent, tmp_path / "copied")
    with monkeypatch.context() as patch:
        patch.setattr(backend, "__file__", str(copied / "backend.py"))
        assert fingerprint() == installed
        kernel = copied / "decode.py"
        kernel.write_text(kernel.read_text() + "\n# Changed.\n")
        assert fingerprint() != installed
    assert fingerprint() == installed


def test_what_was_found_for_another_table_is_found_again(machine: Machine) -> None:
    machine.fastest = (128, 32)
    attention()
    with isolated():
        register("cuda.mine", machine.backend("interpreter"))
        attention()
    assert len(machine.timed) > tried()


def test_threads_wait_for_the_one_that_tunes(machine: Machine) -> None:
    together = threading.Barrier(4)
    variant()

    def call() -> None:
        together.wait(timeout=60)
        attention()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.timed) == tried() and len(machine.run) == tried() + 4


def test_in_a_graph_capture_the_tables_config_runs_and_a_warning_says_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = True
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: capturing, raising=False)
    # The program is compiled before, because core refuses to compile in a capture.
    assert variant() == "prefill 64x32, not tuned yet"
    with pytest.warns(PerformanceWarning, match="a graph is being captured; make such a call"):
        attention()
    assert not machine.timed and machine.run == [TABLES]
    assert variant() == "prefill 64x32, not tuned yet"
    capturing = False
    attention()
    capturing = True
    attention()
    assert len(machine.timed) == tried() and machine.run[-1] == machine.fastest


def test_for_want_of_memory_the_tables_config_runs_and_a_warning_says_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full(timed: Callable[[], None]) -> float:
        asked.append(timed)
        raise torch.OutOfMemoryError("256 MiB")

    monkeypatch.setattr(machine, "milliseconds", full)
    with pytest.warns(PerformanceWarning, match="no memory left for it: 256 MiB"):
        attention()
    attention()
    assert len(asked) == 1 and machine.run == [TABLES] * 2
    assert variant() == "prefill 64x32, not tuned yet"


def test_results_are_those_of_any_config(machine: Machine) -> None:
    """The results are those of the call that tunes and of the next one; both add gradients of
    captured tensors."""
    machine.computes = True
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, 1, 80, 16, generator=generator).requires_grad_() for _ in range(3)
    )
    bias = torch.randn(80, generator=generator).requires_grad_()
    dout = torch.randn(1, 1, 80, 16, generator=generator)
    inputs = (query, key, value, bias)

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[k]

    scores = query.double() @ key.double().mT / 4 + bias.double()
    right = scores.softmax(-1) @ value.double()
    expected = torch.autograd.grad(right, inputs, dout.double())
    # These options leave tuning keys of a tile, three configs of forward and of keys, two of
    # queries.
    held = options(
        block_m=64, num_warps=4, num_stages=1, dkv_block_m=64, dq_block_m=64,
        backward_num_warps=4, backward_num_stages=1,
    )  # fmt: skip
    for timed in (8, 0):
        machine.timed.clear()
        out = anyflex.flex_attention(query, key, value, biased, **held)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        found = torch.autograd.grad(out, inputs, dout)
        assert len(machine.timed) == timed
        assert torch.allclose(out.double(), right, atol=1e-5)
        for gradient, exact in zip(found, expected, strict=True):
            assert torch.allclose(gradient.double(), exact.double(), atol=1e-4)


@pytest.mark.parametrize(("learned", "kernel"), [(0, "queries"), (1, "keys")])
def test_rows_values_are_there_before_backward_is_timed(
    machine: Machine, learned: int, kernel: KernelName
) -> None:
    """With arbitrary row values a kernel may take the slow path for non-finite results."""
    tensors = [torch.zeros(1, 1, 200, 16) for _ in range(3)]
    tensors[learned].requires_grad_()
    out = anyflex.flex_attention(*tensors, **options())  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    machine.run.clear()
    machine.timed.clear()
    torch.autograd.grad(out, tensors[learned], torch.ones_like(out))
    values: Tile = (32, None)
    assert machine.run[:2] == [values, machine.timed[0]]
    assert len(machine.timed) == tried(kernel)
    # The call's own launch follows.
    assert machine.run[1 + len(machine.timed)] == values and machine.run.count(values) == 2


def test_keys_are_launched_before_queries_are_timed(machine: Machine) -> None:
    """On some GPUs the launch of queries may begin before the one before it ends, which must be
    that of keys, because that one waits for row values."""
    tensors = [torch.zeros(1, 1, 200, 16, requires_grad=True) for _ in range(3)]
    out = anyflex.flex_attention(*tensors, **options())  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    machine.run.clear()
    machine.timed.clear()
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    keys, queries = tried("keys"), tried("queries")
    assert len(machine.timed) == keys + queries
    # Row values come first, then keys are timed, then both run again before queries are timed.
    values: Tile = (32, None)
    assert machine.run[0] == machine.run[1 + keys] == values
    assert machine.run[2 + keys] in machine.timed[:keys]
    assert machine.run[3 + keys : 3 + keys + queries] == machine.timed[keys:]


class Pretended:
    """Program of a GPU that isn't there."""

    def __init__(self, together: threading.Barrier, error: Exception | None) -> None:
        self.together, self.error = together, error
        self.launches = 0
        self.gives_up_stages = False

    def compile(self, device: int | None = None) -> None:
        self.together.wait(timeout=20)
        if self.error is not None:
            raise self.error

    def launcher(self, *given: object) -> None:
        """Leave the launch to `launch`."""

    def launch(self, grid: int, device: torch.device, values: Mapping[str, object]) -> None:
        assert self.error is None
        self.launches += 1


@pytest.mark.parametrize(
    ("error", "skipped"),
    [(TritonError("ptxas"), True), (RuntimeError("passes"), True), (KeyError("a bug"), False)],
)
def test_on_a_gpu_configs_are_compiled_side_by_side_and_those_that_fail_skipped(
    monkeypatch: pytest.MonkeyPatch, error: Exception, skipped: bool
) -> None:
    module = SimpleNamespace(
        device=lambda _: contextlib.nullcontext(),
        get_device_name=lambda _: "GPU (1)",
        is_current_stream_capturing=lambda: False,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    device = torch.device("cuda", 1)
    configs = [config_for("ampere", "forward", Traits(16, 4))]
    configs += around("forward", configs[0])[:3]
    together = threading.Barrier(len(configs))
    programs = {c: Pretended(together, error if c is configs[1] else None) for c in configs}
    # With fewer stages a config can equal another one; the first has to be compilable.
    for config in (configs[0], configs[3]):
        programs[config].gives_up_stages = True
    sums = torch.full((3,), 7.0)

    def launch_with(config: Config) -> launch.Launch:
        return launch.FixedLaunch(cast(Program, programs[config]), 1, {}).launch({}, (sums,))

    def clock(timed: Callable[[], None]) -> float:
        timed()
        return 1.0 if programs[configs[2]].launches else 2.0

    query = SimpleNamespace(device=device, shape=(1, 2, 100, 16))
    call = cast(Call, SimpleNamespace(query=query, key=query))
    kept = Kept()
    tuner = tuning.Tuner(kept, "cuda.mine", clock)
    if not skipped:
        with pytest.raises(type(error)):
            tuner.find("forward", call, configs, launch_with, ())
        return
    assert tuner.find("forward", call, configs, launch_with, ()) is configs[2]
    assert [program.launches for program in programs.values()] == [1, 0, 1, 0]
    # The accumulators are zeros again.
    assert torch.equal(sums, torch.zeros(3))
    (record,) = kept.stored.values()
    failed = {
        str(configs[1]): f"{type(error).__name__}: {error}",
        str(configs[3]): "TritonError: its stages don't fit the device",
    }
    assert json.loads(record)["failed"] == failed


def test_a_device_is_timed_by_tritons_own_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.testing

    called = inspect.signature(triton.testing.do_bench)

    def bench(*arguments: object, **more: object) -> float:
        bound = called.bind(*arguments, **more).arguments
        assert bound["return_mode"] == "median"
        bound["fn"]()
        return 0.5

    ran: list[int] = []
    monkeypatch.setattr(triton.testing, "do_bench", bench)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert TritonBackend("cuda.mine", "cuda").milliseconds(lambda: ran.append(1)) == 0.5
    assert ran == [1]


@pytest.mark.parametrize("kernel", get_args(KernelName))
@pytest.mark.parametrize("target", get_args(Target))
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_what_is_tried_is_near_and_allowed(
    kernel: KernelName, target: Target, itemsize: int, width: int
) -> None:
    first = config_for(target, kernel, Traits(width, itemsize))
    found = around(kernel, first)
    assert 3 <= len(found) == len(set(map(str, found))) <= 14 and first not in found
    assert not first.parts or replace(first, parts=False) in found
    limit = dict(first.options.more).get("maxnreg")
    others = tuple(option for option in first.options.more if option[0] != "maxnreg")
    unlimited = replace(first, options=replace(first.options, more=others))
    assert limit is None or unlimited in found
    for config in found:
        assert config.block_m in TILES and config.block_n in TILES
        assert config.options.num_warps in WARPS and config.options.num_stages in STAGES
        moved = replace(config, options=first.options, overlap=first.overlap, parts=first.parts)
        more_warps = config.options.num_warps > first.options.num_warps
        other_tile = moved != first or config.options.num_warps != first.options.num_warps
        drops = more_warps or (limit != 255 and other_tile)
        if config != unlimited:
            assert config.options.more == (others if drops else first.options.more)
        assert first.overlap or not config.overlap
        assert first.parts or not config.parts
        if kernel == "decode":
            assert config.block_m == first.block_m


INSTALLED = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
import anyflex
from anyflex.testing import posing
from anyflex_triton.backend import TritonBackend

class Timed(TritonBackend):
    timed = 0

    def target(self):
        return "ampere"

    def milliseconds(self, launch):
        Timed.timed += 1
        return 1.0 if Timed.timed == 2 else 2.0

def main():
    tensors = [torch.zeros(1, 1, 1, 16)] * 3
    options = {"autotune": True, "num_warps": 4}
    with posing("cuda"):
        arguments = dict(kernel_options={"cuda.timed": options}, backend="cuda.timed")
        anyflex.flex_attention(*tensors, **arguments)
        print(Timed.timed, anyflex.explain(*tensors, **arguments).variant)
"""


def test_it_is_kept_on_disk_until_it_is_cleared_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, cache = tmp_path / "site", tmp_path / "cache"
    metadata = site / "timed-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: timed\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[anyflex.backends.v1]\ncuda.timed = timed:Timed\n")
    (site / "timed.py").write_text(INSTALLED)
    environment = {n: v for n, v in os.environ.items() if not n.startswith("ANYFLEX_")}
    environment |= {
        "ANYFLEX_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    call = ("-c", "import timed; timed.main()")
    number, _, state = run(*call).partition(" ")
    assert int(number) > 2 and state == "decode splits=1, tuned\n"
    assert run(*call) == "0 decode splits=1, tuned\n"
    (file,) = cache.rglob("tuned-decode-1-1-1-cpu.json")
    # Two lines of core's precede a readable record.
    record = json.loads(file.read_text().split("\n", 2)[2])
    assert record["of"] == "decode of up to 1 heads, 1 rows and 1 keys on cpu"
    assert record["chosen"] == next(iter(record["milliseconds"]))
    file.write_text(file.read_text()[:-9])
    assert run(*call).startswith(number)
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(cache))
    monkeypatch.setattr(sys, "argv", ["anyflex", "cache", "clear"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("anyflex", run_name="__main__")
    assert not list(cache.rglob("tuned-*"))
