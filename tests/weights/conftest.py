from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import settings
from tasks.node import processes
from tests.weights.converted import CONVERTED, run_in_converting_environment
from tests.weights.world import REPO, World, write_checkpoint


@pytest.fixture
def world(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A deployment, and a hub that serves a small Qwen2."""
    made = World(tmp_path, database_url)
    write_checkpoint(made.repositories / REPO)
    # Children of this process carry the marks of `settings.current()`.
    monkeypatch.setenv("QWEN_PIPELINE_HOME", str(made.home))
    settings.current.cache_clear()
    with made.hub:
        yield made
        left = processes.end_all(processes.find, grace_s=0)
    made.ledger.close()
    settings.current.cache_clear()
    assert not left


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `base/NAME`, `made/NAME-SCHEME/CANDIDATE` and `measured/NAME-SCHEME.json`."""
    folder = tmp_path_factory.mktemp("conversions")
    run_in_converting_environment("convert_all.py", folder, *(":".join(one) for one in CONVERTED))
    return folder
