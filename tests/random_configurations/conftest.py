"""Selection of configurations, and the count of cases that each oracle took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.random_configurations.configuration import asked_for, configurations

__all__: list[str] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `configuration` runs once for each that is asked for."""
    if "configuration" in metafunc.fixturenames:
        metafunc.parametrize("configuration", configurations(asked_for()), ids=str)


@pytest.fixture(scope="module")
def oracle_counts(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Filled by the tests of a module, printed after the last."""
    counts: Counter[str] = Counter()
    yield counts
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("")
        for line, count in sorted(counts.items()):
            reporter.write_line(f"  {count:4d}  {line}")
