"""Whether the node has what the layout asks for."""

import json

import pytest

from tasks.errors import InputError, StageFailed
from tasks.gpu import inventory, nvml
from tasks.ledger import leases, take
from tasks.settings import Quota
from tasks.weights import store
from tests.gpu.node import Node

PINS = {"commit": "c" * 40, "release_id": "name-awq-g128-0123456789ab"}
GIB = 1 << 30


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
def without_rights(simulated, settings):
    """The simulated node, as somebody sees it who may not change it."""
    library = nvml.simulation(settings.model_copy(update=simulated))
    with library.file.changing() as state:
        state["needs_root"] = True
    return simulated


def rights_of(result):
    return next(check for check in result.facts["checks"] if check["check"] == "layout.rights")


def test_a_node_that_the_run_may_not_cut_is_refused_before_weights_are_made(preflight, spec, without_rights):
    with pytest.raises(StageFailed, match=r"layout\.rights: .*may not change .*QWEN_PIPELINE_MIG_COMMAND"):
        preflight(spec(layout={"mig": {"3g.40gb": 2}}), **without_rights)


def test_no_right_is_wanted_for_a_node_that_is_cut_already(preflight, spec, without_rights, settings):
    node = Node(settings.model_copy(update=without_rights))
    with node.file.changing() as state:
        state["needs_root"] = False
    node.put(0, ("3g.40gb", 0))
    with node.file.changing() as state:
        state["needs_root"] = True
    found = preflight(spec(layout={"mig": {"3g.40gb": 1}}), **without_rights)
    assert rights_of(found)["found"] == "none is wanted: nothing is to be changed"


def test_what_auto_comes_to_may_need_rights_that_are_not_there(preflight, spec, without_rights):
    found = preflight(spec(layout={"mig": "auto"}), **without_rights)
    assert "may not change" in rights_of(found)["found"]
    assert rights_of(found)["to_do"]


def test_a_privileged_helper_that_sudo_does_not_let_through_is_refused(preflight, spec, without_rights):
    refused = ("sh", "-c", "echo 'sudo: a password is required' >&2; exit 1")
    with pytest.raises(StageFailed, match=r"layout\.rights: .*'sudo: a password is required'.*sudoers line"):
        preflight(spec(layout={"mig": {"3g.40gb": 2}}), **without_rights, mig_command=refused)


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


TWO = {"default": Quota(devices=2)}
FOUR_CORES = (0, 1, 2, 3)


@pytest.mark.parametrize(
    "layout", [{"mig": {"3g.40gb": 2}}, {"mig": "auto", "gpus": 3}, {"tensor_parallel": 1, "gpus": 3}]
)
def test_a_layout_that_the_quota_never_allows_is_refused_before_weights_are_made(
    preflight, spec, tmp_path, layout
):
    node = {"nvml": "sim:h100-80*3", "nvml_state": tmp_path / "node"}
    with pytest.raises(InputError, match=r"layout\.gpus: .* wants 3 device.* may hold 2 at once"):
        preflight(spec(layout=layout), quotas=TWO, **node)


def test_a_layout_within_the_quota_passes_and_so_does_a_run_that_has_its_devices(
    preflight, spec, ledger, monkeypatch
):
    monkeypatch.setattr(inventory, "available_cores", lambda: FOUR_CORES)
    with pytest.raises(InputError, match="may hold 2 at once"):
        preflight(spec(), quotas=TWO)
    claim, _ = take(ledger, "run-1", "provision", frozenset())
    leases.take(claim, "local", [f"cpu:{core}" for core in FOUR_CORES], 60.0)
    preflight(spec(), quotas=TWO)
    result = preflight(spec(), quotas={"default": Quota(devices=4)})
    assert "layout.gpus" in {check["check"] for check in result.facts["checks"]}
