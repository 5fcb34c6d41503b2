"""What happens to a simulated node from outside: reboots, resets, other people's processes, faults."""

from typing import Any

from tasks.gpu.simulated.products import PRODUCTS
from tasks.gpu.simulated.state import State, StateFile


def reboot(file: StateFile) -> None:
    """Layouts and processes are gone; so is MIG mode, except on Ampere, where a pending change comes into force."""
    with file.changing() as state:
        state["boot"] += 1
        state["kernel_log"] = []
        for gpu in state["gpus"]:
            survives = PRODUCTS[state["product"]].mode_survives_reboot
            gpu["mig_pending"] = gpu["mig_pending"] and survives
            _reset(gpu)


def reset(file: StateFile, index: int) -> None:
    """What `nvidia-smi --gpu-reset` does to an idle GPU: the pending mode comes into force, the layout goes."""
    with file.changing() as state:
        _reset(state["gpus"][index])


def set_mode(file: StateFile, on: bool, *indices: int) -> None:
    """MIG mode as an administrator has set it long ago; by default of all GPUs."""
    with file.changing() as state:
        for index in indices or range(len(state["gpus"])):
            gpu = state["gpus"][index]
            gpu["mig_pending"] = on
            _reset(gpu)


def start_process(
    file: StateFile, index: int, gi: int | None = None, pid: int = 4242, name: str = "/usr/bin/training"
) -> None:
    """Somebody's process on a GPU, or on the first compute instance of one of its GPU instances."""
    process = {"pid": pid, "name": name, "gi": gi, "ci": None if gi is None else 0, "memory_mb": 1000}
    with file.changing() as state:
        state["gpus"][index]["processes"].append(process)


def end_processes(file: StateFile) -> None:
    """All of them."""
    with file.changing() as state:
        for gpu in state["gpus"]:
            gpu["processes"] = []


def put(file: StateFile, index: int, **values: Any) -> None:
    """Set anything of a GPU; `state.new_node` lists what there is."""
    with file.changing() as state:
        unknown = values.keys() - state["gpus"][index].keys()
        assert not unknown, f"a simulated GPU has no {unknown}"
        state["gpus"][index].update(values)


def fail(file: StateFile, function: str, error: int, nth: int = 1, times: int = 1) -> None:
    """Let `function` end with `error` at its nth call from now, in whichever process; -1 times is for ever."""
    with file.changing() as state:
        state["faults"].append({"function": function, "nth": nth, "error": error, "times": times})


def layout(state: State) -> list[list[tuple[int, int, int, tuple[tuple[int, int], ...]]]]:
    """By GPU, sorted: profile, start, size and compute instances (profile, start). For comparing."""
    return [
        sorted(
            (
                each["profile_id"],
                each["start"],
                each["size"],
                tuple(sorted((one["profile_id"], one["start"]) for one in each["compute"])),
            )
            for each in gpu["instances"]
        )
        for gpu in state["gpus"]
    ]


def _reset(gpu: dict[str, Any]) -> None:
    gpu.update(
        mig=gpu["mig_pending"],
        instances=[],
        processes=[],
        ecc_uncorrected=0,
        remap_pending=False,
        throttle=0,
        recovery_action=0,
        lost=False,
    )
