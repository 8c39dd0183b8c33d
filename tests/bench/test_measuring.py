"""Rounds, clocks, small calls and presets."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.bench.case import BenchCase, Inputs, make_inputs
from anyflex.bench.check import Formula, errors_of
from anyflex.bench.clock import GraphClock, Timed, WallClock
from anyflex.bench.contenders import Contender
from anyflex.bench.measure import measure_case
from anyflex.bench.peers import peers
from anyflex.bench.presets import PRESETS
from tests.soak import SOAK

CPU = torch.device("cpu")
CASE = BenchCase("small", (1, 2, 40, 8), (1, 2, 40, 8), "float32", ("causal",))


def recording(name: str, calls: list[str]) -> Contender:
    """A contender that is right, and notes that it was called."""

    def prepare(inputs: Inputs):  # type: ignore[no-untyped-def]
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            calls.append(name)
            out: Tensor = anyflex.flex_attention(
                query, key, value, inputs.score_mod, inputs.block_mask, backend="reference"
            )
            return out

        return attend

    return Contender(name, "backend", "tests 1", lambda case: None, prepare)


def test_values_may_have_another_head_dim() -> None:
    case = dataclasses.replace(
        CASE, q_shape=(1, 4, 40, 8), value_head_dim=24, masks=(), directions=("backward",)
    )
    inputs = make_inputs(case, CPU)
    assert inputs.key.shape == (1, 2, 40, 8) and inputs.value.shape == (1, 2, 40, 24)
    assert inputs.dout.shape == case.out_shape == (1, 4, 40, 24)
    assert case.kv_bytes() == 4 * 2 * 40 * (8 + 24)
    # One multiplication and one addition per pair and column.
    pairs = 2.0 * 4 * 40 * 40
    assert case.flops("forward", 1.0) == pairs * (8 + 24)
    assert case.flops("backward", 1.0) == pairs * (3 * 8 + 2 * 24)
    assert case.flops("both", 0.5) == pairs * (4 * 8 + 3 * 24) / 2
    assert case.small().v_shape[3] == 24


def test_heads_may_lie_last_in_memory() -> None:
    dense = make_inputs(dataclasses.replace(CASE, directions=("backward",)), CPU)
    inputs = make_inputs(dataclasses.replace(dense.case, layout="heads_last"), CPU)
    for name in ("query", "key", "value", "dout"):
        tensor, wanted = getattr(inputs, name), getattr(dense, name)
        assert torch.equal(tensor, wanted) and tensor.requires_grad == wanted.requires_grad
        assert tensor.transpose(1, 2).is_contiguous() and not tensor.is_contiguous()
    assert inputs.query.is_leaf and inputs.case.small().layout == "heads_last"


def test_everybody_takes_a_turn_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyflex.bench.measure._CALLS", 1)
    runs = []
    for _ in range(2):
        calls: list[str] = []
        racers = [recording(name, calls) for name in "abc"]
        measured = list(measure_case(CASE, racers, CPU, WallClock(CPU), 7, lambda text: None))
        assert [each.contender for each in measured] == ["a", "b", "c"]
        # First call, check, warm-up: before the rounds, and one contender after the other.
        assert calls[:-21] == sorted(calls[:-21])
        runs.append([calls[place : place + 3] for place in range(len(calls) - 21, len(calls), 3)])
    # Another order in each round, and the same order when it is run again.
    assert all(sorted(each) == ["a", "b", "c"] for each in runs[0])
    assert len({tuple(each) for each in runs[0]}) > 2 and runs[0] == runs[1]
    # No contender always follows the same other one.
    assert len({tuple(each[:2]) for each in runs[0]}) > 2


def test_the_first_call_is_the_measured_one_and_not_the_check_s() -> None:
    lengths: list[int] = []
    case = dataclasses.replace(CASE, q_shape=(1, 2, 400, 8), kv_shape=(1, 2, 400, 8))

    def prepare(inputs: Inputs):  # type: ignore[no-untyped-def]
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            lengths.append(query.shape[2])
            out: Tensor = anyflex.flex_attention(query, key, value, None, inputs.block_mask)
            return out

        return attend

    contender = Contender("a", "backend", "tests 1", lambda case: None, prepare)
    (measured,) = measure_case(case, [contender], CPU, WallClock(CPU), 1, lambda text: None)
    assert measured.status == "measured"
    assert lengths[:2] == [400, 272] and set(lengths[2:]) == {400}


def test_the_clock_is_read_around_all_calls() -> None:
    calls: list[int] = []
    assert WallClock(CPU).seconds(Timed(lambda _: calls.append(1)), 5) > 0
    assert WallClock(CPU).once(Timed(calls.append, before=lambda: 2)) > 0
    assert WallClock(CPU).seconds(Timed(calls.append, before=lambda: 3), 2) > 0
    assert calls == [1] * 5 + [2] + [3] * 2


class Readying(WallClock):
    """A clock that times another object, as one that captures does."""

    def __init__(self, fails: bool) -> None:
        super().__init__(CPU)
        self.fails = fails
        self.replayed = 0

    def readied(self, timed: Timed) -> Timed:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

        def replay(_: object) -> None:
            self.replayed += 1

        return Timed(replay)


def test_a_clock_may_time_something_made_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyflex.bench.measure._CALLS", 2)
    calls: list[str] = []
    clock = Readying(fails=False)
    racers = [recording("a", calls)]
    (measured,) = measure_case(CASE, racers, CPU, clock, 5, lambda text: None)
    # First call and check; then replays alone, three of them to warm up.
    assert measured.status == "measured" and len(calls) == 2 and clock.replayed == 3 + 5 * 2


def test_a_call_that_cannot_be_captured_failed_and_others_go_on() -> None:
    racers = [recording("a", [])]
    (row,) = measure_case(CASE, racers, CPU, Readying(fails=True), 1, lambda text: None)
    assert row.status == "failed" and row.samples_ms == []
    assert row.detail == "RuntimeError: operation not permitted when stream is capturing"


def test_no_graph_is_made_of_a_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASE, directions=("backward",))
    clock = WallClock(CPU)
    monkeypatch.setattr(clock, "refusal", GraphClock.refusal.__get__(clock))
    (row,) = measure_case(case, [recording("a", [])], CPU, clock, 1, lambda text: None)
    assert row.status == "refused" and row.detail == "no CUDA graph of a backward alone"


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_one_wrong_element_is_found(name: str) -> None:
    case = dataclasses.replace(CASE, directions=("backward",), mods=("alibi",))
    formula = Formula(case.small(), CPU)
    right = recording("right", [])
    assert errors_of(right, formula).largest < 1e-5

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):  # type: ignore[no-untyped-def]
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            gradient = gradient.clone()
            gradient[0, 1, 7, 3] += 1
            return gradient

    def prepare(inputs: Inputs):  # type: ignore[no-untyped-def]
        attend = right.prepare(inputs)

        def wrong(*tensors: Tensor) -> Tensor:
            through = [
                Spoil.apply(each) if name == f"d{letter}" else each
                for letter, each in zip("qkv", tensors, strict=True)
            ]
            out = attend(*through)
            if name == "out":
                out = out + torch.zeros_like(out).index_put(
                    tuple(torch.tensor([i]) for i in (0, 1, 7, 3)), torch.ones(1)
                )
            return out

        return wrong

    found = errors_of(dataclasses.replace(right, prepare=prepare), formula)
    assert (found.worst, found.largest > 1e-2) == (name, True)
    # One element of many.
    assert 1e-3 < found.rms < found.largest * 2


def test_a_learned_table_s_gradient_is_checked_and_timed() -> None:
    case = dataclasses.replace(CASE, directions=("backward",), mods=("random_t5:8",))
    formula = Formula(case.small(), CPU)
    assert list(formula.wanted) == ["out", "dq", "dk", "dv", "d(learned 0)"]
    asked: list[int] = []
    right = recording("right", [])
    assert errors_of(right, formula).largest < 1e-5
    formula.wanted["d(learned 0)"] = formula.wanted["d(learned 0)"] * 1.5
    assert errors_of(right, formula).worst == "d(learned 0)"

    def prepare(inputs: Inputs):  # type: ignore[no-untyped-def]
        (table,) = inputs.learned
        table.register_hook(lambda gradient: asked.append(1))
        return right.prepare(inputs)

    watched = dataclasses.replace(right, prepare=prepare)
    (row,) = measure_case(case, [watched], CPU, WallClock(CPU), 1, lambda text: None)
    assert row.status == "measured" and len(asked) > 2


def test_the_share_of_a_mask_is_that_of_all_heads() -> None:
    case = dataclasses.replace(CASE, masks=("causal_window:[1,4]",))
    inputs = make_inputs(case, CPU)
    assert inputs.block_mask is not None and inputs.block_mask.shape[:2] == (1, 2)
    assert inputs.share == pytest.approx((40 + 4 * 40 - 6) / 2 / 1600)


def test_a_result_that_is_not_finite_is_the_worst() -> None:
    right = recording("right", [])

    def prepare(inputs: Inputs):  # type: ignore[no-untyped-def]
        attend = right.prepare(inputs)
        return lambda *tensors: attend(*tensors) * torch.nan

    found = errors_of(dataclasses.replace(right, prepare=prepare), Formula(CASE.small(), CPU))
    assert found.largest != found.largest and found.rms != found.rms


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_cases_that_can_be_made(name: str) -> None:
    names = [case.name for case in PRESETS[name]]
    assert len(set(names)) == len(names)
    for case in PRESETS[name]:
        small = case.small()
        assert small.q_shape[1] // small.kv_shape[1] == case.q_shape[1] // case.kv_shape[1]
        assert small.q_shape[3] == case.q_shape[3]
    for case in PRESETS[name][:: 1 if SOAK else 3]:
        inputs = make_inputs(case.small(), CPU)
        assert inputs.query.dtype is case.torch_dtype
        assert 0 < inputs.share <= 1


def test_the_h200_preset_has_the_rows_that_kernels_are_held_to() -> None:
    names = " ".join(case.name for case in PRESETS["h200"])
    for part in ("full", "causal", "alibi", "softcap", "window", "documents", "prefix", "GQA"):
        assert part in names
    assert len(PRESETS["h200"]) == len({case.name for case in PRESETS["h200"]}) == 22
    names_of_parts = ("h200-plain", "h200-mods", "h200-decode", "h200-small")
    parts = [case for name in names_of_parts for case in PRESETS[name]]
    assert tuple(parts) == PRESETS["h200"]


def test_the_checked_call_of_a_ragged_one_is_ragged_alike() -> None:
    for length, wanted in ((384, 384), (300, 300), (385, 257), (3000, 312), (4096, 384)):
        case = dataclasses.replace(CASE, q_shape=(1, 2, length, 8), kv_shape=(1, 2, length, 8))
        assert case.small().q_shape[2] == case.small().kv_shape[2] == wanted


def test_documents_are_packed_the_same_way_each_time() -> None:
    case = dataclasses.replace(CASE, masks=("random_documents:5,9", "causal"))
    first, second = (make_inputs(case, CPU) for _ in range(2))
    assert first.share == second.share < 0.5
    assert torch.equal(first.query, second.query)


def test_peers_refuse_what_they_can_not_do() -> None:
    sdpa, flex = peers(CPU)
    window = dataclasses.replace(CASE, masks=("causal_window:8",))
    decode = dataclasses.replace(CASE, q_shape=(1, 2, 1, 8))
    assert sdpa.refusal(CASE) is None
    assert "no mask functions but causal" in str(sdpa.refusal(window))
    assert "causal of other lengths" in str(sdpa.refusal(decode))
    assert flex.refusal(window) is None
    learning = dataclasses.replace(CASE, directions=("both",))
    assert "no backward on the CPU" in str(flex.refusal(learning))
    names = [peer.name for peer in peers(torch.device("cuda"))]
    assert names[:4] == [
        "torch.sdpa.cudnn",
        "torch.sdpa.flash",
        "torch.sdpa.efficient",
        "torch.flex",
    ]
