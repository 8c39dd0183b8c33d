"""Selection of the backend of a call: priority, forced names, refusals, warnings."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import pytest

from anyflex.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendConflict,
    BackendRefused,
    PerformanceWarning,
    PluginError,
)
from anyflex.registry import (
    environment,
    isolated,
    names_in_force,
    register,
    use_backend,
)
from anyflex.registry.backend_choice import explain_selection
from anyflex.registry.cached_state import STATE
from anyflex.registry.fallback import warn_about_opaque_mod
from anyflex.runtime.compiled_kernel import CompiledKernel
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.stubs import Reference, make_spec, make_stub

__all__: list[str] = []


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def ask(
    device: str = "cpu", backend: str | None = None, options: tuple[tuple[str, object], ...] = ()
) -> CompiledKernel:
    return kernel_for(make_spec(device), names_in_force(backend), backend, options)


def test_without_plugins_the_reference_computes() -> None:
    assert ask().backend.name == "reference"


def test_the_highest_priority_is_chosen_and_ties_go_by_name() -> None:
    register("cpu.b", make_stub(priority=5))
    register("cpu.a", make_stub(priority=5))
    register("cpu", make_stub(priority=1))
    assert ask().backend.name == "cpu.a"


def test_a_backend_serves_its_own_device_type_only() -> None:
    register("cuda", make_stub(priority=100))
    assert ask("cpu").backend.name == "reference"
    assert ask("cuda").backend.name == "cuda"


def test_a_backend_of_an_unknown_device_type_takes_part() -> None:
    register("warp", make_stub())
    compiled = ask("warp")
    assert compiled.backend.name == compiled.backend.device_type == "warp"


def test_a_refusal_falls_to_the_next_candidate_with_one_warning_a_reason() -> None:
    register("cuda", make_stub(priority=9, refuses="head dim 40; pad it to 48"))
    register("cuda.other", make_stub())
    with pytest.warns(
        PerformanceWarning,
        match=r"backend cuda \(stubs in process\) is passed "
        r"over, cuda.other computes the call: head dim 40; pad it to 48",
    ):
        assert ask("cuda").backend.name == "cuda.other"
    assert kernel_for(make_spec("cuda", head_dim=32), (), None, ()).backend.name == "cuda.other"


def test_a_rejecting_probe_falls_to_the_reference_with_its_cure() -> None:
    register("cpu", make_stub(rejects="needs AVX2; run on a newer machine"))
    with pytest.warns(PerformanceWarning, match="reference computes the call: needs AVX2; run on"):
        assert ask().backend.name == "reference"


def test_a_backend_that_would_be_asked_later_is_not_passed_over() -> None:
    register("cpu", make_stub(priority=1))
    register("cpu.gone", make_stub(rejects="no hardware"))
    register("cpu.next", make_stub(contract=9))
    assert ask().backend.name == "cpu"
    register("cpu.first", make_stub(priority=2, rejects="no hardware either"))
    with pytest.warns(PerformanceWarning, match="cpu.first .*passed over, cpu computes") as warned:
        assert ask().backend.name == "cpu"
    assert len(warned) == 1


def test_an_explanation_says_who_is_asked_before_a_backend_that_accepts() -> None:
    register("cpu", make_stub())
    register("cpu.mine", make_stub())
    selection = explain_selection(make_spec(), (), None, ())
    assert str(selection.trace[1]) == (
        "cpu.mine (stubs in process) accepts: cpu is asked first: by priority, then by name"
    )


def test_an_accelerator_without_its_backend_warns_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anyflex.registry.install_hints._extras", lambda: frozenset({"cuda"}))
    with pytest.warns(PerformanceWarning, match=r'no backend for cuda.*pip install "\.\[cuda\]"'):
        assert ask("cuda").backend.name == "reference"


def test_without_the_kernels_for_nvidia_the_portable_ones_are_recommended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anyflex.registry.install_hints._extras", lambda: frozenset({"rocm"}))
    with pytest.warns(PerformanceWarning, match="install cuda.triton: .* ./backends/triton"):
        ask("cuda")


def test_an_extra_that_does_not_exist_yet_is_not_recommended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anyflex.registry.install_hints._extras", lambda: frozenset({"cpu"}))
    with pytest.warns(PerformanceWarning, match="backend 'xpu' is not in this version of anyflex"):
        ask("xpu")


def test_a_mod_that_cannot_be_traced_warns() -> None:
    with pytest.warns(PerformanceWarning, match="score_mod.*vmap.*lgamma"):
        warn_about_opaque_mod("score_mod", "torch operation lgamma")


def test_a_mod_that_cannot_be_traced_is_an_error_where_fallbacks_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYFLEX_FALLBACK", "error")
    with pytest.raises(BackendRefused, match="ANYFLEX_FALLBACK=error.*lgamma"):
        warn_about_opaque_mod("score_mod", "torch operation lgamma")


def test_fallback_error_raises_what_would_have_been_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYFLEX_FALLBACK", "error")
    register("cuda", make_stub(refuses="too wide"))
    with pytest.raises(BackendRefused, match="ANYFLEX_FALLBACK=error.*too wide") as caught:
        ask("cuda")
    assert caught.value.reasons == {"cuda": "too wide"}


def test_fallback_quiet_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFLEX_FALLBACK", "quiet")
    register("cuda", make_stub(refuses="too wide"))
    assert ask("cuda").backend.name == "reference"


def test_an_explicit_backend_is_used_whatever_its_priority() -> None:
    register("cpu", make_stub(priority=9))
    register("cpu.slow", make_stub(priority=-9))
    assert ask(backend="cpu.slow").backend.name == "cpu.slow"


def test_an_explicit_backend_never_falls_back_and_says_who_would_take_the_call() -> None:
    register("cpu", make_stub(refuses="dtype float32"))
    register("cpu.other", make_stub(refuses="decoding"))
    with pytest.raises(
        BackendRefused,
        match=r"backend='cpu' is refused. cpu: dtype float32. "
        r"These take the call: reference. The others: cpu.other: decoding",
    ) as e:
        ask(backend="cpu")
    assert e.value.reasons == {"cpu": "dtype float32", "cpu.other": "decoding"}
    assert isinstance(e.value, NotImplementedError)


def test_an_explicit_backend_of_another_device_is_refused_with_both_devices() -> None:
    register("cuda", make_stub())
    with pytest.raises(BackendRefused, match="'cuda' computes on cuda tensors.*are on cpu"):
        ask(backend="cuda")


def test_a_backend_that_is_not_installed_is_refused_with_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anyflex.registry.install_hints._extras", lambda: frozenset({"cpu"}))
    with pytest.raises(BackendRefused, match=r'not installed.*pip install "\.\[cpu\]"'):
        ask(backend="cpu")


def test_an_unknown_backend_names_the_known_ones_and_the_nearest() -> None:
    register("cuda.mine", make_stub())
    with pytest.raises(
        ArgumentError,
        match="backend='cuda.mime': there is no backend 'cuda.mime'; did you mean 'cuda.mine'. "
        "registered: cuda.mine, reference; not installed: cpu, cuda",
    ):
        ask(backend="cuda.mime")


def test_backend_must_be_a_str() -> None:
    with pytest.raises(ArgumentTypeError, match="backend must be the name.*got 3"):
        names_in_force(3)  # type: ignore[arg-type]


def test_the_reference_can_be_forced_on_every_device_without_a_warning() -> None:
    register("cuda", make_stub())
    assert ask("cuda", backend="reference").backend.name == "reference"
    with use_backend("reference"):
        assert ask("cuda").backend.name == ask("cpu").backend.name == "reference"


def test_a_context_binds_its_own_device_type_only() -> None:
    register("cuda", make_stub(priority=1))
    register("cuda.mine", make_stub())
    register("cpu", make_stub())
    with use_backend("cuda.mine"):
        assert ask("cuda").backend.name == "cuda.mine"
        assert ask("cpu").backend.name == "cpu"
    assert ask("cuda").backend.name == "cuda"


def test_of_several_forced_names_the_first_that_takes_the_call_computes_it() -> None:
    register("cpu.a", make_stub(refuses="never"))
    register("cpu.b", make_stub())
    with use_backend("cpu.a", "cpu.b"):
        assert ask().backend.name == "cpu.b"
    with use_backend("cpu.a", "reference"):
        assert ask().backend.name == "reference"


def test_an_inner_context_wins_and_an_empty_one_frees_the_choice() -> None:
    register("cpu", make_stub())
    with use_backend("reference"):
        with use_backend("cpu"):
            assert ask().backend.name == "cpu"
        with use_backend():
            assert ask().backend.name == "cpu"
        assert ask().backend.name == "reference"


def test_the_argument_is_stronger_than_the_context_and_that_than_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYFLEX_BACKEND", "cpu.c, cuda.x")
    for name in ("cpu.a", "cpu.b", "cpu.c"):
        register(name, make_stub())
    register("cuda.x", make_stub())
    assert ask().backend.name == "cpu.c"
    assert ask("cuda").backend.name == "cuda.x"
    with use_backend("cpu.b"):
        assert ask().backend.name == "cpu.b"
        assert ask(backend="cpu.a").backend.name == "cpu.a"


def test_the_variable_is_forced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFLEX_BACKEND", "cpu")
    register("cpu", make_stub(refuses="no"))
    with pytest.raises(BackendRefused, match="ANYFLEX_BACKEND=cpu is refused. cpu: no"):
        ask()


def test_an_unknown_name_in_the_variable_is_an_error_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYFLEX_BACKEND", "cudaa")
    with pytest.raises(ArgumentError, match="ANYFLEX_BACKEND=cudaa.*'cudaa'; did you mean 'cuda'"):
        ask()


def test_an_unknown_name_in_a_context_is_an_error_on_entry_and_leaves_the_outer_one() -> None:
    with use_backend("reference"):
        with pytest.raises(ArgumentError, match="no backend 'gpu'"), use_backend("gpu"):
            pass
        assert names_in_force() == ("reference",)


def test_use_backend_takes_strings_only() -> None:
    with pytest.raises(ArgumentTypeError, match="each name must be a str, got None"):
        use_backend(None)  # type: ignore[arg-type]


def test_a_context_must_be_left_in_the_thread_that_entered_it() -> None:
    context = use_backend("reference")
    context.__enter__()
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            context.__exit__(None, None, None)
        except ArgumentError as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "left in another thread" in str(errors[0])
    context.__exit__(None, None, None)
    assert names_in_force() == ()


def test_a_context_that_was_not_entered_cannot_be_left() -> None:
    with pytest.raises(ArgumentError, match="without having been entered"):
        use_backend("reference").__exit__(None, None, None)


def test_a_context_does_not_reach_other_threads() -> None:
    seen: list[tuple[str, ...]] = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(names_in_force()))
        thread.start()
        thread.join()
    assert seen == [()]


def test_a_function_can_be_decorated() -> None:
    @use_backend("reference")
    def forced() -> tuple[str, ...]:
        return names_in_force()

    assert (forced(), names_in_force()) == (("reference",), ())


def test_a_disabled_backend_is_passed_over_silently_and_refused_when_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYFLEX_DISABLE", "cpu")
    register("cpu", make_stub())
    assert ask().backend.name == "reference"
    with pytest.raises(BackendRefused, match="disabled by ANYFLEX_DISABLE=cpu"):
        ask(backend="cpu")


def test_only_the_named_plugins_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFLEX_PLUGINS", "dist:My_Plugin")
    register("cpu", make_stub())
    register("cpu.mine", make_stub(module="my_plugin.backend"))
    assert ask().backend.name == "cpu.mine"
    with pytest.raises(BackendRefused, match="disabled by ANYFLEX_PLUGINS=dist:My_Plugin"):
        ask(backend="cpu")


def test_no_plugin_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFLEX_PLUGINS", "none")
    register("cpu", make_stub())
    assert ask().backend.name == "reference"


def test_when_every_backend_is_disabled_the_error_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYFLEX_DISABLE", "cpu,reference")
    register("cpu", make_stub())
    with pytest.raises(BackendRefused, match="no backend.*ANYFLEX_DISABLE=cpu,reference"):
        ask()


@pytest.mark.parametrize("variable", ["ANYFLEX_DISABLE", "ANYFLEX_PLUGINS"])
def test_an_unknown_name_in_a_list_of_plugins_warns_once(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "cpu,nobody,dist:nothing")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ask()
        kernel_for(make_spec(head_dim=32), (), None, ())
    texts = [str(item.message) for item in caught]
    assert [variable in text for text in texts] == [True, True]
    assert "'nobody'" in texts[0] and "'dist:nothing'" in texts[1]


def test_two_packages_under_one_name_are_a_conflict_that_a_variable_solves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def both() -> None:
        register("cpu", make_stub(module="one.backend"))
        register("cpu", make_stub(module="two.backend"))

    both()
    register("cpu.other", make_stub())
    with pytest.raises(
        BackendConflict,
        match="one in process.*two in process.*neither is used.*"
        "ANYFLEX_DISABLE=dist:one or ANYFLEX_DISABLE=dist:two",
    ):
        ask(backend="cpu")
    with pytest.warns(PerformanceWarning, match="registered by 2 distributions"):
        assert ask().backend.name == "cpu.other"
    monkeypatch.setenv("ANYFLEX_DISABLE", "dist:two")
    with isolated(reference=Reference):
        both()
        assert ask(backend="cpu").distribution == "one in process"


def test_one_package_cannot_register_a_name_twice() -> None:
    register("cpu", make_stub())
    with pytest.raises(PluginError, match="'cpu'.*is registered twice"):
        register("cpu", make_stub())


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("My Backend", "lower case"),
        ("CUDA", "lower case"),
        ("", "device type is empty"),
        (".x", "device type is empty"),
        ("cuda.", "device type"),
        ("cuda.a.b", "device type"),
        ("reference", "core's own"),
    ],
)
def test_a_bad_name_is_refused_at_registration(name: str, rule: str) -> None:
    with pytest.raises(PluginError, match=rule):
        register(name, make_stub())


def test_a_registration_makes_decisions_anew() -> None:
    assert ask().backend.name == "reference"
    before = STATE.generation
    register("cpu", make_stub())
    assert STATE.generation != before
    assert ask().backend.name == "cpu"


def test_an_explanation_shows_every_candidate_and_compiles_nothing() -> None:
    stub = make_stub(priority=3)
    register("cpu", stub)
    register("cpu.wide", make_stub(priority=9, refuses="too narrow"))
    register("cpu.gone", make_stub(rejects="no hardware"))
    selection = explain_selection(make_spec(), (), None, ())
    assert selection.chosen == "cpu" and selection.forced_by == ""
    assert [(line.backend, line.outcome) for line in selection.trace] == [
        ("cpu.wide", "refuses"),
        ("cpu", "chosen"),
        ("cpu.gone", "refuses"),
        ("reference", "accepts"),
    ]
    assert str(selection.trace[0]) == "cpu.wide (stubs in process) refuses: too narrow"
    assert stub.compiled == []


def test_an_explanation_does_not_raise_for_refusals() -> None:
    register("cpu", make_stub(refuses="no"))
    selection = explain_selection(make_spec(), ("cpu",), "cpu", ())
    assert selection.chosen is None and selection.forced_by == "backend='cpu'"
    assert [(line.backend, line.outcome) for line in selection.trace] == [
        ("cpu", "refuses"),
        ("reference", "accepts"),
    ]
    other = explain_selection(make_spec("cuda"), ("cpu",), "cpu", ())
    assert other.chosen is None and "the tensors are on cuda" in other.trace[0].reason
    missing = explain_selection(make_spec("cuda"), (), None, ())
    assert missing.chosen == "reference" and missing.trace[0].outcome == "missing"


def test_a_strict_registry_raises_for_a_broken_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFLEX_STRICT", "1")
    register("cpu", make_stub(raises={"probe": OSError("libgpu.so: not found")}))
    with pytest.raises(PluginError, match=r"'cpu' of stubs in process.*probe\(\) raised OSError"):
        ask()


def test_the_value_in_force_stays_when_a_variable_changes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register("cpu", make_stub())
    ask()
    monkeypatch.setenv("ANYFLEX_BACKEND", "reference")
    assert kernel_for(make_spec(head_dim=8), names_in_force(), None, ()).backend.name == "cpu"
    row = next(row for row in environment.in_force() if row.name == "ANYFLEX_BACKEND")
    assert (row.value, row.now, row.read) == (None, "reference", True)
