"""The simulated H200s beside what real ones answered to the same calls (driver 580.159.04, MIG off)."""

import json

import pytest

from benchmarks.gpu import nvml_dump
from tasks.gpu import nvml
from tasks.settings import REPOSITORY
from tests.gpu.node import a_node

RESULTS = REPOSITORY / "benchmarks/results"
REAL = json.loads((RESULTS / "2026-11-30-h200/nvml.json").read_text())
TWO_OF_THEM = json.loads((RESULTS / "2026-11-30-h200-2/nvml.json").read_text())
"""Read later, with what was not asked the first time."""


@pytest.fixture
def simulated(tmp_path):
    with nvml.opened(a_node(tmp_path, "h200-141*2", mig=False).settings):
        yield nvml_dump.dump()


_NOT_SIMULATED = {"decoderCount", "encoderCount", "jpegCount", "ofaCount", "version", "says"}
"""Media engines, which nothing here asks for, and how the struct and the refusal are worded."""


def test_every_profile_is_described_as_the_real_card_does(simulated):
    def described(dump):
        return {
            one["constant"]: {
                name: value for name, value in one["info"].items() if name not in _NOT_SIMULATED
            }
            for one in dump["gpu_instance_profiles"]
            if "id" in one["info"]
        }

    assert described(simulated) == described(REAL)
    assert len(described(REAL)) == 7


def test_what_can_still_be_made_is_counted_as_the_real_card_does(simulated):
    def left(dump):
        return {one["profile"]: one.get("remaining_capacity") for one in dump["gpu_instance_profiles"]}

    assert left(simulated) == left(REAL)


@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetMemoryInfo",
    ],
)
def test_the_card_itself_answers_as_the_real_one_does(simulated, call):
    def answer(dump):
        found = dump["device"][call]
        return found["error"] if isinstance(found, dict) and "error" in found else found

    assert answer(simulated) == answer(REAL)


def test_an_idle_card_says_that_it_is_idle(simulated):
    real = REAL["device"]["nvmlDeviceGetCurrentClocksThrottleReasons"]  # its name before driver 535
    assert simulated["device"]["nvmlDeviceGetCurrentClocksEventReasons"] == real


def test_an_instance_may_lie_where_the_real_card_lets_it(simulated):
    places = {
        str(one["profile"]): one["placements"]
        for one in simulated["gpu_instance_profiles"]
        if "placements" in one
    }
    assert places == TWO_OF_THEM["placements"]


def test_what_health_and_changes_ask_is_answered_as_the_real_card_does(simulated):
    assert simulated["asked_by_the_project"] == TWO_OF_THEM["asked_by_the_project"]


def test_its_name_is_that_of_the_card_and_says_that_it_is_simulated(simulated):
    assert simulated["device"]["nvmlDeviceGetName"] == f"{REAL['device']['nvmlDeviceGetName']} (simulated)"


def test_no_mig_device_is_refused_the_same_way(simulated):
    assert simulated["mig_device_0"]["error"] == REAL["mig_device_0"]["error"]
