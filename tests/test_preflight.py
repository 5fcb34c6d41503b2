"""Preflight looks at everything that a run needs, changes nothing, and says all problems at once."""

import json
import os
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import psycopg
import pytest

from tasks import ledger as ledger_package
from tasks import stages
from tasks.errors import InputError, StageFailed, Unavailable
from tasks.gpu import inventory, nvml
from tasks.gpu.inventory import Gpu, Inventory
from tasks.gpu.simulated import control
from tasks.preflight import check_spec
from tasks.preflight import deployment as deployment_checks
from tasks.settings import Settings
from tasks.weights import hub, store, tensors
from tests.runs import a_spec, open_ledger, settings_of

PINS = {"commit": "c" * 40, "release_id": "name-awq-g128-0123456789ab"}
GIB = 1 << 30


@pytest.fixture
def ledger(database_url):
    with open_ledger(database_url) as opened:
        yield opened


@pytest.fixture
def settings(tmp_path, database_url, monkeypatch):
    """A deployment in which everything is there; the interpreters of other environments are this one's."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text("0123456789abcdef")
    (home / "secret").chmod(0o600)
    (home / "flags.json").write_text(json.dumps({"version": "0.32.0", "flags": ["--seed", "--max-loras"]}))
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(hub, "files_of", lambda *_: [SimpleNamespace(size=GIB // 1024)])
    return settings_of(
        home,
        database_url,
        python_convert=python,
        python_serving=python,
        python_spark=python,
        serving_flags=home / "flags.json",
        port_range=(20900, 20939),
    )


@pytest.fixture
def rows(tmp_path):
    """Two rows with the columns `id` and `prompt`."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n')
    return path


@pytest.fixture
def spec(rows, tmp_path):
    """A spec with which nothing is wrong; arguments replace whole fields."""

    def make(**changes):
        batch = {"input": str(rows), "output": str(tmp_path / "answers"), "id": "id", "prompt": "prompt"}
        small = {"serving": {"kv_cache_memory_mb": 64}, "batch": {**batch, **changes.pop("batch", {})}}
        return a_spec(**{**small, **changes})

    return make


@pytest.fixture
def preflight(ledger, settings):
    """Execute preflight for a spec."""

    def act(of, **changes):
        ledger_package.register(ledger, "run-1", of, {"asked": of.model_dump(mode="json"), **PINS})
        return stages.execute("preflight", "run-1", settings=settings.model_copy(update=changes))

    return act


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_when_all_is_well_nothing_changes_and_every_check_is_listed(preflight, spec, settings, tmp_path):
    preflight(spec())  # the first makes the lock file of its stage
    before = files_below(tmp_path)
    result = preflight(spec())
    assert not result.changed
    lock_file = settings.locks / "run-1-preflight.lock"
    assert {**files_below(tmp_path), lock_file: 0} == {**before, lock_file: 0}
    checks = {check["check"]: check for check in result.facts["checks"]}
    assert all(
        set(check) == {"check", "found", "needed", "ok", "to_do"} and check["ok"] for check in checks.values()
    )
    assert set(checks) == {
        *("batch.input", "batch.output", "batch.sampling.max_tokens", "serving.extra_args"),
        *("node", "layout", "layout.cpu", "disk"),
        *("environments", "java", "secret", "ledger", "ports"),
        *("open files", "connections", "port range", "network", "clock"),
    }
    assert checks["batch.input"]["found"] == "1 file(s) with columns id, prompt"
    assert checks["layout"]["found"].startswith("no NVIDIA driver on this node; ")


def test_all_problems_are_said_at_once_and_name_their_fields(spec, settings, tmp_path):
    wrong = spec(
        batch={"prompt": "text", "output": str(tmp_path / "prompts.jsonl"), "sampling": {"max_tokens": 4096}},
        serving={"max_model_len": 4096, "extra_args": {"max_lora": 2}},
        convert={"calibration": str(tmp_path / "nothing.txt")},
    )
    with pytest.raises(InputError) as refused:
        check_spec(wrong, settings)
    first, *problems = str(refused.value).splitlines()
    assert first == "5 problems found before anything was started:"
    assert [problem.strip().split(":")[0] for problem in problems] == [
        "serving.extra_args.max_lora",
        "batch.sampling.max_tokens",
        "batch.prompt",
        "batch.output",
        "convert.calibration",
    ]
    assert "'text'" in problems[2]
    assert "id, prompt" in problems[2]


def test_a_good_spec_is_not_refused(spec, settings):
    check_spec(spec(), settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "/nowhere/at/all"}, r"batch\.input: there is no file or folder /nowhere/at/all"),
        ({"id": "key"}, r"batch\.id: there is no column 'key'.*id, prompt"),
        ({"prompt": None, "messages": "chat"}, r"batch\.messages: there is no column 'chat'.*id, prompt"),
    ],
)
def test_input_that_is_missing_is_refused(spec, settings, change, message):
    with pytest.raises(InputError, match=message):
        check_spec(spec(batch=change), settings)


def test_a_path_with_an_open_date_is_left_for_later(spec, settings):
    check_spec(spec(batch={"input": "/nowhere/{{ ds }}", "output": "/dev/null/{{ ds }}"}), settings)


def test_what_the_node_does_not_have_is_refused_with_what_it_has(preflight, spec):
    with pytest.raises(InputError, match=r"layout\.mig: .*no NVIDIA driver on this node") as refused:
        preflight(spec(layout={"mig": {"3g.40gb": 2}}))
    assert "one problem found" in str(refused.value)


def test_more_workers_than_cores_are_refused(preflight, spec, monkeypatch):
    monkeypatch.setattr(inventory, "available_cores", lambda: (0, 1))
    with pytest.raises(InputError, match=r"layout\.cpu: 3 workers .* may use 2"):
        preflight(spec(layout={"cpu": 3}))


def test_workers_that_do_not_fit_into_memory_are_refused(preflight, spec):
    with pytest.raises(InputError, match=r"layout\.cpu: 1 worker\(s\) need about 97\d\.\d GiB each"):
        preflight(spec(serving={"kv_cache_memory_mb": 1_000_000}))


def test_on_cpu_the_size_of_the_cache_must_be_said(preflight, spec):
    with pytest.raises(InputError, match=r"serving\.kv_cache_memory_mb: on CPU it must be set"):
        preflight(spec(serving={}))


def test_another_node_than_the_specs_is_refused(preflight, spec):
    with pytest.raises(InputError, match="node: the spec asks for 'local', and this host is 'dgx-9'"):
        preflight(spec(), node="dgx-9")


def test_a_full_disk_is_said_with_what_is_wanted(preflight, spec, monkeypatch):
    monkeypatch.setattr(hub, "files_of", lambda *_: [SimpleNamespace(size=1 << 60)])
    with pytest.raises(StageFailed, match=r"disk: .* a model of 1073741824\.0 GiB wants 2362232012\.8 GiB"):
        preflight(spec())


def test_a_hub_that_does_not_answer_is_downloads_to_report(preflight, spec, monkeypatch):
    def fail(*_):
        raise Unavailable("no route")

    monkeypatch.setattr(hub, "files_of", fail)
    checks = {check["check"]: check for check in preflight(spec()).facts["checks"]}
    assert "not known without the hub" in checks["disk"]["found"]


def test_a_folder_on_the_node_has_a_size_without_the_hub(preflight, spec, tmp_path, monkeypatch):
    monkeypatch.delattr(hub, "files_of")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x" * 1024)
    checks = {check["check"]: check for check in preflight(spec(model={"repo": str(model)})).facts["checks"]}
    assert checks["disk"]["found"].endswith("0.0 GiB wanted")


def test_a_downloaded_model_is_measured_where_it_is_and_its_group_size_checked(
    preflight, spec, settings, monkeypatch
):
    monkeypatch.delattr(hub, "files_of")
    folder = store.download_folder(settings, "owner/name", PINS["commit"])
    folder.mkdir(parents=True)
    manifest = store.Manifest({}, {"model.safetensors": store.File(10, "0" * 64)})
    (folder / store.DOWNLOAD_MANIFEST).write_text(manifest.dumps())

    def refuse(place, size):
        assert (place, size) == (folder, 64)
        raise InputError("convert.group_size: 64 does not divide the 96 inputs of a layer")

    monkeypatch.setattr(tensors, "check_group_size", refuse)
    with pytest.raises(InputError, match=r"one problem.*\n  convert\.group_size: 64 does not divide"):
        preflight(spec(convert={"scheme": "awq", "group_size": 64}))


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


def test_an_interpreter_that_is_missing_is_named_with_its_setting(preflight, spec, tmp_path):
    missing = tmp_path / "none" / "python"
    with pytest.raises(
        StageFailed, match=rf"environments: no interpreter at {missing} \(QWEN_PIPELINE_PYTHON_SPARK\)"
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


@pytest.fixture
def simulated(tmp_path):
    """Settings of a node with one simulated H100, MIG on."""
    where = {"nvml": "sim:h100-80*1", "nvml_state": tmp_path / "node"}
    library = nvml.simulation(Settings(home=tmp_path, **where))
    control.set_mode(library.file, True)
    return where


def test_a_layout_is_planned_and_its_gpus_are_said_to_be_simulated(preflight, spec, simulated):
    result = preflight(spec(layout={"mig": {"3g.40gb": 2}}), **simulated)
    checks = {check["check"]: check for check in result.facts["checks"]}
    assert checks["layout"]["found"].startswith("SIMULATED GPUs: 1 GPU(s)")
    assert "workers run on CPU cores in their stead" in checks["driver"]["found"]
    assert checks["ports"]["found"].endswith("21 wanted")


def test_a_profile_that_the_driver_does_not_offer_is_refused_with_those_that_it_does(
    preflight, spec, simulated
):
    with pytest.raises(
        InputError, match=r"layout\.mig: GPU 0 .* has no profile 3g\.39gb; its driver offers 1g"
    ):
        preflight(spec(layout={"mig": {"3g.39gb": 1}}), **simulated)


@pytest.fixture
def large_model(settings):
    """30 GiB of weights, downloaded."""
    folder = store.download_folder(settings, "owner/name", PINS["commit"])
    folder.mkdir(parents=True)
    manifest = store.Manifest({}, {"model.safetensors": store.File(30 * GIB, "0" * 64)})
    (folder / store.DOWNLOAD_MANIFEST).write_text(manifest.dumps())
    shape = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}
    (folder / "config.json").write_text(json.dumps(shape))


def test_a_model_that_no_device_of_the_layout_holds_is_refused_with_the_numbers(
    preflight, spec, large_model, simulated
):
    small = spec(layout={"mig": {"1g.10gb": 2}}, convert={"scheme": "none"})
    with pytest.raises(InputError, match=r"layout\.mig: a device of 9\.8 GiB does not hold .*weights 30\.0"):
        preflight(small, **simulated)


def test_an_auto_layout_is_shown_with_the_numbers_it_comes_from(preflight, spec, large_model, simulated):
    found = preflight(spec(layout={"mig": "auto"}, convert={"scheme": "none"}), **simulated)
    checks = {check["check"]: check["found"] for check in found.facts["checks"]}
    assert "auto: 2 x 3g.40gb" in checks["layout"]
    assert "weights 30.0" in checks["layout.memory"]


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


def test_a_user_error_and_an_operators_are_said_together_and_the_users_comes_first(preflight, spec, tmp_path):
    with pytest.raises(InputError, match="2 problems") as refused:
        preflight(spec(batch={"prompt": "text"}), java_home=tmp_path)
    assert "batch.prompt:" in str(refused.value)
    assert "java:" in str(refused.value)


def test_java_is_looked_for_where_the_environment_says(monkeypatch, tmp_path, settings):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(StageFailed, match=f"in {tmp_path}/bin"):
        deployment_checks._java(settings)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(StageFailed, match="on the PATH"):
        deployment_checks._java(settings)
