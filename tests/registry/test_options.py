"""kernel_options: torch's keys, a backend's own, and everything that is neither."""

from __future__ import annotations

import pytest
import torch

from anyflex.contract.option import Option
from anyflex.errors import ArgumentError, ArgumentTypeError, PerformanceWarning
from anyflex.registry import backend_table, register
from anyflex.registry.backend_choice import explain_selection
from anyflex.registry.freeze_options import freeze_options
from anyflex.runtime.compiled_kernel import CompiledKernel
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.stubs import make_spec, make_stub

__all__: list[str] = []

OPTIONS = {
    "tile": Option(int, 64, "rows of a tile", (16, 32, 64), torch_key="BLOCK_M"),
    "fast": Option(bool, False, "skip a check"),
    "ratio": Option(float, 1.0, "share of the threads"),
    "mode": Option(str, "auto", "which variant", ("auto", "split")),
}


@pytest.fixture(autouse=True)
def backends() -> None:
    register("cpu", make_stub(options=OPTIONS))
    register(
        "cuda", make_stub(options={"pipeline": Option(int, 2, "stages"), "tile": OPTIONS["tile"]})
    )


def ask(options: object, device: str = "cpu") -> CompiledKernel:
    return kernel_for(make_spec(device), (), None, freeze_options(options))


def test_own_options_reach_the_spec_by_name() -> None:
    given = {"cpu": {"tile": 32, "fast": True, "ratio": 1, "mode": "split"}}
    assert ask(given).spec.options == (
        ("fast", True),
        ("mode", "split"),
        ("ratio", 1.0),
        ("tile", 32),
    )
    assert ask({}).spec.options == ask(None).spec.options == ()


def test_other_options_make_another_kernel() -> None:
    assert ask({"cpu": {"tile": 32}}).kernel is not ask({"cpu": {"tile": 16}}).kernel
    assert ask({"cpu": {"tile": 32}}).kernel is ask({"BLOCK_M": 32}).kernel


@pytest.mark.parametrize("key", ["BLOCK_M", "fwd_BLOCK_M"])
def test_a_key_of_torch_is_used_where_the_backend_names_it(key: str) -> None:
    assert ask({key: 32}).spec.options == (("tile", 32),)


def test_a_tuning_key_without_meaning_warns_once_and_is_listed_as_unused() -> None:
    with pytest.warns(
        PerformanceWarning,
        match=r"kernel_options\['num_warps'\] has no meaning for "
        "backend cpu and is ignored",
    ) as caught:
        ask({"num_warps": 4})
        kernel_for(make_spec(head_dim=8), (), None, (("num_warps", 4),))
    assert len(caught) == 1
    options = freeze_options({"num_warps": 4, "BLOCK_M": 64, "cuda": {"pipeline": 3}})
    selection = explain_selection(make_spec(), (), None, options)
    assert selection.unused_options == ("cuda.pipeline", "num_warps")
    assert selection.spec.options == (("tile", 64),)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("BACKEND", "TRITON"),
        ("BACKEND", "TRITON_DECODE"),
        ("BACKEND", "FLASH"),
        ("SPLIT_KV", 4),
        ("PARTITION_SIZE", 128),
        ("fwd_num_consumer_groups", 0),
        ("num_buffers_warp_spec", 3),
    ],
)
def test_keys_of_torchs_kernels_are_tuning_keys(key: str, value: object) -> None:
    options = freeze_options({key: value})
    with pytest.warns(PerformanceWarning, match=f"'{key}'.* ignored: it tunes torch's kernels"):
        assert ask({key: value}).spec.options == ()
    assert explain_selection(make_spec(), (), None, options).unused_options == (key,)


def test_options_of_another_backend_are_no_error() -> None:
    given = {"cuda": {"pipeline": 3}, "cpu": {"tile": 16}, "mps": {"anything": 1}}
    assert ask(given).spec.options == (("tile", 16),)
    assert ask(given, "cuda").spec.options == (("pipeline", 3),)


@pytest.mark.parametrize("key", ["ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS"])
@pytest.mark.parametrize("value", [True, False])
def test_promises_are_honoured_silently(key: str, value: bool) -> None:
    assert ask({key: value}).spec.options == ()


def test_automatic_choice_and_no_skipping_are_honoured() -> None:
    given = {"BACKEND": "AUTO", "SKIP_MASK_SCORE": False}
    assert ask(given).backend.name == "cpu"
    assert explain_selection(make_spec(), (), None, freeze_options(given)).unused_options == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"BLOK_M": 64}, ArgumentError, r"'BLOK_M'.*nearest is 'BLOCK_M', one of torch's keys"),
        ({"block_m": 64}, ArgumentError, "nearest is 'BLOCK_M'"),
        ({"modes": "auto"}, ArgumentError, "nearest is 'mode', an own option of backend cpu"),
        ({"cudaa": {"x": 1}}, ArgumentError, "nearest is 'cuda', a backend's name"),
        ({"zzzzzzzz": 1}, ArgumentError, "there are torch's keys"),
        ([("BLOCK_M", 64)], ArgumentTypeError, "must be a dict or None, got list"),
        ({3: 4}, ArgumentTypeError, "each key must be a str, got 3"),
        ({"BLOCK_M": [64]}, ArgumentTypeError, "must be an int, float, bool or str, .* got list"),
        (
            {"cpu": {"tile": [6]}},
            ArgumentTypeError,
            "must be an int, float, bool or str, got list",
        ),
        (
            {"cpu": torch.ones(2)},
            ArgumentTypeError,
            r"kernel_options\['cpu'\] must be .*under a backend's name a dict .* got Tensor",
        ),
        ({"a=b": 1}, ArgumentError, "there is no option 'a=b'"),
        ({"cpu": {"ratio": float("nan")}}, ArgumentError, "must be finite, got nan"),
        ({"BLOCK_M": -1}, ArgumentError, "'BLOCK_M'.*power of two from 16 to 1024; got -1"),
        ({"BLOCK_M": 0}, ArgumentError, "power of two from 16 to 1024; got 0"),
        ({"BLOCK_M": 48}, ArgumentError, "power of two from 16 to 1024; got 48"),
        ({"BLOCK_M": "64"}, ArgumentTypeError, r"power of two.*got '64' \(str\)"),
        ({"BLOCK_M": True}, ArgumentTypeError, r"power of two.*got True \(bool\)"),
        (
            {"BLOCK_M": 128},
            ArgumentError,
            "must be one out of 16, 32, 64 for backend cpu; got 128",
        ),
        ({"num_stages": 0}, ArgumentError, "'num_stages'.*at least 1; got 0"),
        ({"USE_TMA": 1}, ArgumentTypeError, r"True or False; got 1 \(int\)"),
        ({"num_warps": {}}, ArgumentTypeError, "'num_warps'.*got a dict"),
        (
            {"pipeline": 3},
            ArgumentError,
            r"'pipeline'.*own option of backend cuda; write "
            r"kernel_options=\{'cuda': \{'pipeline': ...\}\}",
        ),
        ({"tile": 3}, ArgumentError, "own option of backend cpu and cuda"),
        ({"cpu": 3}, ArgumentTypeError, r"kernel_options\['cpu'\] must be a dict"),
        ({"cpu": {"tiles": 3}}, ArgumentError, r"\['cpu'\]\['tiles'\].*nearest is 'tile'"),
        ({"cpu": {"BLOCK_M": 64}}, ArgumentError, "one of torch's keys; write it at the top"),
        ({"reference": {"x": 1}}, ArgumentError, "backend reference has no options of its own"),
        ({"cpu": {"tile": 48}}, ArgumentError, "one out of 16, 32, 64"),
        ({"cpu": {"tile": "a"}}, ArgumentTypeError, r"of type int.*got 'a' \(str\)"),
        ({"cpu": {"tile": True}}, ArgumentTypeError, r"of type int.*got True \(bool\)"),
        ({"cpu": {"fast": 1}}, ArgumentTypeError, r"of type bool.*got 1 \(int\)"),
        ({"cpu": {"tile": 32}, "BLOCK_M": 64}, ArgumentError, "same option 'tile'.*keep one"),
        ({"BACKEND": "X"}, ArgumentError, "'BACKEND'.*use the argument backend=.*got 'X'"),
        (
            {"BACKEND": "flash"},
            ArgumentError,
            "TRITON_DECODE or FLASH.* use the argument backend=",
        ),
        ({"SPLIT_KV": 0}, ArgumentError, "'SPLIT_KV'.*at least 1; got 0"),
        ({"SKIP_MASK_SCORE": True}, ArgumentError, "anyflex never leaves out the mods"),
        ({"ROWS_GUARANTEED_SAFE": "yes"}, ArgumentTypeError, "True or False; got 'yes'"),
    ],
)
def test_what_is_wrong_is_named_with_its_cure(
    options: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(options)


def test_a_key_that_only_another_backend_knows_names_its_owner() -> None:
    register("cpu.other", make_stub(priority=-1, options={"depth": Option(int, 1, "levels")}))
    explain_selection(make_spec(), (), None, ())
    with pytest.raises(
        ArgumentError,
        match=r"\['cpu'\]\['depth'\]: it is an option of backend "
        "cpu.other",
    ):
        ask({"cpu": {"depth": 3}})


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert ask({"cpu": {"tile": 32}, "BLOCK_M": 32}).spec.options == (("tile", 32),)


def test_options_of_a_loaded_backend_that_does_not_compute_are_checked() -> None:
    ask({}, "cuda")
    with pytest.raises(ArgumentError, match=r"kernel_options\['cuda'\]\['pipelin'\].*'pipeline'"):
        ask({"cuda": {"pipelin": 3}})
    with pytest.raises(ArgumentTypeError, match=r"kernel_options\['cuda'\]\['pipeline'\]"):
        ask({"cuda": {"pipeline": "three"}})
    assert ask({"cuda": {"pipeline": 3}}).backend.name == "cpu"


def test_no_backend_is_loaded_to_check_its_options() -> None:
    ask({"cuda": {"pipelin": 3}})
    entry = backend_table.current().get("cuda")
    assert entry is not None and not entry.loaded
