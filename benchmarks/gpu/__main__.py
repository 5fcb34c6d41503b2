"""One step of the benchmarks on the GPU machine; see the package."""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit import Kit


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

    kit.write("limits", measure())


def _checkpoint(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.checkpoint import make

    kit.write("checkpoint", make(kit.model("none"), tiny=given.tiny))


def _convert(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.convert import convert

    kit.write(f"convert-{given.scheme}", convert(kit, given.scheme))


def _begin(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.deployment import Deployment
    from benchmarks.gpu.workers import read_inventory

    flags = kit / "serving/vllm-flags.json"
    if not flags.exists():
        flags.write_text(json.dumps(_known_flags(kit)))
    at = Deployment(kit)
    at.begin()
    kit.write("inventory", read_inventory(at))


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

    for number, (prompt_tokens, answer_tokens, rows) in enumerate(_loads(given)):
        name = f"{given.label}-{prompt_tokens}-{answer_tokens}{given.suffix}"
        found = dispatch(
            Deployment(kit),
            given.label,
            name,
            rows=rows,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            seed=given.seed + 10 * number,
            shared=given.shared,
        )
        kit.write(f"dispatch-{name}", found)


def _offline(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu.engine import ENVIRONMENT
    from benchmarks.gpu.offline import offline

    at = kit / "home/cache" / f"vllm-{_version(kit)}"
    os.environ |= {
        # Where the workers of the same deployment keep theirs.
        "VLLM_CACHE_ROOT": str(at),
        "TRITON_CACHE_DIR": str(at / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(at / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **ENVIRONMENT,
    }
    for found in offline(kit, given.model, _serving(given), _loads(given), given.seed, not given.on_cpu):
        kit.write(f"offline-{given.label}-{found['prompt_tokens']}-{found['answer_tokens']}", found)


def _kill_api(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import workers
    from benchmarks.gpu.deployment import Deployment

    kit.write(f"kill-api-{given.label}", workers.kill_api_server(Deployment(kit), given.label))


def _kill_keeper(kit: Kit, given: argparse.Namespace) -> None:
    from benchmarks.gpu import workers
    from benchmarks.gpu.deployment import Deployment

    kit.write(f"kill-keeper-{given.label}", workers.kill_keeper_and_reap(Deployment(kit), given.label))


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

    carry_out(kit, given.plan)


def _serving(given: argparse.Namespace) -> dict[str, Any]:
    serving: dict[str, Any] = {
        "max_model_len": given.max_model_len,
        "max_num_seqs": given.max_num_seqs,
        **json.loads(given.serving),
    }
    return serving


def _loads(given: argparse.Namespace) -> list[tuple[int, int, int]]:
    """`256x512x1536`: prompt tokens, answer tokens, rows."""
    return [tuple(map(int, load.split("x"))) for load in given.loads]  # type: ignore[misc]


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
    for name in ("nvml", "limits", "begin", "finish"):
        steps.add_parser(name)
    steps.add_parser("checkpoint").add_argument("--tiny", action="store_true")
    steps.add_parser("convert").add_argument("scheme", choices=("fp8", "w4"))
    steps.add_parser("sequence").add_argument("plan", type=Path)
    for name in ("start", "dispatch", "offline", "kill-api", "kill-keeper", "stop", "wait-for"):
        step = steps.add_parser(name)
        step.add_argument("label", help="names the run and the result")
        if name in ("start", "offline"):
            step.add_argument("--model", default="none")
            step.add_argument("--max-model-len", type=int, default=4096)
            step.add_argument("--max-num-seqs", type=int, default=256)
            step.add_argument(
                "--serving", default="{}", help="further fields of the spec's `serving`, as JSON"
            )
        if name == "start":
            step.add_argument(
                "--settings", default="{}", help="of the deployment, as JSON: PREWARM_CHATS and such"
            )
        if name in ("dispatch", "offline"):
            step.add_argument("loads", nargs="+", help="PROMPTxANSWERxROWS, as 256x512x1536")
            step.add_argument("--seed", type=int, default=1)
        if name == "dispatch":
            step.add_argument("--suffix", default="")
            step.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
        if name == "offline":
            step.add_argument("--on-cpu", action="store_true")
    return parser


if __name__ == "__main__":
    main()
