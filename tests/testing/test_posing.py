"""posing: a call on CPU tensors takes the whole way of a call on a device that isn't there."""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

import anyflex
import anyflex.testing
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Kernel
from anyflex.contract.call import Call, Outputs, TensorSpec
from anyflex.contract.decision import Decision, Rejected
from anyflex.contract.spec import Spec
from anyflex.reference.backend import ReferenceBackend
from anyflex.registry import isolated, register
from anyflex.registry.backend_table import Table
from anyflex.runtime.kernel_cache import kernel_for
from anyflex.tensors import stand_in
from anyflex.testing import posing
from anyflex.testing.oracle import dense_attention, dense_mask
from tests.registry.stubs import Stub, make_spec, make_stub

__all__: list[str] = []

DEVICES = ["xpu", "mps", "cuda", "privateuseone", "brandnew"]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    for name in list(os.environ):
        if name.startswith("ANYFLEX_"):
            monkeypatch.delenv(name)
    with isolated() as table:
        yield table


class Chip(ReferenceBackend):
    """Computes by torch operations; notes its questions and inputs. Its device is absent."""

    specs: ClassVar[list[Spec]] = []
    calls: ClassVar[list[tuple[str, set[str]]]] = []

    def probe(self) -> Decision:
        return Rejected("this machine has no such device; buy one")

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        self.specs.append(spec)
        return Noting(super().compile(spec, artifacts))


class Noting(Kernel):
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        return (TensorSpec((3, 5), torch.int32, zeroed=True),)

    def forward(self, call: Call, out: Outputs) -> None:
        self._note("forward", call, out.workspace)
        self.kernel.forward(call, out)

    def backward(self, call: Call, saved: Any, grad: Any, grads: Any) -> None:
        self._note("backward", call, grads.workspace)
        self.kernel.backward(call, saved, grad, grads)

    def _note(self, direction: str, call: Call, workspace: tuple[Tensor, ...]) -> None:
        (scratch,) = workspace
        assert scratch.shape == (3, 5) and not scratch.any()
        tensors = [call.query, call.key, call.value, *call.captured, scratch]
        if call.mask is not None:
            tensors += [call.mask.offsets, call.mask.runs]
        Chip.calls.append((direction, {tensor.device.type for tensor in tensors}))


@pytest.fixture
def chip() -> type[Chip]:
    Chip.specs, Chip.calls = [], []
    return Chip


def some_query(**options: Any) -> Tensor:
    return torch.randn(1, 2, 16, 8, **options)


def attend(
    call: Any = anyflex.flex_attention, device: str | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Out, lse and the gradients of a call with every feature, and their expected values."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 40, 16), (2, 2, 30, 16), (2, 2, 30, 24), (4,)]
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    query, key, value, slopes = leaves

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) | (k < 5)

    structure = anyflex.create_block_mask(mask, None, None, 40, 30, device, BLOCK_SIZE=16)
    out, aux = call(
        query,
        key,
        value,
        score,
        structure,
        enable_gqa=True,
        return_aux=anyflex.AuxRequest(lse=True),
    )
    found = [out, aux.lse, *torch.autograd.grad(out.sum() + aux.lse.sum(), leaves)]
    want = dense_attention(query, key, value, score, dense_mask(mask, 1, 1, 40, 30))
    loss = want.out.sum() + want.lse.sum()
    return found, [want.out, want.lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_backend_of_an_absent_device_computes_forward_and_backward(
    device: str, chip: type[Chip]
) -> None:
    register(device, chip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with posing(device):
            found, want = attend(device=device)
    torch.testing.assert_close(found, want)
    assert chip.calls == [("forward", {"cpu"}), ("backward", {"cpu"})]
    assert [(spec.device_type, spec.arch) for spec in chip.specs] == [(device, "")]


def test_under_torch_compile_the_posing_device_computes_and_only_in_the_block(
    chip: type[Chip],
) -> None:
    register("xpu", chip)
    register("cpu", make_stub())
    torch._dynamo.reset()
    compiled = torch.compile(anyflex.flex_attention, backend="aot_eager", fullgraph=True)
    query = some_query()
    assert not compiled(query, query, query).any()  # the stub's zeros
    with posing("xpu"):
        found, want = attend(compiled)
        torch.testing.assert_close(found, want)
        assert compiled(query, query, query).any()
    assert not compiled(query, query, query).any()
    assert [direction for direction, _ in chip.calls] == ["forward", "backward", "forward"]


def test_a_block_inside_a_compiled_function_breaks_its_graph(chip: type[Chip]) -> None:
    register("xpu", chip)
    register("cpu", make_stub())
    torch._dynamo.reset()

    def posed(query: Tensor) -> tuple[Tensor, Tensor]:
        with posing("xpu"):
            inside = anyflex.flex_attention(query, query, query)
        return inside, anyflex.flex_attention(query, query, query)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Dynamo's, of what it can't look into
        inside, outside = torch.compile(posed, backend="aot_eager")(some_query())
    assert inside.any() and not outside.any()
    assert stand_in.posed_in_force() is None


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_backward_in_the_block_runs_where_its_call_ran(way: str, chip: type[Chip]) -> None:
    register("xpu", chip)
    register("cpu", make_stub(raises={"compile": AssertionError("asked")}))
    call = anyflex.flex_attention
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    query = some_query(requires_grad=True)
    with posing("xpu"):
        out = call(query, query, query)
        (gradient,) = torch.autograd.grad(out.sum(), [query])
    assert gradient.any()
    assert [direction for direction, _ in chip.calls] == ["forward", "backward"]


def test_the_static_op_carries_what_its_tensors_pose_as(chip: type[Chip]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    register("xpu", chip)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    query = some_query()
    with posing("xpu", arch="pvc"), Watch():
        anyflex.flex_attention(query, query, query)
    assert [(spec.device_type, spec.arch) for spec in chip.specs] == [("xpu", "pvc")]


def test_the_public_backward_poses_too(chip: type[Chip]) -> None:
    register("xpu", chip)
    query = some_query()
    with posing("xpu"):
        out, lse = anyflex.flex_attention(query, query, query, return_lse=True)
        anyflex.flex_attention_backward(torch.ones_like(out), query, query, query, out, lse)
    assert [direction for direction, _ in chip.calls] == ["forward", "backward"]


def test_nothing_of_a_block_is_left_after_it(chip: type[Chip]) -> None:
    register("xpu", chip)
    query = some_query()
    before = anyflex.flex_attention(query, query, query)
    with pytest.raises(ZeroDivisionError), posing("xpu"):
        anyflex.flex_attention(query, query, query)
        raise ZeroDivisionError
    chip.calls.clear()
    after = anyflex.flex_attention(query, query, query)
    assert torch.equal(before, after)
    assert chip.calls == []
    assert anyflex.explain(query, query, query).selection.spec.device_type == "cpu"
    with pytest.raises(anyflex.BlockMaskError, match="xpu"):
        anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, "xpu")


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_explain_speaks_of_the_posing_device_and_its_candidates() -> None:
    register("xpu", make_stub(refuses="no small tiles"))
    register("xpu.second", make_stub(priority=-1, rejects="no xpu here"))
    register("cpu", make_stub(priority=9))
    query = some_query()
    with posing("xpu", arch="pvc"):
        explanation = anyflex.explain(query, query, query)
    assert explanation.backend == "xpu.second"
    assert explanation.variant == "NullKernel"
    asked = [(line.backend, line.outcome) for line in explanation.selection.trace]
    assert asked == [("xpu", "refuses"), ("xpu.second", "chosen"), ("reference", "accepts")]
    spec = explanation.selection.spec
    assert (spec.device_type, spec.arch) == ("xpu", "pvc")


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_a_probe_that_rejects_counts_again_after_the_block() -> None:
    register("cpu.picky", make_stub(rejects="no matrix unit", priority=5))
    query = some_query()
    with posing("xpu"):
        pass
    assert anyflex.explain(query, query, query).backend == "reference"
    with (
        posing("xpu"),
        pytest.raises(anyflex.BackendRefused, match="cpu.picky.*computes on cpu.*are on xpu"),
    ):
        anyflex.flex_attention(query, query, query, backend="cpu.picky")


def test_what_is_decided_in_a_block_is_not_taken_for_a_call_on_the_real_device() -> None:
    register("xpu", make_stub(rejects="the driver is too old"))
    spec = make_spec("xpu")
    for block, name in ((posing("xpu"), "xpu"), (nullcontext(), "reference")):
        with warnings.catch_warnings(), block:
            warnings.simplefilter("ignore", anyflex.PerformanceWarning)
            compiled = kernel_for(spec, (), None, ())
        assert compiled.backend.name == name


def test_a_backend_that_is_broken_is_no_more_whole_in_a_block() -> None:
    register("xpu", make_stub(raises={"probe": OSError("libze_loader.so is cut short")}))
    query = some_query()
    with posing("xpu"), pytest.raises(anyflex.PluginError, match="libze_loader"):
        anyflex.flex_attention(query, query, query, backend="xpu")


def test_supports_decides_in_a_block_as_on_the_device() -> None:
    register("xpu", make_stub(refuses="head dims are 64 or 128"))
    query = some_query()
    with posing("xpu"):
        with pytest.raises(anyflex.BackendRefused, match="head dims are 64 or 128"):
            anyflex.flex_attention(query, query, query, backend="xpu")
        with pytest.warns(anyflex.PerformanceWarning, match="xpu .*passed over.*64 or 128"):
            anyflex.flex_attention(query, query, query)


def test_a_device_without_a_backend_warns_as_an_accelerator_does() -> None:
    query = some_query()
    with posing("xpu"), pytest.warns(anyflex.PerformanceWarning, match="no backend for xpu"):
        anyflex.flex_attention(query, query, query)


def test_a_forced_name_binds_calls_of_its_device_type_only(
    chip: type[Chip], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = make_stub()
    register("xpu", make_stub(priority=5))
    register("xpu.chip", chip)
    register("cpu", on_cpu)
    query = some_query()
    with posing("xpu"):
        with anyflex.use_backend("cpu"):  # binds no call on xpu
            assert anyflex.explain(query, query, query).backend == "xpu"
        with anyflex.use_backend("cpu", "xpu.chip"):
            assert anyflex.explain(query, query, query).backend == "xpu.chip"
        with anyflex.use_backend("reference"):
            assert anyflex.explain(query, query, query).backend == "reference"
        with pytest.raises(anyflex.BackendRefused, match=r"computes on cpu.*are on xpu"):
            anyflex.flex_attention(query, query, query, backend="cpu")
        anyflex.flex_attention(query, query, query, backend="xpu.chip")
    with anyflex.use_backend("xpu.chip"):  # binds no call on the CPU
        assert anyflex.explain(query, query, query).backend == "cpu"
    with pytest.raises(anyflex.BackendRefused, match=r"computes on xpu.*are on cpu"):
        anyflex.flex_attention(query, query, query, backend="xpu.chip")
    assert not on_cpu.compiled[1:]  # explain alone compiled it
    assert [direction for direction, _ in chip.calls] == ["forward"]


def test_capabilities_hold_and_core_computes_gradients_that_a_backend_lacks() -> None:
    import dataclasses

    class ForwardOnly(Chip):
        capabilities = dataclasses.replace(
            ReferenceBackend.capabilities,
            gradients=frozenset(),
            core_backward=True,
            dtypes=frozenset({torch.float64}),
        )

    register("mps", ForwardOnly)
    with posing("mps"):
        found, want = attend()
        query = some_query()
        with pytest.raises(anyflex.BackendRefused, match="float32"):
            anyflex.flex_attention(query, query, query, backend="mps")
    torch.testing.assert_close(found, want)


def test_masks_are_made_and_moved_to_the_posing_device_as_cpu_masks() -> None:
    document = torch.arange(64) // 10
    with posing("xpu"):
        mask = anyflex.create_block_mask(
            lambda b, h, q, k: document[q] == document[k], None, None, 64, 64, "xpu:0", 16
        )
        assert mask.device.type == "cpu"
        assert mask.to("xpu") is mask
        assert mask.to(torch.device("xpu")) is mask
        dense = anyflex.create_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="xpu")
        assert dense.device.type == "cpu"
        with pytest.raises(anyflex.BlockMaskError, match="device 'no such'"):
            mask.to("no such")


def test_autocast_is_the_cpus(chip: type[Chip]) -> None:
    register("xpu", chip)
    query = some_query()
    with posing("xpu"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert anyflex.flex_attention(query, query, query).dtype is torch.bfloat16


def test_blocks_nest_and_the_inner_one_counts() -> None:
    assert stand_in.posed_in_force() is None
    with posing("xpu"):
        with posing("cuda", arch="sm_90"):
            assert stand_in.posed_in_force() == ("cuda", "sm_90")
            with posing("cpu"):
                assert stand_in.posed_in_force() is None
            assert stand_in.posed_in_force() == ("cuda", "sm_90")
        assert stand_in.posed_in_force() == ("xpu", "")
    assert stand_in.posed_in_force() is None


def test_one_object_can_be_entered_again_and_decorate() -> None:
    block = posing("xpu")
    with block, block:
        assert stand_in.posed_in_force() == ("xpu", "")
    assert stand_in.posed_in_force() is None

    @posing("mps")
    def posed() -> object:
        return stand_in.posed_in_force()

    assert posed() == ("mps", "")
    assert stand_in.posed_in_force() is None


def run_in_thread(work: Any) -> list[Any]:
    results: list[Any] = []

    def body() -> None:
        try:
            results.append(work())
        except anyflex.AnyflexError as error:
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return results


def test_a_block_holds_for_every_thread(chip: type[Chip]) -> None:
    register("xpu", chip)
    query = some_query(requires_grad=True)

    def work() -> Tensor:
        out: Tensor = anyflex.flex_attention(query, query, query)
        out.sum().backward()
        return out

    with posing("xpu"):
        run_in_thread(work)
    assert [direction for direction, _ in chip.calls] == ["forward", "backward"]


def test_two_threads_may_pose_as_the_same_device_and_not_as_different_ones() -> None:
    def same() -> object:
        with posing("xpu"):
            return stand_in.posed_in_force()

    def other() -> None:
        with posing("cuda"):
            raise AssertionError

    def itself() -> None:
        with posing("cpu"):
            raise AssertionError

    with posing("xpu"):
        assert run_in_thread(same) == [("xpu", "")]
        assert stand_in.posed_in_force() == ("xpu", "")
        for work in (other, itself):
            (error,) = run_in_thread(work)
            assert isinstance(error, anyflex.ArgumentError)
            assert "another thread is in posing('xpu')" in str(error)
        assert stand_in.posed_in_force() == ("xpu", "")
    assert stand_in.posed_in_force() is None


def test_blocks_of_two_threads_may_end_in_any_order() -> None:
    first, second = posing("xpu"), posing("xpu")
    first.__enter__()
    run_in_thread(second.__enter__)
    first.__exit__(None, None, None)
    assert stand_in.posed_in_force() == ("xpu", "")
    run_in_thread(lambda: second.__exit__(None, None, None))
    assert stand_in.posed_in_force() is None


def _in_child(queue: Any) -> None:
    held = stand_in.posed_in_force()
    with posing("cuda"):  # the parent's other thread doesn't exist here, and hinders nobody
        queue.put((held, stand_in.posed_in_force()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_inherits_the_block_and_may_open_its_own() -> None:
    held = posing("xpu")
    run_in_thread(held.__enter__)
    try:
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks and threads
            child = context.Process(target=_in_child, args=(queue,))
            child.start()
        assert queue.get(timeout=30) == (("xpu", ""), ("cuda", ""))
        child.join()
    finally:
        run_in_thread(lambda: held.__exit__(None, None, None))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("xpu:0", anyflex.ArgumentError, "'xpu:0'.*has no index"),
        ("XPU", anyflex.ArgumentError, "'XPU'.*lower case"),
        ("", anyflex.ArgumentError, "''.*no device type"),
        ("meta", anyflex.ArgumentError, "'meta'.*hold no numbers"),
        (torch.device("cpu"), anyflex.ArgumentTypeError, "must be a str.*device"),
        (None, anyflex.ArgumentTypeError, "must be a str.*NoneType"),
    ],
    ids=str,
)
def test_a_wrong_device_type_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        posing(given)


def test_a_wrong_architecture_is_refused() -> None:
    with pytest.raises(anyflex.ArgumentError, match="without spaces"):
        posing("cuda", arch="sm 90")
    with pytest.raises(anyflex.ArgumentTypeError, match="arch must be a str, got 90"):
        posing("cuda", arch=90)  # type: ignore[arg-type]
    with pytest.raises(anyflex.ArgumentError, match="stand for themselves"):
        posing("cpu", arch="avx512")


def test_leaving_what_was_not_entered_is_refused() -> None:
    with pytest.raises(anyflex.ArgumentError, match=r"posing\('xpu'\): left without"):
        posing("xpu").__exit__(None, None, None)


def test_no_module_of_the_kit_has_the_name_of_what_the_kit_exports() -> None:
    # Importing such a module would put it in the place of the export.
    modules = {module.name for module in pkgutil.iter_modules(anyflex.testing.__path__)}
    assert not modules & set(anyflex.testing.__all__)


def test_only_cpu_tensors_pose() -> None:
    query = some_query(device="meta")
    with posing("xpu"), pytest.raises(anyflex.BackendRefused, match="device meta"):
        anyflex.flex_attention(query, query, query)


def test_stubs_of_many_device_types_each_get_their_own_calls() -> None:
    stubs = {device: make_stub() for device in DEVICES}
    for device, stub in stubs.items():
        register(device, stub)
    query = some_query()
    for device in DEVICES:
        with posing(device):
            anyflex.flex_attention(query, query, query)
    for device, stub in stubs.items():
        assert issubclass(stub, Stub)
        assert [spec.device_type for spec in stub.compiled] == [device]
