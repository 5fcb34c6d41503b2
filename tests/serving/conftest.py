from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.pool_world import World, make_world


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run with two CPU slots that has come as far as provision, in a deployment of its own."""
    made = make_world(tmp_path, database_url, monkeypatch)
    made.add_run("run-1")
    try:
        yield made
    finally:
        made.close()
