"""One deployment for the tests of a file: starting Airflow takes most of a minute."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Real Airflow, PostgreSQL and Spark; engines are stand-ins."""
    made = World(Path(tmp_path_factory.mktemp("chaos")))
    try:
        made.start()
        yield made
    finally:
        made.end()
