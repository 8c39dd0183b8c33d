"""Plugins are found in installed metadata, and nothing is imported before its first use."""

from __future__ import annotations

import logging
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

from anyflex.errors import BackendConflict, BackendRefused, PluginError
from anyflex.registry import install_hints, isolated
from anyflex.registry.discovery import hidden_copies, scan
from anyflex.registry.doctor_report import backend_rows
from anyflex.runtime.kernel_cache import kernel_for
from tests.registry.packages import BACKEND, install
from tests.registry.stubs import Reference, make_spec

__all__: list[str] = []


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder on ``sys.path``; imports from it are forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def entry(name: str, module: str, group: str = "anyflex.backends.v1") -> str:
    return f"[{group}]\n{name} = {module}:Mine\n"


@pytest.fixture
def scanned(site: pathlib.Path) -> Iterator[Callable[[], None]]:
    with isolated(scan=True, reference=Reference):
        yield lambda: None


def test_an_installed_backend_is_found_with_its_distribution(
    site: pathlib.Path, scanned: None
) -> None:
    install(site, "warp-kernels", entry("warp", "warp_found"), {"warp_found": BACKEND}, "2.5")
    compiled = kernel_for(make_spec("warp"), (), None, ())
    assert (compiled.backend.name, compiled.distribution) == ("warp", "warp-kernels 2.5")


def test_a_name_with_a_dot_is_a_variant(site: pathlib.Path, scanned: None) -> None:
    install(site, "warp-kernels", entry("warp.fast", "warp_dot"), {"warp_dot": BACKEND})
    compiled = kernel_for(make_spec("warp"), (), None, ())
    assert (compiled.backend.name, compiled.backend.device_type) == ("warp.fast", "warp")


def test_one_class_may_stand_under_several_names(site: pathlib.Path, scanned: None) -> None:
    text = entry("warp", "warp_two") + "weft = warp_two:Mine\n"
    install(site, "warp-kernels", text, {"warp_two": BACKEND})
    for name in ("warp", "weft"):
        assert kernel_for(make_spec(name), (), None, ()).backend.name == name


def test_a_backend_is_imported_at_its_first_use_only(site: pathlib.Path, scanned: None) -> None:
    install(site, "warp-kernels", entry("warp", "warp_lazy"), {"warp_lazy": BACKEND})
    kernel_for(make_spec("cpu"), ("reference",), "reference", ())
    assert "warp_lazy" not in sys.modules
    kernel_for(make_spec("warp"), (), None, ())
    assert "warp_lazy" in sys.modules


def test_a_group_of_another_contract_is_listed_and_never_loaded(
    site: pathlib.Path, scanned: None
) -> None:
    install(site, "newer", entry("warp", "warp_v2", "anyflex.backends.v2"), {"warp_v2": BACKEND})
    with pytest.raises(
        PluginError,
        match="'warp' of newer 1.0 can't be used: it is written for contract 2, "
        "this is 1; upgrade anyflex",
    ):
        kernel_for(make_spec("warp"), ("warp",), "warp", ())
    with pytest.warns(UserWarning, match="written for contract 2, this is 1"):
        assert kernel_for(make_spec("warp"), (), None, ()).backend.name == "reference"
    row = next(row for row in backend_rows() if row.name == "warp")
    assert (row.state, row.contract) == ("incompatible", 2)
    assert "warp_v2" not in sys.modules


def test_a_plugin_for_two_contracts_is_used_with_ours(site: pathlib.Path, scanned: None) -> None:
    text = entry("warp", "none_such", "anyflex.backends.v2") + entry("warp", "warp_both")
    install(site, "both", text, {"warp_both": BACKEND})
    assert kernel_for(make_spec("warp"), (), None, ()).distribution == "both 1.0"


def test_a_class_may_declare_its_contract_itself(site: pathlib.Path, scanned: None) -> None:
    source = BACKEND.replace("    pass\n", "    contract = 0\n")
    install(site, "old", entry("warp", "warp_old"), {"warp_old": source})
    with pytest.raises(PluginError, match="written for contract 0, this is 1; upgrade the plugin"):
        kernel_for(make_spec("warp"), ("warp",), "warp", ())


def test_two_distributions_under_one_name_are_used_by_none(
    site: pathlib.Path, scanned: None
) -> None:
    install(site, "one", entry("warp", "warp_one"), {"warp_one": BACKEND})
    install(site, "two", entry("warp", "warp_other"), {"warp_other": BACKEND})
    with pytest.raises(
        BackendConflict,
        match=r"one 1\.0 \(warp_one:Mine\) and two 1\.0 .*"
        "ANYFLEX_DISABLE=dist:one or ANYFLEX_DISABLE=dist:two",
    ) as caught:
        kernel_for(make_spec("warp"), ("warp",), "warp", ())
    assert isinstance(caught.value, PluginError)
    with pytest.warns(UserWarning, match="registered by 2 distributions"):
        assert kernel_for(make_spec("warp"), (), None, ()).backend.name == "reference"
    assert [row.state for row in backend_rows() if row.name == "warp"] == ["conflict"] * 2


def test_disabling_one_of_two_distributions_lets_the_other_in(
    site: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "One_Plugin", entry("warp", "warp_left"), {"warp_left": BACKEND})
    install(site, "two", entry("warp", "warp_right"), {"warp_right": BACKEND})
    monkeypatch.setenv("ANYFLEX_DISABLE", "dist:one-plugin")
    with isolated(scan=True, reference=Reference):
        assert kernel_for(make_spec("warp"), (), None, ()).distribution == "two 1.0"


def test_one_distribution_that_registers_a_name_twice_is_broken(
    site: pathlib.Path, scanned: None
) -> None:
    text = entry("warp", "warp_a") + "warp = warp_b:Mine\n"
    install(site, "twice", text, {"warp_a": BACKEND, "warp_b": BACKEND})
    with pytest.raises(PluginError, match="registered twice by its distribution"):
        kernel_for(make_spec("warp"), ("warp",), "warp", ())


@pytest.mark.parametrize("name", ["My Backend", "WARP", "warp.x y"])
def test_a_bad_name_is_reported_and_hides_nobody(
    name: str, site: pathlib.Path, scanned: None, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "bad", entry(name, "warp_bad"))
    install(site, "good", entry("warp", "warp_good"), {"warp_good": BACKEND})
    with caplog.at_level(logging.WARNING, "anyflex"):
        assert kernel_for(make_spec("warp"), (), None, ()).distribution == "good 1.0"
    assert f"plugin '{name}' of bad 1.0 has the name" in caplog.text
    assert [row.state for row in backend_rows() if row.name == name] == ["broken"]
    with pytest.raises(PluginError, match="in lower case"):
        kernel_for(make_spec("warp"), (name,), name, ())


def test_nobody_else_can_be_the_reference(site: pathlib.Path, scanned: None) -> None:
    install(site, "thief", entry("reference", "thief"), {"thief": BACKEND})
    assert kernel_for(make_spec(), ("reference",), "reference", ()).distribution.startswith(
        "anyflex "
    )
    assert [r.state for r in backend_rows() if r.distribution == "thief"] == ["broken"]
    assert "thief" not in sys.modules


def test_damaged_metadata_of_one_package_hides_no_other(
    site: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "good", entry("warp", "m"))
    install(site, "damaged", "")
    folder = site / "damaged-1.0.dist-info"
    (folder / "entry_points.txt").write_bytes(b"[anyflex.backends.v1]\nx = \xff\xfe\n")
    install(site, "empty", entry("weft", "m"))
    (site / "empty-1.0.dist-info" / "METADATA").unlink()
    names = {found.name: found.distribution for found in scan()}
    assert names["warp"] == "good"
    assert "x" not in names


def test_a_stale_egg_info_hides_no_plugin_and_is_reported(
    site: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "warp-kernels", entry("warp", "m"), version="1.1")
    stale = tmp_path_factory.mktemp("checkout")
    monkeypatch.syspath_prepend(str(stale))
    egg = stale / "warp_kernels.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: warp-kernels\nVersion: 1.0\n")
    assert [found.version for found in scan() if found.name == "warp"] == ["1.1"]
    (group,) = [group for group in hidden_copies() if group[0].distribution == "warp-kernels"]
    assert [(pathlib.Path(copy.path).name, copy.used) for copy in group] == [
        ("warp_kernels.egg-info", False),
        ("warp_kernels-1.1.dist-info", True),
    ]
    assert group[1].entry_points == ("anyflex.backends.v1: warp",)


def test_a_missing_backend_of_a_known_name_is_refused(
    site: pathlib.Path, scanned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A name of its own: `make test` installs every backend that there is.
    monkeypatch.setitem(install_hints.EXTRAS, "warp", "warp")
    with pytest.raises(BackendRefused, match="not installed"):
        kernel_for(make_spec("warp"), ("warp",), "warp", ())


@pytest.mark.parametrize(
    "group",
    ["anyflex.backends", "anyflex.backend.v1", "anyflex.backends.V1", "anyflex.hooks.v1.0"],
)
def test_a_misspelt_group_is_named(
    group: str, site: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "warp-kernels", entry("warp", "warp_lost", group), {"warp_lost": BACKEND}, "2.5")
    with caplog.at_level(logging.WARNING, "anyflex"):
        assert not [found for found in scan() if found.distribution == "warp-kernels"]
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"warp-kernels 2.5 offers 'warp' in the entry-point group {group!r}" in line
    assert "anyflex.backends.v1" in line


def test_a_group_of_somebody_else_is_his(
    site: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "other", "[anyflex.examples]\nwarp = warp_other:Mine\n", {})
    with caplog.at_level(logging.WARNING, "anyflex"):
        scan()
    assert not caplog.records
