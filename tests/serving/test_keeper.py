"""When a keeper ends its pool by itself; what it does to workers is in test_pool_replaces.py."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.ledger import Run
from tasks.serving import device_memory, keeper
from tasks.serving.keeper import Keeper
from tasks.serving.launch import Slot
from tasks.serving.pools import Wanted
from tasks.settings import Settings
from tasks.spec import Serving
from tests.runs import a_spec


def a_keeper(useful_s: float, lease_left_s: float = 3600.0) -> Keeper:
    """Without workers, ledger and processes."""
    job = SimpleNamespace(settings=Settings(), serving=a_spec().serving)

    async def made() -> Keeper:
        return Keeper(cast(Any, None), cast(Any, job), cast(Any, None), useful_s)

    one = asyncio.run(made())
    one._renewed(keeper.now_s() + lease_left_s)
    return one


@pytest.mark.parametrize(
    ("useful_s", "lease_left_s", "reason"),
    [
        (-1.0, 3600.0, "the deadline of its run is over"),
        (3600.0, 0.0, "the lease expires and could not be renewed"),
    ],
)
def test_a_pool_ends_by_the_keepers_clock(useful_s: float, lease_left_s: float, reason: str) -> None:
    one = a_keeper(useful_s, lease_left_s)
    asyncio.run(asyncio.wait_for(one._until_over([]), 5))
    assert one._why_over == reason


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        (
            (True, True),
            "1 of 2 worker(s) are left, and serving.min_workers is 2; the last one given up: killed",
        ),
        ((True, False), None),  # it was never whole: whoever starts it decides
    ],
)
def test_a_pool_that_was_whole_for_a_moment_only_ends_too(
    served: tuple[bool, bool], reason: str | None
) -> None:
    one = a_keeper(useful_s=3600.0)
    one._job.serving = one._job.serving.model_copy(update={"min_workers": 2})  # type: ignore[misc]
    given_up = SimpleNamespace(served=served[0], given_up=1.0, message="killed")
    left = SimpleNamespace(served=served[1], given_up=None, message="")
    one._workers = cast(Any, [given_up, left])
    one._end_when_too_few_are_left()
    assert one._why_over == reason


def test_a_pool_with_lease_and_use_goes_on() -> None:
    one = a_keeper(useful_s=3600.0)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(one._until_over([]), 0.5))


def test_a_pool_is_of_use_until_its_runs_deadline_and_long_enough_for_a_late_start() -> None:
    settings = Settings(start_timeout_s=600.0)
    spec = a_spec(limits={"deadline": "6h"})

    def useful(started_ago: timedelta) -> float:
        began = datetime.now(UTC) - started_ago
        return keeper.useful_s(Run("run-1", spec, {}, began, began, None), settings)

    early, late, too_late = (useful(timedelta(hours=hours)) for hours in (0, 5, 100))
    assert early - late == pytest.approx(5 * 3600, abs=5)
    assert 6 * 3600 < early < 9 * 3600
    assert settings.start_timeout_s < too_late < late


@pytest.mark.parametrize(
    ("slots", "sequences"),
    [
        ([Slot("gpus-0", "gpus", uuids=("GPU-1",)), Slot("gpus-1", "gpus", uuids=("GPU-2",))], 512),
        ([Slot("gpus-0", "gpus", uuids=("GPU-1", "GPU-2"))], 256),
        ([Slot("mig-0", "mig", uuids=("MIG-1",))], 256),
        ([Slot("cpu-0", "cpu", cores=(0,))], 256),
    ],
)
def test_what_the_spec_leaves_open_is_as_measured_on_one_whole_gpu(
    slots: list[Slot], sequences: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"hidden_size": 4096, "num_hidden_layers": 32}
    config = {"architectures": ["Qwen3_5ForCausalLM"], **text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(device_memory, "kind", lambda slot, settings: "NVIDIA H200")
    pool = SimpleNamespace(wanted=Wanted("release", tmp_path, tuple(slots), 1))
    found = keeper._settled(Serving(), cast(Any, pool), Settings())
    assert found.max_num_seqs == sequences
