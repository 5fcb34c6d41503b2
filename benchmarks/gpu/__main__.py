"""One step of the benchmarks on the GPU machine; see the package."""

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.kit import Kit, gpu_suffix

if TYPE_CHECKING:
    from benchmarks.gpu.loads import Load


def main() -> None:
    """Do the step that is named."""
    given = _parser().parse_args()
    kit = Kit()
    (kit / "logs").mkdir(parents=True, exist_ok=True)
    globals()[f"_{given.step.replace('-', '_')}"](kit, given)


def _nvml(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.nvml_dump import dump

    kit.write("nvml", dump())


def _limits(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.limits import measure

    kit.write(f"limits{gpu_suffix()}", measure())


def _checkpoint(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.checkpoint import make

    kit.write("checkpoint", make(kit.model("none"), tiny=given.tiny))


def _convert(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.convert import convert

    kit.write(f"convert-{given.scheme}", convert(kit, given.scheme, given.limit_s))


def _releases(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.releases import releases

    kit.write("releases", releases(kit))


def _begin(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.checks import compare_inventory
    from benchmarks.gpu.deployment import Deployment
    from benchmarks.gpu.traces import Traces

    flags = kit / "serving/vllm-flags.json"
    if not flags.exists():
        flags.write_text(json.dumps(_known_flags(kit)))
    at = Deployment(kit)
    at.begin()
    Traces.now(at).keep(at)
    kit.write(f"inventory{gpu_suffix()}", compare_inventory(at))


def _preflight(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import checks, stages
    from benchmarks.gpu.deployment import Deployment

    at = Deployment(kit)
    frozen = stages.freeze(at, given.label, given.scheme)
    kit.write(f"preflight-{given.label}", {"frozen": frozen, **checks.preflight(at, given.label)})


def _weights(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import stages
    from benchmarks.gpu.deployment import Deployment

    kit.write(f"weights-{given.label}", stages.weights(Deployment(kit), given.label))


def _probe(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.deployment import Deployment
    from tasks.cli.probe import probe

    kit.write(f"probe-{given.label}", probe(Deployment(kit).settings)[0])


def _finish(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.deployment import Deployment

    Deployment(kit).end()


def _start(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import workers
    from benchmarks.gpu.deployment import Deployment

    at = Deployment(kit, json.loads(given.settings))
    found = workers.start(at, given.label, given.model, _serving(given))
    kit.write(f"start-{given.label}", {**found, "settings": json.loads(given.settings)})


def _dispatch(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.deployment import Deployment
    from benchmarks.gpu.dispatch import dispatch

    for number, load in enumerate(_loads(given)):
        name = f"{given.label}-{load.name}{given.suffix}"
        found = dispatch(Deployment(kit), given.label, name, load, given.seed + 10 * number)
        kit.write(f"dispatch-{name}", found)


def _offline(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.engine import ENVIRONMENT
    from benchmarks.gpu.offline import offline

    cache, workers = _copied_cache(kit)
    os.environ |= {
        "VLLM_CACHE_ROOT": str(cache),
        # Compiled code is found again only where this is as it was for the workers.
        "VLLM_CONFIG_ROOT": str(workers / "config"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **ENVIRONMENT,
    }
    for found in offline(kit, given.model, _serving(given), _loads(given), given.seed, not given.on_cpu):
        kit.write(f"offline-{given.label}-{found['load']}", found)


def _copied_cache(kit: Kit) -> tuple[Path, Path]:
    """A copy of what the workers have compiled, so that theirs stays what they made; and where theirs is."""
    there = kit / f"home{gpu_suffix()}/cache"
    workers = next(there.glob("vllm-*/*"), there / "none")
    cache = kit / "home/cache-offline"
    if not cache.exists() and workers.is_dir():
        shutil.copytree(workers, cache)
    return cache, workers


def _kill(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import faults
    from benchmarks.gpu.deployment import Deployment

    found = faults.kill(Deployment(kit), given.label, given.victim)
    kit.write(f"kill-{given.victim}-{given.label}", found)


def _hang(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import faults
    from benchmarks.gpu.deployment import Deployment

    at = Deployment(kit, json.loads(given.settings))
    kit.write(f"hang-{given.label}", faults.hang(at, given.label))


def _kill_keeper(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import faults
    from benchmarks.gpu.deployment import Deployment

    kit.write(f"kill-keeper-{given.label}", faults.kill_keeper_and_reap(Deployment(kit), given.label))


def _stop(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import workers
    from benchmarks.gpu.deployment import Deployment

    kit.write(f"stop-{given.label}", workers.stop(Deployment(kit), given.label))


def _wait_for(kit: Kit, given: argparse.Namespace) -> None:
    import time

    while not (kit / "results" / f"{given.label}.json").exists():
        time.sleep(0.5)


def _sequence(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.sequence import carry_out

    carry_out(kit, given.plan, given.gpu, given.cores)


def _serving(given: argparse.Namespace) -> dict[str, Any]:
    serving: dict[str, Any] = {
        "max_model_len": given.max_model_len,
        "max_num_seqs": given.max_num_seqs,
        **json.loads(given.serving),
    }
    return serving


def _loads(given: argparse.Namespace) -> "list[Load]":
    from benchmarks.gpu.loads import parse

    return [parse(load) for load in given.loads]


def _known_flags(kit: Kit) -> dict[str, Any]:
    """As set-up reads them, from the help of the installed vLLM's source: starting it costs 13 s."""
    source = next((kit / "serving").glob("lib/python*/site-packages/vllm"))
    text = "".join(path.read_text() for path in (source / "engine").glob("arg_utils.py"))
    text += (source / "entrypoints/openai/cli_args.py").read_text()
    flags = set(re.findall(r'"(--[a-z0-9][a-z0-9-]*)"', text))
    return {"version": _version(kit), "flags": sorted(flags)}


def _version(kit: Kit) -> str:
    found = next((kit / "serving").glob("lib/python*/site-packages/vllm*-*.dist-info"), None)
    return found.name.removesuffix(".dist-info").rpartition("-")[2] if found else "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("nvml", "limits", "releases", "begin", "finish"):
        steps.add_parser(name)
    steps.add_parser("checkpoint").add_argument("--tiny", action="store_true")
    convert = steps.add_parser("convert")
    convert.add_argument("scheme", choices=("fp8", "awq", "awq-cpu", "w4"))
    convert.add_argument("--limit-s", type=float, help="when the converter is ended")
    sequence = steps.add_parser("sequence")
    sequence.add_argument("plan", type=Path)
    sequence.add_argument("--gpu", type=int, default=0, help="that its steps work on")
    sequence.add_argument("--cores", help="that its steps run on, as 0-15")
    labelled = {
        name: steps.add_parser(name)
        for name in (
            *("start", "dispatch", "offline", "kill", "kill-keeper", "hang", "stop", "probe", "wait-for"),
            *("preflight", "weights"),
        )
    }
    for step in labelled.values():
        step.add_argument("label", help="names the run and the result")
    labelled["kill"].add_argument("victim", choices=("api", "engine"))
    labelled["preflight"].add_argument("--scheme", default="fp8")
    for name in ("start", "hang"):
        labelled[name].add_argument(
            "--settings", default="{}", help="of the deployment, as JSON: WORKER_SILENCE_S and such"
        )
    for name in ("start", "offline"):
        step = labelled[name]
        step.add_argument("--model", default="none")
        step.add_argument("--max-model-len", type=int, default=4096)
        step.add_argument("--max-num-seqs", type=int, default=256)
        step.add_argument("--serving", default="{}", help="further fields of the spec's `serving`, as JSON")
    for name in ("dispatch", "offline"):
        labelled[name].add_argument("loads", nargs="+", help="256x512x1536 and the like; see `loads`")
        labelled[name].add_argument("--seed", type=int, default=1)
    labelled["dispatch"].add_argument("--suffix", default="")
    labelled["offline"].add_argument("--on-cpu", action="store_true")
    return parser


if __name__ == "__main__":
    main()
