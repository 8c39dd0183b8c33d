"""Versions of vLLM that nobody has tried are refused, with the cure."""

from __future__ import annotations

import pytest
from anyflex_vllm.versions import TESTED, check_version

import anyflex


@pytest.mark.parametrize("version", ["0.31.2", "0.3.2", "0.320.0", "1.32.0", "dev"])
def test_untested_versions_are_refused(version: str) -> None:
    message = (
        f"must run with vLLM .*{TESTED[-1]}.*, got vLLM {version}: .*pip uninstall anyflex-vllm"
    )
    with pytest.raises(anyflex.ArgumentError, match=message):
        check_version(version)


@pytest.mark.parametrize("suffix", [".0", ".7", ".0+cpu", ".1.dev3+g01ab.cpu"])
@pytest.mark.parametrize("minor", TESTED)
def test_every_patch_of_a_tested_version_is_taken(minor: str, suffix: str) -> None:
    check_version(minor + suffix)
