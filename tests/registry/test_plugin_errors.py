"""A plugin that breaks is named, once, and stops nobody else."""

from __future__ import annotations

import logging
import pathlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyflex
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Kernel
from anyflex.contract.spec import Spec
from anyflex.errors import (
    ArgumentError,
    BackendRefused,
    PerformanceWarning,
    PluginError,
)
from anyflex.registry import isolated, register, register_hooks
from anyflex.registry.doctor_report import backend_rows
from anyflex.registry.hook_specs import hookimpl
from anyflex.runtime.compiled_kernel import kernel_failed
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.packages import BACKEND, HEADER, install
from tests.registry.stubs import NullKernel, Reference, Stub, make_spec, make_stub

__all__: list[str] = []


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder on ``sys.path`` with one good backend, ``warp.good``, of the lowest priority."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    good = BACKEND.replace("    pass\n", "    priority = -100\n")
    install(
        tmp_path, "good", "[anyflex.backends.v1]\nwarp.good = good_one:Mine\n", {"good_one": good}
    )
    with isolated(scan=True, reference=Reference):
        yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


BREAKAGES = {
    "an import error": (
        "import not_a_module_of_anybody\n",
        "importing broken_module raised ModuleNotFoundError: No module named 'not_a_module_of",
    ),
    "a syntax error": ("def (:\n", "importing broken_module raised SyntaxError"),
    "a SystemExit": (
        "import sys\nsys.exit('driver too old')\n",
        "importing broken_module raised SystemExit: driver too old",
    ),
    "a missing class": (HEADER, "importing broken_module raised AttributeError"),
    "not a Backend": ("Mine = 3\n", "is not a subclass of anyflex.plugin.Backend but 3"),
    "an abstract class": (
        "from anyflex.plugin import *\nclass Mine(Backend):\n    pass\n",
        "creating broken_module:Mine raised TypeError",
    ),
    "no capabilities": (
        HEADER + "class Mine(Good):\n    capabilities = None\n",
        "its `capabilities` must be an anyflex.plugin.Capabilities",
    ),
    "bad options": (
        HEADER + "class Mine(Good):\n    options = {'a': 3}\n",
        "its `options` must map names to anyflex.plugin.Option objects",
    ),
    "a probe that raises": (
        HEADER + "class Mine(Good):\n    def probe(self):\n        1 / 0\n",
        r"probe\(\) raised ZeroDivisionError: division by zero",
    ),
    "a probe that answers True": (
        HEADER + "class Mine(Good):\n    def probe(self):\n        return True\n",
        r"probe\(\) must return Accepted\(\) or Rejected\(reason\), got True \(bool\)",
    ),
    "a probe that refuses by raising": (
        HEADER + "from anyflex.errors import BackendRefused\n"
        "class Mine(Good):\n    def probe(self):\n        raise BackendRefused('no driver.')\n",
        r"probe\(\) raised BackendRefused: no driver\. Upgrade",
    ),
    "a call of anyflex that fails at import": (
        "import anyflex\nanyflex.masks.causal_window(-3)\n",
        "importing broken_module raised ArgumentError: causal_window: size must be at least 1",
    ),
    "a device without memory": (
        HEADER + "import torch\nclass Mine(Good):\n    def __init__(self, *arguments):\n"
        "        raise torch.OutOfMemoryError('none')\n",
        "creating broken_module:Mine raised OutOfMemoryError: none",
    ),
    "capabilities that raise": (
        HEADER + "class Mine(Good):\n    @property\n    def capabilities(self):\n"
        "        raise OSError('libacme.so')\n",
        r"reading its declarations raised OSError: libacme\.so",
    ),
    "capabilities of another type": (
        HEADER + "class Mine(Good):\n"
        "    capabilities = Capabilities(dtypes=frozenset({'float32'}))\n",
        r"raised TypeError: Capabilities\(dtypes=...\) must be a frozenset of torch.dtype, got",
    ),
    "an option of no type": (
        HEADER + "class Mine(Good):\n    options = {'tile': Option('int', 16, 'a tile')}\n",
        r"raised TypeError: Option\(type=...\) must be int, float, bool or str, got 'int'",
    ),
    "supports that refuses by raising": (
        HEADER + "from anyflex.errors import BackendRefused\n"
        "class Mine(Good):\n    def supports(self, spec):\n        raise BackendRefused('odd')\n",
        r"supports\(spec\) raised BackendRefused: odd",
    ),
    "supports that raises": (
        HEADER + "class Mine(Good):\n    def supports(self, spec):\n        raise KeyError('x')\n",
        r"supports\(spec\) raised KeyError: 'x'",
    ),
    "supports that answers True": (
        HEADER + "class Mine(Good):\n    def supports(self, spec):\n        return True\n",
        r"supports\(spec\) must return Accepted\(\) or Rejected\(reason\), got True \(bool\)",
    ),
    "a fingerprint that raises": (
        HEADER + "class Mine(Good):\n    def fingerprint(self):\n        raise OSError('nvcc')\n",
        r"fingerprint\(\) raised OSError: nvcc",
    ),
    "compile that raises": (
        HEADER + "class Mine(Good):\n    def compile(self, spec, artifacts):\n"
        "        raise RuntimeError('ptxas failed')\n",
        r"compile\(spec [0-9a-f]{12}: warp float32 E=16 .*\) raised RuntimeError: ptxas failed",
    ),
    "compile that exits": (
        HEADER + "class Mine(Good):\n    def compile(self, spec, artifacts):\n"
        "        raise SystemExit(3)\n",
        r"compile\(.*\) raised SystemExit: 3",
    ),
    "compile that returns None": (
        HEADER + "class Mine(Good):\n    def compile(self, spec, artifacts):\n        pass\n",
        r"compile\(\) must return an anyflex.plugin.Kernel, got None",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_backend_is_named_and_the_next_one_computes(
    breakage: str,
    site: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, message = BREAKAGES[breakage]
    entry_points = "[anyflex.backends.v1]\nwarp = broken_module:Mine\n"
    install(site, "broken-plugin", entry_points, {"broken_module": source}, "0.3")
    with (
        caplog.at_level(logging.WARNING, "anyflex"),
        pytest.warns(PerformanceWarning, match="backend warp .* is passed over, warp.good"),
    ):
        assert kernel_for(make_spec("warp"), (), None, ()).backend.name == "warp.good"
    with caplog.at_level(logging.WARNING, "anyflex"):
        kernel_for(make_spec("warp", head_dim=32, value_head_dim=32), (), None, ())
    lines = [r.getMessage() for r in caplog.records if "broken-plugin" in r.getMessage()]
    assert len(lines) == 1
    assert "plugin 'warp' of broken-plugin 0.3 is broken" in lines[0]

    with pytest.raises(PluginError, match=message) as caught:
        kernel_for(make_spec("warp"), ("warp",), "warp", ())
    assert caught.value.plugin == "warp"
    assert caught.value.distribution == "broken-plugin 0.3"
    if "raised" in message:
        assert caught.value.__cause__ is not None
        assert "ANYFLEX_DISABLE=warp" in str(caught.value)

    monkeypatch.setenv("ANYFLEX_STRICT", "1")
    with isolated(scan=True, reference=Reference), pytest.raises(PluginError, match=message):
        kernel_for(make_spec("warp"), (), None, ())


def test_the_inventory_shows_the_traceback_of_a_broken_backend(site: pathlib.Path) -> None:
    entry_points = "[anyflex.backends.v1]\nwarp = broken_module:Mine\n"
    install(site, "broken-plugin", entry_points, {"broken_module": "\n\nimport no_such_module\n"})
    rows = {row.name: row for row in backend_rows()}
    assert rows["warp"].state == "broken"
    assert rows["warp"].cause == "ModuleNotFoundError: No module named 'no_such_module'"
    assert 'broken_module.py", line 3' in "".join(rows["warp"].traceback)
    assert rows["warp.good"].state == "usable" and rows["warp.good"].priority == -100
    assert rows["warp.good"].options[0]["name"] == "tile"


def test_a_kernel_that_raises_is_named_with_its_plugin_and_spec() -> None:
    register("cpu", make_stub())
    compiled = kernel_for(make_spec(), (), None, ())
    cause = RuntimeError("illegal memory access\nmore")
    error = kernel_failed(compiled, cause)
    assert isinstance(error, PluginError) and error.__cause__ is cause
    assert str(error).startswith(
        "plugin 'cpu' of stubs in process is broken: its kernel for cpu float32 E=16 Ev=16 q long "
        "raised RuntimeError: illegal memory access. "
    )
    assert "backend='reference'" in str(error)


@pytest.mark.parametrize(
    ("describe", "said"),
    [
        (lambda self, call: {}["variant"], "describe(call) raised KeyError: 'variant'"),
        (lambda self, call: None, "describe(call) raised TypeError: it must return a str"),
    ],
)
def test_a_description_that_breaks_stops_no_call(
    describe: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Indescribable(NullKernel):
        pass

    Indescribable.describe = describe  # type: ignore[method-assign]

    class Mine(Stub):
        def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
            return Indescribable()

    told: list[str] = []
    with isolated(reference=Reference), caplog.at_level(logging.WARNING, "anyflex"):
        register("cpu", Mine)
        listener = types.SimpleNamespace(
            anyflex_launched=hookimpl(lambda spec, backend, variant: told.append(variant))
        )
        register_hooks(listener, "listener")
        query = torch.ones(1, 1, 8, 16)
        assert not anyflex.flex_attention(query, query, query).any()
        assert told == [""]
        assert anyflex.explain(query, query, query).variant == ""
    assert said in caplog.text and "plugin 'cpu' of" in caplog.text


def test_a_compile_may_refuse_late() -> None:
    refusal = BackendRefused("tile 512 needs 262144 bytes of shared memory, there are 232448")
    register("cpu", make_stub(raises={"compile": refusal}))
    with pytest.warns(PerformanceWarning, match="needs 262144 bytes"):
        assert kernel_for(make_spec(), (), None, ()).backend.name == "reference"
    with pytest.raises(BackendRefused, match="backend='cpu' is refused.*needs 262144 bytes"):
        kernel_for(make_spec(), ("cpu",), "cpu", ())


def test_a_complaint_about_an_argument_passes_unchanged() -> None:
    register("cpu", make_stub(raises={"compile": ArgumentError("window must be even")}))
    with pytest.raises(ArgumentError, match="^window must be even$"):
        kernel_for(make_spec(), (), None, ())


def test_an_interrupt_is_not_swallowed() -> None:
    register("cpu", make_stub(raises={"compile": KeyboardInterrupt()}))
    with pytest.raises(KeyboardInterrupt):
        kernel_for(make_spec(), (), None, ())


def test_a_plugin_that_calls_anyflex_while_it_is_imported_does_not_hang(
    site: pathlib.Path,
) -> None:
    source = BACKEND + (
        "\nfrom tests.registry.stubs import make_spec\n"
        "from anyflex.runtime.kernel_cache import kernel_for\n"
        "SEEN = kernel_for(make_spec('warp'), (), None, ()).backend.name\n"
    )
    entry_points = "[anyflex.backends.v1]\nwarp = reentrant:Mine\n"
    install(site, "reentrant", entry_points, {"reentrant": source})
    with pytest.warns(PerformanceWarning, match="being imported by this very call"):
        assert kernel_for(make_spec("warp"), (), None, ()).backend.name == "warp"
    assert sys.modules["reentrant"].SEEN == "warp.good"
    assert kernel_for(make_spec("warp"), (), None, ()).backend.name == "warp"


def test_many_threads_load_a_backend_together(site: pathlib.Path) -> None:
    source = BACKEND + "import time\ntime.sleep(0.1)\n"
    entry_points = "[anyflex.backends.v1]\nwarp = slow_import:Mine\n"
    install(site, "slow", entry_points, {"slow_import": source})
    found = []

    def ask() -> None:
        found.append(kernel_for(make_spec("warp"), (), None, ()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [compiled.backend.name for compiled in found] == ["warp"] * 8
    assert len({id(compiled.kernel) for compiled in found}) == 1
