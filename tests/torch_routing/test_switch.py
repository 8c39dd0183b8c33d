"""Switching the re-routing on and off."""

from __future__ import annotations

import inspect
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import anyflex
from anyflex.plugin import Backend, register, unrouted_flex_attention
from anyflex.reference.backend import ReferenceBackend
from anyflex.registry import isolated
from anyflex.torch_routing import originals
from anyflex.torch_routing.rerouting import rerouted_devices
from tests.soak import SOAK
from tests.torch_routing.attention import rerouted

__all__: list[str] = []

REFUSED = "does not support backward on CPU"
FUNCTIONS = (flex_attention, create_block_mask)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Hold each test to leave torch as it was."""
    before = [state(function) for function in FUNCTIONS]
    torch._dynamo.reset()
    yield
    anyflex.restore_torch()
    assert [state(function) for function in FUNCTIONS] == before


def state(function: Any) -> tuple[Any, ...]:
    """Everything that makes a function, by identity."""
    return (
        id(function),
        id(function.__code__),
        id(function.__globals__),
        id(function.__defaults__),
        id(function.__kwdefaults__),
        dict(vars(function)),
    )


def leaf() -> Tensor:
    return torch.randn(1, 2, 32, 16, requires_grad=True)


def attend(query: torch.Tensor, call: Callable[..., Any]) -> torch.Tensor | None:
    """Return a call's result for inputs that require gradients, or None if torch refuses them."""
    try:
        return call(query, query, query)
    # Dynamo wraps torch's error where it compiles.
    except (NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
        assert REFUSED in str(error)
        return None


def trains(call: Callable[..., Any] = flex_attention) -> bool:
    """Whether a call on the CPU has gradients, which torch's own refuses."""
    query = leaf()
    out = attend(query, call)
    if out is None:
        return False
    out.sum().backward()
    return query.grad is not None


def test_functions_that_were_imported_before_are_rerouted_and_restored() -> None:
    assert not trains()
    assert anyflex.reroute_torch(["cpu"]) == ("cpu",)
    assert rerouted_devices() == ("cpu",)
    assert trains()
    assert flex_attention is torch_flex.flex_attention
    anyflex.restore_torch()
    assert rerouted_devices() == ()
    assert not trains()


def test_a_second_call_names_all_devices_anew() -> None:
    anyflex.reroute_torch(["cpu", "xpu"])
    assert anyflex.reroute_torch(["cpu", "xpu"]) == ("cpu", "xpu")
    assert trains()
    assert anyflex.reroute_torch("xpu") == ("xpu",)
    assert not trains()
    assert anyflex.reroute_torch(["cpu"]) == ("cpu",)
    assert trains()


def test_restoring_twice_or_without_rerouting_does_nothing() -> None:
    anyflex.restore_torch()
    anyflex.reroute_torch(["cpu"])
    anyflex.restore_torch()
    anyflex.restore_torch()
    assert not trains()


@pytest.mark.parametrize("backend", ["aot_eager", *(["eager"] if SOAK else [])])
def test_compiled_functions_follow_every_switch(backend: str) -> None:
    def inlined(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value) * 1.0

    class Model(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch_flex.flex_attention(query, key, value)

    calls = [
        torch.compile(call, backend=backend, fullgraph=True)
        for call in (flex_attention, inlined, Model())
    ]
    for call in calls:
        assert not trains(call)
    for _ in range(2):
        anyflex.reroute_torch(["cpu"])
        assert all(trains(call) for call in calls)
        anyflex.reroute_torch(["xpu"])
        assert not any(trains(call) for call in calls)
        anyflex.restore_torch()
        assert not any(trains(call) for call in calls)


def test_graphs_hold_the_operation_of_who_computes() -> None:
    operations: list[set[str]] = []

    def looking(graph: torch.fx.GraphModule, examples: Any) -> Any:
        operations.append({str(node.target) for node in graph.graph.nodes})
        return graph

    compiled = torch.compile(flex_attention, backend=looking, fullgraph=True)
    query = leaf().detach()
    own = compiled(query, query, query)
    with rerouted():
        routed = compiled(query, query, query)
    assert "flex_attention" in operations[0]
    assert "anyflex.flex_attention.default" in operations[1]
    assert torch.equal(compiled(query, query, query), own)
    assert len(operations) == 2
    torch.testing.assert_close(routed, own)


def test_export_records_anyflex_s_operation() -> None:
    class Model(torch.nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return flex_attention(query, query, query)

    query = leaf().detach()
    with rerouted():
        program = torch.export.export(Model(), (query,), strict=True)
        wanted = flex_attention(query, query, query)
    targets = [str(node.target) for node in program.graph.nodes]
    assert "anyflex.flex_attention.default" in targets
    torch.testing.assert_close(program.module()(query), wanted)


def test_masks_are_torch_s_with_the_same_lists() -> None:
    documents = torch.arange(300) // 70

    def per_head(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q - k < 40 + 100 * h + b)

    arguments = {"B": 2, "H": 3, "Q_LEN": 300, "KV_LEN": 300, "device": "cpu", "BLOCK_SIZE": 32}
    wanted = create_block_mask(per_head, **arguments)
    with rerouted():
        mask = create_block_mask(per_head, **arguments)
    assert type(mask) is torch_flex.BlockMask
    assert mask.mask_mod is per_head
    assert mask.shape == wanted.shape
    assert torch.equal(mask.to_dense(), wanted.to_dense())
    for counts, indices in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ):
        live = getattr(wanted, counts)
        assert torch.equal(getattr(mask, counts), live)
        # Entries past the count are undefined.
        valid = torch.arange(getattr(wanted, indices).shape[-1]) < live[..., None]
        assert torch.equal(getattr(mask, indices)[valid], getattr(wanted, indices)[valid])


def test_whole_blocks_are_listed_as_partial_where_that_is_asked_for() -> None:
    if "separate_full_blocks" not in inspect.signature(create_block_mask).parameters:
        pytest.skip(f"torch {torch.__version__} can't be asked for it")
    with rerouted():
        mask = create_block_mask(
            causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16, separate_full_blocks=False
        )
    assert mask.kv_num_blocks.tolist() == [[[1, 2, 3, 4]]]


def test_a_long_mask_needs_no_dense_one() -> None:
    with rerouted():
        mask = create_block_mask(causal, None, None, 2**17, 2**17, device="cpu")
    assert mask.shape == (1, 1, 2**17, 2**17)
    assert int(mask.full_kv_num_blocks.sum()) == 1024 * 1023 // 2


def test_torch_makes_masks_inside_of_graphs_and_for_other_devices() -> None:
    def build() -> Tensor:
        mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        return mask.kv_num_blocks + mask.full_kv_num_blocks

    with rerouted():
        inside = torch.compile(build, backend="eager", fullgraph=True)()
        meta = create_block_mask(causal, None, None, 64, 64, device="meta")
    assert torch.equal(inside, build())
    assert meta.kv_num_blocks.is_meta


@pytest.mark.parametrize(
    ("devices", "error", "match"),
    [
        (["npux"], anyflex.ArgumentError, "torch knows no device type 'npux'"),
        (["cuda:0"], anyflex.ArgumentError, "'cuda:0' can't be re-routed .* say 'cuda'"),
        ("meta", anyflex.ArgumentError, "holds no numbers"),
        ([], anyflex.ArgumentError, "devices is empty"),
        ([torch.device("cpu")], anyflex.ArgumentTypeError, "must be a str"),
        (3, anyflex.ArgumentTypeError, "must be device types.* got int"),
    ],
)
def test_wrong_devices_are_refused_and_change_nothing(
    devices: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        anyflex.reroute_torch(devices)
    assert rerouted_devices() == ()
    assert not trains()


class OnPocket(ReferenceBackend):
    """Stand-in for a vendor's backend."""


class ToCompareWith(ReferenceBackend):
    priority = -1


def test_the_default_devices_have_a_backend_that_is_chosen_by_itself() -> None:
    with isolated():
        with pytest.raises(anyflex.BackendRefused, match="no backend but the reference"):
            anyflex.reroute_torch()
        stand_ins: dict[str, type[Backend]] = {"xpu.mine": OnPocket, "cpu.peer": ToCompareWith}
        for name, backend in stand_ins.items():
            register(name, backend)
        assert anyflex.reroute_torch() == ("xpu",)


def test_a_function_that_torch_doesn_t_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(query: Any, key: Any, value: Any, dropout_p: float = 0.0) -> None:
        raise AssertionError("never called")

    code = newer.__code__
    monkeypatch.setitem(originals.FUNCTIONS, "flex_attention", newer)
    with pytest.raises(anyflex.BackendRefused, match=r"can't be re-routed.*dropout_p.*re-route f"):
        anyflex.reroute_torch(["cpu"])
    monkeypatch.setitem(originals.FUNCTIONS, "flex_attention", print)
    with pytest.raises(anyflex.BackendRefused, match="not a plain function"):
        anyflex.reroute_torch(["cpu"])
    assert newer.__code__ is code
    assert rerouted_devices() == ()


def test_the_unrouted_function_stays_torch_s() -> None:
    with rerouted():
        assert trains(flex_attention)
        assert not trains(unrouted_flex_attention())
        compiled = torch.compile(unrouted_flex_attention(), backend="eager", fullgraph=True)
        assert not trains(compiled)
    assert isinstance(unrouted_flex_attention(), types.FunctionType)


def test_threads_may_switch_while_others_call() -> None:
    query = leaf().detach()
    wanted = flex_attention(query, query, query)
    failures: list[BaseException] = []
    stop = threading.Event()

    def calling() -> None:
        try:
            while not stop.is_set():
                torch.testing.assert_close(flex_attention(query, query, query), wanted)
        except BaseException as error:  # noqa: BLE001  # a thread's failure is the test's
            failures.append(error)

    def switching() -> None:
        for _ in range(50):
            anyflex.reroute_torch(["cpu"])
            anyflex.restore_torch()

    with rerouted():  # both sides have run before threads meet
        flex_attention(query, query, query)
    callers = [threading.Thread(target=calling) for _ in range(2)]
    switchers = [threading.Thread(target=switching) for _ in range(2)]
    for thread in (*callers, *switchers):
        thread.start()
    for thread in switchers:
        thread.join()
    stop.set()
    for thread in callers:
        thread.join()
    assert failures == []
    assert rerouted_devices() == ()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_rerouted_and_switches_for_itself() -> None:
    with rerouted():
        child = os.fork()
        if child == 0:
            status = 1
            # Without backward, which torch refuses in a child if a test before used its threads.
            try:
                routed = [attend(leaf(), flex_attention) is not None]
                anyflex.restore_torch()
                routed.append(attend(leaf(), flex_attention) is not None)
                anyflex.reroute_torch(["cpu"])
                routed.append(attend(leaf(), flex_attention) is not None)
                status = 0 if routed == [True, False, True] else 1
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert trains()
