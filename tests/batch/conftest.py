from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import settings
from tasks.node import processes
from tests.batch.world import World


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """An empty deployment that this process acts for."""
    made = World(tmp_path, database_url)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    yield made
    left = processes.end_all(lambda: processes.find(), grace_s=0)
    settings.current.cache_clear()
    assert not left
