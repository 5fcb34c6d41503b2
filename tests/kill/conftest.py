"""A world for each kill test, and the table of what was killed at the end of the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.postgres import Cluster
from tests.kill.harness import HEADER, REPORTS, World
from tests.kill.launcher import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """One server for all kill tests: it imports the stages once."""
    with Launcher() as started:
        yield started


@pytest.fixture
def world(tmp_path: Path, postgres: Cluster, database_url: str, launcher: Launcher) -> Iterator[World]:
    """An empty deployment with a migrated ledger."""
    made = World(tmp_path / "world", database_url, postgres.admin_url, launcher)
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the session killed."""
    if REPORTS:
        terminalreporter.section("kill harness")
        terminalreporter.write_line(HEADER)
        for report in REPORTS:
            terminalreporter.write_line(report.line())
