"""What preflight says of the host: what stops a run fails, what only costs something comes with what to do."""

import resource
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.contract import Context
from tasks.errors import InputError, StageFailed
from tasks.ledger import Ledger, take
from tasks.preflight import node
from tasks.preflight.check import Check, table
from tests.runs import a_run, open_ledger, settings_of


@pytest.fixture
def ledger(database_url: str) -> Iterator[Ledger]:
    with open_ledger(database_url) as opened:
        yield opened


@pytest.fixture
def context(ledger: Ledger, tmp_path: Path, database_url: str) -> Context:
    """Of a run on one CPU slot; `look_at` replaces its settings and its layout."""
    run = a_run(ledger, "run-1")
    claim, _ = take(ledger, "run-1", "preflight", frozenset({"preflight"}))
    return Context(run, claim, settings_of(tmp_path, database_url), lambda _: None)


def look_at(context: Context, layout: Any = None, **settings: Any) -> dict[str, Check]:
    run = context.run
    if layout is not None:
        spec = run.spec.model_copy(
            update={
                "layout": type(run.spec)
                .model_validate({**run.spec.model_dump(mode="json"), "layout": layout})
                .layout
            }
        )
        run = SimpleNamespace(spec=spec, run_id=run.run_id, pins=run.pins)  # type: ignore[assignment]
    changed = Context(run, context.claim, context.settings.model_copy(update=settings), context.submit)
    return {check.check: check for check in node.node_checks(changed)}


def test_too_few_open_files_are_said_with_what_to_do(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 524288))
    found = look_at(context)["open files"]
    assert found.ok
    assert "1024 (up to 524288)" in found.found
    assert "LimitNOFILE=" in found.to_do


def test_a_port_range_among_the_ports_of_clients_is_said(context: Context) -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert look_at(context, port_range=(low - 10, high))["port range"].to_do
    assert not look_at(context, port_range=(low - 10, low - 1))["port range"].to_do


def test_an_address_that_clients_cannot_reach_stops_the_run(context: Context) -> None:
    assert look_at(context)["network"].ok
    elsewhere = look_at(context, spark_master="spark://head:7077")["network"]
    assert elsewhere.error is StageFailed
    assert "reached from this host only" in elsewhere.found
    foreign = look_at(context, serve_host="203.0.113.9")["network"]
    assert "no address of this host" in foreign.found
    assert "ip -brief address" in foreign.found


def test_a_clock_that_is_off_is_said(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not look_at(context)["clock"].to_do
    late = SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(minutes=3))
    monkeypatch.setattr(node, "datetime", late)
    found = look_at(context)["clock"]
    assert "180 s off" in found.found
    assert found.to_do


class _Driver:
    """The functions of pynvml that are asked here: GPU 0 is well, GPU 1 is throttled and not persistent."""

    class NVMLError(Exception):
        pass

    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetPowerManagementLimit = staticmethod(lambda gpu: (700000, 450000)[gpu])
    nvmlDeviceGetPowerManagementDefaultLimit = staticmethod(lambda gpu: 700000)
    nvmlDeviceGetPersistenceMode = staticmethod(lambda gpu: (1, 0)[gpu])


def test_a_throttled_gpu_is_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "workers", lambda _: 1)
    monkeypatch.setitem(sys.modules, "pynvml", _Driver)  # type: ignore[arg-type]
    found = look_at(context, {"tensor_parallel": 1})
    assert found["power limit"].found == "GPU 1: 450 W, and the default is 700 W"
    assert found["power limit"].to_do == "`nvidia-smi -pl 700`, unless somebody meant it"
    assert found["persistence mode"].found == "GPU 1: off"
    assert all(check.ok for check in (found["power limit"], found["persistence mode"]))


def test_more_ranks_than_one_need_nccl(context: Context, tmp_path: Path) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    packages = tmp_path / "environment" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    found = look_at(context, {"tensor_parallel": 2}, python_serving=python)["NCCL"]
    assert found.error is InputError
    assert "layout.tensor_parallel" in found.found
    (packages / "nvidia_nccl_cu13-2.28.dist-info").mkdir()
    (packages / "nvidia_nccl_cu13-2.28.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.28\n"
    )
    assert (
        look_at(context, {"tensor_parallel": 2}, python_serving=python)["NCCL"].found
        == "nvidia-nccl-cu13 2.28"
    )


def test_the_table_holds_what_found_needed_and_what_to_do() -> None:
    checks = [
        Check("clock", "9 s off", "within 5 s", to_do="let chrony keep it"),
        Check("ports", "all", "some"),
    ]
    lines = table([check.document() for check in checks]).splitlines()
    assert lines[0].split() == ["what", "found", "needed", "what", "to", "do"]
    assert "let chrony keep it" in lines[1]
    assert lines[2].endswith("-")
