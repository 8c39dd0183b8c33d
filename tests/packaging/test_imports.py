"""Limits of `import anyflex`: it imports torch and pluggy, and nothing that costs or scans."""

from __future__ import annotations

import sys

import pytest

from bench.import_time import ImportFacts, import_in_a_fresh_process


@pytest.fixture(scope="module")
def facts() -> ImportFacts:
    return import_in_a_fresh_process()


def test_importing_anyflex_looks_for_no_installed_distribution(facts: ImportFacts) -> None:
    assert facts.scans == 0


def test_importing_anyflex_loads_no_compiler_no_driver_and_no_backend(facts: ImportFacts) -> None:
    assert "anyflex" in facts.modules
    assert facts.forbidden() == []


def test_importing_anyflex_imports_no_third_party_but_pluggy(facts: ImportFacts) -> None:
    roots = {module.partition(".")[0] for module in facts.modules}
    strangers = roots - set(sys.stdlib_module_names) - {"anyflex", "pluggy", "torch"}
    assert not {name for name in strangers if not name.startswith("_")}
