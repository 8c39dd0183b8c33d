"""anyflex in vLLM: the plugin's own tests pass, and it imports public names only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.installed import ROOT, check_imports, run_tests

PLUGIN = ROOT / "plugins" / "vllm"
FILES = sorted([*PLUGIN.glob("src/**/*.py"), *PLUGIN.glob("tests/*.py")])


def test_its_own_tests_pass(tmp_path: Path) -> None:
    # Those that need vLLM are skipped without it, and say so.
    assert " passed" in run_tests(PLUGIN, tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports_public_names_only(file: Path) -> None:
    check_imports(file)
