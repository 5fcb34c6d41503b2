"""The command line and the environment of a worker."""

from pathlib import Path

import pytest

from tasks.serving import launch
from tasks.serving.launch import Slot
from tasks.spec import Serving

CPU = Slot("cpu-1", "cpu", cores=(2, 3))
MIG = Slot("mig-0", "mig", uuids=("MIG-1",))
TWO_GPUS = Slot("gpus-0", "gpus", uuids=("GPU-1", "GPU-2"))


def flags(slot: Slot, known: frozenset[str] | None = None, **serving: object) -> list[str]:
    return launch.arguments(
        Serving.model_validate(serving),
        slot,
        release_path=Path("/store/release"),
        release_id="tiny",
        host="127.0.0.1",
        port=21000,
        known_flags=known,
    )


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def environment(slot: Slot) -> dict[str, str]:
    return launch.environment(
        "run-1/worker-0",
        slot,
        key="the key",
        first_internal_port=21001,
        cache=Path("/cache"),
        temporary=Path("/tmp/qwen-1/worker-0"),
        extra={"OWN": "1"},
    )


@pytest.mark.parametrize("slot", [CPU, MIG, TWO_GPUS])
def test_sizes_are_always_passed_on(slot: Slot) -> None:
    words = flags(slot, max_num_seqs=7, max_num_batched_tokens=99, max_model_len=64)
    assert words[0] == "/store/release"
    assert value(words, "--max-num-seqs") == "7"
    assert value(words, "--max-num-batched-tokens") == "99"
    assert value(words, "--max-model-len") == "64"
    assert value(words, "--served-model-name") == "tiny"


def test_a_cpu_slot_gets_its_cores_and_a_kv_cache_of_known_size() -> None:
    words = flags(CPU, kv_cache_memory_mb=64)
    assert value(words, "--kv-cache-memory-bytes") == str(64 * 2**20)
    assert value(words, "--dtype") == "bfloat16"
    assert "--enforce-eager" in words
    assert "--gpu-memory-utilization" not in words
    assert environment(CPU)["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert "TORCHDYNAMO_DISABLE" in environment(CPU)
    assert "--kv-cache-memory-bytes" in flags(CPU), "vLLM would take half of the machine"


def test_a_gpu_slot_sees_its_devices_only() -> None:
    words = flags(TWO_GPUS, gpu_memory_utilization=0.5)
    assert value(words, "--tensor-parallel-size") == "2"
    assert value(words, "--gpu-memory-utilization") == "0.5"
    assert "--enforce-eager" not in words
    assert environment(TWO_GPUS)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert environment(MIG)["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert "--tensor-parallel-size" not in flags(MIG)


def test_extra_args_become_flags() -> None:
    words = flags(CPU, extra_args={"block_size": 16, "enable-x": True, "enable_y": False, "name": "a b"})
    assert words[-6:] == ["--block-size", "16", "--enable-x", "--no-enable-y", "--name", "a b"]


def test_the_key_is_in_the_environment_and_nothing_of_airflow_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "hidden")
    monkeypatch.setenv("QWEN_PIPELINE_SECRET_FILE", "/secret")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    found = environment(CPU)
    assert found["QWEN_POOL_KEY"] == "the key"
    # vLLM's compile cache depends on variables of its own names: with the key among them, no pool would find
    # what another one has compiled.
    assert not any(name.startswith("VLLM_") and value == "the key" for name, value in found.items())
    assert (found["VLLM_PORT"], found["SPT_NOENV"], found["OWN"]) == ("21001", "1", "1")
    assert "hidden" not in found.values()
    ours = {name for name in found if name.startswith("QWEN_PIPELINE_")}
    assert ours == {"QWEN_PIPELINE_DEPLOYMENT", "QWEN_PIPELINE_PART"}
    assert "the key" not in " ".join(flags(CPU))


@pytest.mark.parametrize(
    ("facts", "slot"),
    [
        ({"slot_id": "cpu-1", "kind": "cpu", "cores": [2, 3]}, CPU),
        ({"slot_id": "mig-0", "kind": "mig", "uuid": "MIG-1"}, MIG),
        ({"slot_id": "gpus-0", "kind": "gpus", "uuids": ["GPU-1", "GPU-2"]}, TWO_GPUS),
    ],
)
def test_a_slot_is_the_same_from_provision_and_from_the_ledger(facts: dict[str, object], slot: Slot) -> None:
    assert Slot.from_facts(facts) == slot
    assert Slot.from_facts(slot.as_facts()) == slot


def test_overload_is_answered_with_503_where_vllm_can() -> None:
    words = flags(CPU, frozenset({"max-num-queued-reqs"}), max_num_seqs=16)
    assert int(value(words, "--max-num-queued-reqs")) > 1.5 * 16, "clients aim at that"
    assert "--max-num-queued-reqs" not in flags(CPU, frozenset({"host"}), max_num_seqs=16)


def test_typed_fields_become_flags() -> None:
    words = flags(MIG, chunked_prefill=False, kv_offload_gb=4.5)
    assert "--no-enable-chunked-prefill" in words
    assert value(words, "--kv-offloading-size") == "4.5"
    assert not any("chunked" in word or "offload" in word for word in flags(MIG))
