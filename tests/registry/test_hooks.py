"""Hooks: order of candidates, compiled, launched; a broken hook plugin stops nobody."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from anyflex.contract.spec import Spec
from anyflex.errors import PluginError
from anyflex.registry import hooks as hooks_module
from anyflex.registry import isolated, register, register_hooks
from anyflex.registry.cached_state import STATE, Listeners
from anyflex.registry.doctor_report import hook_rows
from anyflex.registry.hook_specs import hookimpl
from anyflex.registry.hooks import Hooks
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.packages import install
from tests.registry.stubs import Reference, make_spec, make_stub

__all__: list[str] = []


def plugin(**functions: Callable[..., Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{n: hookimpl(f) for n, f in functions.items()})


def test_a_plugin_reorders_the_candidates_and_may_leave_names_out() -> None:
    seen: list[tuple[Spec, tuple[str, ...]]] = []

    def anyflex_order_candidates(spec: Spec, candidates: tuple[str, ...]) -> list[str]:
        seen.append((spec, candidates))
        return ["cpu.c"]

    for name, priority in (("cpu.a", 3), ("cpu.b", 2), ("cpu.c", 1)):
        register(name, make_stub(priority=priority))
    register_hooks(plugin(anyflex_order_candidates=anyflex_order_candidates), "order")
    compiled = kernel_for(make_spec(), (), None, ())
    assert compiled.backend.name == "cpu.c"
    assert seen == [(make_spec(), ("cpu.a", "cpu.b", "cpu.c"))]


def test_no_opinion_changes_nothing() -> None:
    register("cpu.a", make_stub(priority=3))
    register("cpu.b", make_stub())
    register_hooks(plugin(anyflex_order_candidates=lambda candidates: None), "order")
    assert kernel_for(make_spec(), (), None, ()).backend.name == "cpu.a"


@pytest.mark.parametrize("answer", ["cpu.a", ["cpu.z"], ["cpu.a", "cpu.a"], 3])
def test_an_answer_that_is_no_order_is_reported_and_ignored(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    register("cpu.a", make_stub(priority=3))
    register("cpu.b", make_stub())
    register_hooks(plugin(anyflex_order_candidates=lambda candidates: answer), "order")
    with caplog.at_level(logging.WARNING, "anyflex"):
        assert kernel_for(make_spec(), (), None, ()).backend.name == "cpu.a"
    assert "must return names out of ['cpu.a', 'cpu.b'], each once, got" in caplog.text


def hooks() -> Listeners:
    assert STATE.hooks is not None
    return STATE.hooks


def listening() -> bool:
    return hooks().listening


def test_listeners_hear_of_compiles_and_launches() -> None:
    heard: list[tuple[object, ...]] = []
    register("cpu", make_stub(compile_seconds=0.02))
    register_hooks(
        plugin(
            anyflex_compiled=lambda spec, backend, seconds: heard.append((spec, backend, seconds)),
            anyflex_launched=lambda variant, backend: heard.append((backend, variant)),
        ),
        "listener",
    )
    assert listening()
    compiled = kernel_for(make_spec(), (), None, ())
    hooks().launched(compiled.spec, compiled.backend.name, "decode split=8")
    spec, backend, seconds = heard[0]
    assert (spec, backend) == (make_spec(), "cpu")
    assert isinstance(seconds, float) and seconds >= 0.02
    assert heard[1] == ("cpu", "decode split=8")


def test_nobody_listens_by_default_nor_for_other_hooks() -> None:
    assert not listening()
    register_hooks(plugin(anyflex_compiled=lambda spec: None), "quiet")
    assert not listening()


def test_a_hook_that_raises_is_reported_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []

    def explode(spec: Spec) -> None:
        raise SystemExit("bye")

    register_hooks(plugin(anyflex_launched=lambda variant: heard.append("a" + variant)), "a")
    register_hooks(plugin(anyflex_launched=explode), "b")
    register_hooks(plugin(anyflex_launched=lambda variant: heard.append("c" + variant)), "c")
    with caplog.at_level(logging.WARNING, "anyflex"):
        hooks().launched(make_spec(), "reference", "1")
        hooks().launched(make_spec(), "reference", "2")
    assert sorted(heard) == ["a1", "a2", "c1", "c2"]
    assert [r.getMessage().count("SystemExit: bye") for r in caplog.records] == [1]
    assert "plugin 'b' of b in process is broken: anyflex_launched()" in caplog.text


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            {"anyflex_compiled": lambda spec, backend, milliseconds: None},
            r"\(spec, backend, milliseconds\) Argument\(s\) {'milliseconds'} are declared .*"
            r"the hooks are .*anyflex_compiled\(spec, backend, seconds\)",
        ),
        (
            {"anyflex_lunched": lambda spec: None},
            "unknown hook 'anyflex_lunched'.*_launched",
        ),
        ({}, "no function marked with anyflex.plugin.hookimpl"),
    ],
)
def test_a_hook_that_does_not_fit_is_refused_with_both_signatures(
    functions: dict[str, Callable[..., Any]], message: str
) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        register_hooks(plugin(**functions), "mine")
    assert caught.value.plugin == "mine"
    register_hooks(plugin(anyflex_launched=lambda spec: None), "mine")
    assert listening()


def test_threads_that_register_the_first_hooks_make_one_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, both = hooks_module._new_manager, threading.Barrier(2)

    def slow() -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for another thread that makes one at the same time
        return make()

    monkeypatch.setattr(hooks_module, "_new_manager", slow)
    found = Hooks()
    threads = [
        # Namespaces with equal functions would be equal, and one plugin.
        threading.Thread(
            target=found.add,
            args=(plugin(anyflex_launched=lambda spec: None), name, "mine 1.0"),
        )
        for name in ("first", "second")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found._manager is not None
    assert sorted(name for name, _ in found._manager.list_name_plugin()) == ["first", "second"]


def test_wrappers_are_refused() -> None:
    wrapper = types.SimpleNamespace(anyflex_launched=hookimpl(wrapper=True)(lambda: (yield)))
    with pytest.raises(PluginError, match="has a wrapper"):
        register_hooks(wrapper, "mine")


def test_a_name_is_taken_once_and_a_registration_decides_anew() -> None:
    before = STATE.generation
    register_hooks(plugin(anyflex_launched=lambda spec: None), "mine")
    assert STATE.generation != before
    with pytest.raises(PluginError, match="'mine'.*has hooks already"):
        register_hooks(plugin(anyflex_compiled=lambda spec: None), "mine")


HOOKS = """
from anyflex.plugin import hookimpl
HEARD = []
@hookimpl
def anyflex_compiled(spec, backend, seconds):
    HEARD.append(backend)
"""


def test_installed_hook_plugins_are_loaded_and_a_broken_one_stops_nobody(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, "good", "[anyflex.hooks.v1]\ngood = good_hooks\n", {"good_hooks": HOOKS})
    install(
        tmp_path,
        "wrong",
        "[anyflex.hooks.v1]\nwrong = wrong_hooks\n",
        {"wrong_hooks": HOOKS.replace("seconds", "minutes")},
    )
    install(tmp_path, "exits", "[anyflex.hooks.v1]\nexits = exits\n", {"exits": "exit(1)"})
    install(tmp_path, "newer", "[anyflex.hooks.v2]\nnewer = nothing_of_that_name\n")
    install(tmp_path, "off", "[anyflex.hooks.v1]\noff = nothing_of_that_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ANYFLEX_DISABLE", "off")
    with (
        isolated(scan=True, reference=Reference),
        caplog.at_level(logging.WARNING, "anyflex"),
    ):
        assert kernel_for(make_spec(), ("reference",), "reference", ()).backend.name == "reference"
        assert sys.modules["good_hooks"].HEARD == ["reference"]
        rows = {row.name: row for row in hook_rows()}
    assert {name: row.state for name, row in rows.items()} == {
        "good": "usable",
        "wrong": "broken",
        "exits": "broken",
        "newer": "incompatible",
        "off": "disabled",
    }
    assert "plugin 'wrong' of wrong 1.0 is broken: Plugin 'wrong' for hook" in caplog.text
    assert "SystemExit: 1" in rows["exits"].reason
    assert "written for contract 2, this is 1" in rows["newer"].reason


def test_a_strict_registry_raises_for_a_broken_hook_plugin_at_every_call(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "wrong", "[anyflex.hooks.v1]\nwrong = no_module_of_that_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ANYFLEX_STRICT", "1")
    with isolated(scan=True, reference=Reference):
        for _ in range(2):
            with pytest.raises(PluginError, match="'wrong' of wrong 1.0 is broken: importing"):
                kernel_for(make_spec(), (), None, ())


def test_without_hook_plugins_pluggy_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from anyflex.registry import isolated\n"
        "from anyflex.registry.backend_choice import explain_selection\n"
        "from tests.registry.stubs import Reference, make_spec\n"
        "with isolated(reference=Reference):\n"
        "    explain_selection(make_spec(), (), None, ())\n"
        "assert 'pluggy' not in sys.modules\n"
    )
    root = pathlib.Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=root,
        env={"PYTHONPATH": f"{root}/core:{root}"},
    )
