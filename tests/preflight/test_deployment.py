"""Whether what a deployment needs is there: secrets, interpreters, Java, schema, ports, a torch for the driver."""

import json
import os
import socket
from dataclasses import replace

import psycopg
import pytest

from tasks.errors import InputError, StageFailed
from tasks.gpu import inventory
from tasks.gpu.inventory import Gpu, Inventory
from tasks.preflight import deployment as deployment_checks
from tasks.spec.model import NO_BATCH
from tasks.weights import store

PINS = {"commit": "c" * 40, "release_id": "name-awq-g128-0123456789ab"}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("break_it", "error", "message"),
    [
        (lambda home: (home / "secret").unlink(), InputError, "secret: .* cannot be read .*mode 0600"),
        (lambda home: (home / "secret").chmod(0o644), InputError, "secret: .*readable by others: chmod 600"),
    ],
)
def test_a_secret_that_is_missing_or_open_is_named(preflight, spec, settings, break_it, error, message):
    break_it(settings.home)
    with pytest.raises(error, match=message):
        preflight(spec())


def test_a_batch_is_refused_where_no_file_holds_the_ledgers_url(preflight, spec):
    with pytest.raises(InputError, match=r"ledger url: Spark's driver .* set QWEN_PIPELINE_LEDGER_URL_FILE"):
        preflight(spec(), ledger_url_file=None)


def test_a_pool_needs_no_file_that_holds_the_ledgers_url(preflight, spec):
    preflight(spec(batch={"input": NO_BATCH, "output": NO_BATCH}), ledger_url_file=None)


def test_an_interpreter_that_is_missing_is_named_with_its_setting(preflight, spec, tmp_path):
    missing = tmp_path / "none" / "python"
    with pytest.raises(
        StageFailed,
        match=rf"environments: no interpreter that this user may execute at {missing} \(QWEN_PIPELINE_PYTHON_SPARK\)",
    ):
        preflight(spec(), python_spark=missing)


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("echo 'openjdk version \"11.0.2\" 2019' >&2", r"java: .*11\.0\.2.*Spark needs 17 or later"),
        ("exit 1", "java: .*says 'nothing'"),
    ],
)
def test_a_java_that_is_too_old_or_broken_is_refused(preflight, spec, tmp_path, says, message):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n{says}\n")
    java.chmod(0o755)
    with pytest.raises(StageFailed, match=message):
        preflight(spec(), java_home=tmp_path)


def test_no_java_is_said_with_what_to_install(preflight, spec, tmp_path):
    with pytest.raises(StageFailed, match=rf"java: there is none in {tmp_path}/bin: install openjdk-17"):
        preflight(spec(), java_home=tmp_path)


def test_a_schema_that_is_behind_is_named(preflight, spec, database_url, ledger):
    with psycopg.connect(database_url) as admin:
        admin.execute("delete from public._yoyo_migration where migration_id = '0002_leases'")
    with pytest.raises(StageFailed, match="ledger: 0002_leases not applied: run `qwen-pipeline migrate`"):
        preflight(spec())


def test_too_few_free_ports_are_said(preflight, spec):
    with (
        socket.create_server(("127.0.0.1", 20900)),
        pytest.raises(StageFailed, match=r"ports: 10 of 20900-20910"),
    ):
        preflight(spec(), port_range=(20900, 20910))


def test_torch_must_suit_the_driver_where_there_are_gpus(preflight, spec, monkeypatch, settings):
    gpus = (Gpu(0, "GPU-0", "NVIDIA H100", 80 * GIB, False),)
    monkeypatch.setattr(inventory, "read", lambda settings: Inventory(gpus, "535.1", (12, 2), ""))
    full = spec(layout={"tensor_parallel": 1})
    packages = settings.python_serving.parent.parent / "lib" / "python3.11" / "site-packages"
    with pytest.raises(StageFailed, match="driver: there is no torch in the serving environment"):
        preflight(full)
    for version, message in [
        ("2.13.0+cpu", "is for CPU"),
        ("2.13.0+cu130", r"needs CUDA 13, .* runs up to 12\.2"),
    ]:
        info = packages / f"torch-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        with pytest.raises(StageFailed, match=f"driver: .*{message}"):
            preflight(full)
        (info / "METADATA").unlink()
        info.rmdir()
    info = packages / "torch-2.13.0+cu128.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cu128\n")
    found = [check["found"] for check in preflight(full).facts["checks"] if check["check"] == "driver"]
    assert "driver 535.1, torch 2.13.0+cu128" in found


def test_what_was_measured_of_the_model_on_the_gpu_is_said(preflight, spec, monkeypatch, settings):
    gpus = (Gpu(0, "GPU-0", "NVIDIA H200", 141 * GIB, False),)
    monkeypatch.setattr(inventory, "read", lambda settings: Inventory(gpus, "580.1", (13, 0), ""))
    packages = settings.python_serving.parent.parent / "lib" / "python3.11" / "site-packages"
    (packages / "torch-2.13.0.dist-info").mkdir(parents=True)
    (packages / "torch-2.13.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
    )
    folder = store.download_folder(settings, "owner/name", PINS["commit"])
    folder.mkdir(parents=True)
    manifest = store.Manifest({}, {"model.safetensors": store.File(18 * GIB, "0" * 64)})
    (folder / store.DOWNLOAD_MANIFEST).write_text(manifest.dumps())
    text = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16, "vocab_size": 248_320}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    full = {"layout": {"tensor_parallel": 1}, "convert": {"scheme": "fp8"}, "serving": {}}
    checks = {check["check"]: check for check in preflight(spec(**full)).facts["checks"]}
    assert checks["serving.max_num_seqs"]["found"].startswith("512. Qwen3.5-9B, fp8, NVIDIA H200: ")
    assert "expected, not measured, of 0.32.0" in checks["serving.max_num_seqs"]["found"]
    assert not checks["serving.max_num_seqs"]["to_do"]


def test_a_vllm_that_cannot_read_the_uuids_of_mig_devices_is_refused(
    preflight, spec, settings, monkeypatch, simulated
):
    """vLLM #41848."""
    there = replace(inventory.read(settings.model_copy(update=simulated)), simulated=False)
    monkeypatch.setattr(inventory, "read", lambda settings: there)
    packages = settings.python_serving.parent.parent / "lib" / "python3.11" / "site-packages"
    for name, version in (("torch", "2.13.0+cu128"), ("vllm", "0.23.1")):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    with pytest.raises(StageFailed, match=r"vllm: .*has vLLM 0\.23\.1.*install 0\.24 or later"):
        preflight(spec(layout={"mig": {"3g.40gb": 1}}), **simulated)
    (packages / "vllm-0.23.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n"
    )
    preflight(spec(layout={"mig": {"3g.40gb": 1}}), **simulated)


def test_java_is_looked_for_where_the_environment_says(monkeypatch, tmp_path, settings):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(StageFailed, match=f"in {tmp_path}/bin"):
        deployment_checks._java(settings)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(StageFailed, match="on the PATH"):
        deployment_checks._java(settings)
