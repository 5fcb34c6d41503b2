"""A deployment with one real worker, and what each way did to it."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.gpu import series
from benchmarks.gpu.deployment import Deployment
from benchmarks.gpu.kit import Kit
from benchmarks.gpu.workers import registered
from benchmarks.real_engine.ways import ANSWER_TOKENS, SERVING, WAYS, chats
from tasks import ledger as ledger_package
from tasks.ledger import take
from tasks.serving import launch, ports
from tasks.settings import Settings
from tasks.spec import Serving, parse


class Bench:
    """A deployment with one real worker, and what each way did to it."""

    def __init__(self, home: Path, release: Path, prompts: Path, rows: int) -> None:
        self.home, self.release = home, release
        kit = Kit(home / "kit")
        (kit / "models").mkdir(parents=True)
        (kit / "models" / "none").symlink_to(release.absolute())
        usual = Settings()
        own = ("python_serving", "python_convert", "serving_flags")
        further = {name.upper(): str(getattr(usual, name)) for name in own}
        self.at = Deployment(kit, {**further, "WORKER_ENVIRONMENT": "{}", "SPARK_CORES": "1"})
        self.prompts = home / "prompts.parquet"
        pq.write_table(_spread(pq.read_table(prompts), rows), self.prompts)
        self.rows = rows
        cores = sorted(os.sched_getaffinity(0))
        self.engine_cores, self.client_cores = {cores[0]}, set(cores[1:]) or set(cores)

    def turns(self, rounds: int) -> Iterator[dict[str, Any]]:
        """What each way did, in turn."""
        self.at.begin()
        try:
            self.at.add_run("pool", "none", SERVING)
            os.sched_setaffinity(0, self.engine_cores)
            try:
                self.at.execute("provision", "pool")
                self.at.execute("start", "pool")
                os.sched_setaffinity(0, self.client_cores)
                # An engine's first requests cost more than those after them; nobody's turn pays for that.
                self._turn("bare loop", -1)
                for number in range(rounds):
                    for place in range(len(WAYS)):
                        way = WAYS[(place + number) % len(WAYS)]
                        yield {"round": number, "way": way, **self._turn(way, number)}
            finally:
                self.at.execute("stop", "pool")
                self.at.execute("restore", "pool")
            for number in range(rounds):
                yield {"round": number, "way": "run-batch", **self._run_batch(number)}
        finally:
            self.at.end()

    def _turn(self, way: str, number: int) -> dict[str, Any]:
        pool, key = self.at.pool("pool")
        assert pool.registry is not None
        worker = registered(pool.registry, key)[0]["url"]
        folder = self.home / f"{way.replace(' ', '-')}-{number}"
        folder.mkdir()
        target = {"registry": pool.registry, "worker": worker, "release": pool.wanted.release_id}
        if way == "spark":
            target["run"] = self._run_for_spark(number, folder, target, pool.pool_id)
        command = [sys.executable, "-m", "benchmarks.real_engine", str(self.release), str(self.prompts)]
        command += ["--way", way, "--home", str(folder), "--target", json.dumps(target)]
        with series.Sampler(lambda now_s: series.scrape(worker, now_s)) as sampler:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, env={**os.environ, "BENCH_KEY": key}, check=True
            )
        return {**self._figures(sampler), **json.loads(done.stdout.splitlines()[-1])}

    def _run_for_spark(self, number: int, folder: Path, target: Mapping[str, str], pool_id: str) -> str:
        """A run whose rows are prepared and whose pool is the one there is."""
        run_id = f"spark-{number}"
        batch = {"input": str(self.prompts), "output": str(folder / "answers"), "prompt": "prompt"}
        # The seed makes a batch of its own of each round: one that is answered is not asked again.
        sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "seed": number}
        spec = parse(
            {
                "model": {"repo": "bench/none"},
                "layout": {"cpu": 1},
                "serving": SERVING,
                "batch": {**batch, "id": "row_id", "sampling": sampling},
            }
        )
        start = {"pool_id": pool_id, "registry": target["registry"], "model": target["release"]}
        with self.at.ledger() as ledger:
            known = {"asked": spec.model_dump(mode="json"), "release_id": target["release"]}
            ledger_package.register(ledger, run_id, spec, known)
            for stage, facts in (("download", {"path": str(self.release)}), ("start", start)):
                claim, _ = take(ledger, run_id, stage, frozenset({stage}))
                claim.finish("done", "written by the benchmark", facts)
        self.at.execute("prepare", run_id)
        return run_id

    def _run_batch(self, number: int) -> dict[str, Any]:
        folder = self.home / f"run-batch-{number}"
        folder.mkdir()
        with (folder / "in.jsonl").open("w") as file:
            for row_id, chat in chats(self.prompts):
                body = {"model": "bench", "max_tokens": ANSWER_TOKENS, "temperature": 0.0}
                line = {"custom_id": row_id, "method": "POST", "url": "/v1/chat/completions"}
                file.write(json.dumps({**line, "body": {**body, "messages": json.loads(chat)}}) + "\n")
        settings = self.at.settings
        block = ports.reserve("127.0.0.1", settings.port_range, settings.ports_per_worker)
        port = block.first
        command = [*launch.command(settings)[:-1], "run-batch"]
        command += ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--enable-metrics"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--model", str(self.release)]
        command += ["--served-model-name", "bench", *self._engine_flags()]
        with (folder / "log").open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._engine_environment(folder, port + 1),
                preexec_fn=lambda: os.sched_setaffinity(0, self.engine_cores),
            )
            try:
                began, url = time.monotonic(), f"http://127.0.0.1:{port}"
                while not _answers(url):
                    if process.poll() is not None or time.monotonic() - began > 600:
                        raise SystemExit(f"run-batch did not start: {(folder / 'log').read_text()[-2000:]}")
                    time.sleep(0.2)
                with series.Sampler(lambda now_s: series.scrape(url, now_s)) as sampler:
                    process.wait(3600)
            finally:
                process.kill()
                process.wait()
                block.release()
        answered = sum(1 for _ in (folder / "out.jsonl").open())
        return {**self._figures(sampler), "answered": answered}

    def _engine_flags(self) -> list[str]:
        """As the worker's, less what only a server has."""
        slot = launch.Slot("cpu-0", "cpu", cores=tuple(self.engine_cores))
        words = launch.arguments(
            Serving.model_validate(SERVING), slot, release_path=self.release, release_id="", host="", port=0
        )
        kept = words[words.index("--max-model-len") :]
        for flag in ("--middleware", "--disable-access-log-for-endpoints"):
            at = kept.index(flag)
            del kept[at : at + 2]
        return kept

    def _engine_environment(self, folder: Path, first_port: int) -> dict[str, str]:
        slot = launch.Slot("cpu-0", "cpu", cores=tuple(self.engine_cores))
        cache = self.home / "cache"
        return launch.environment(
            "bench/run-batch",
            slot,
            key="",
            first_internal_port=first_port,
            cache=cache,
            temporary=folder,
            extra={},
        )

    def _figures(self, sampler: series.Sampler) -> dict[str, Any]:
        found = series.summary(sampler.samples, self.rows, SERVING["max_num_seqs"])
        busy_s = _busy_s(sampler.samples)
        return {
            "steady_rows_per_s": found["steady"].get("rows_per_s"),
            "steady_tokens_per_s": found["steady"].get("generated_tokens_per_s"),
            "running_share": found["steady"].get("mean_running_share"),
            "first_to_last_answer_s": round(busy_s, 2),
            "generated_tokens": found["whole"]["generated_tokens"],
        }


def _busy_s(samples: list[series.Sample]) -> float:
    """From the last moment before anything was asked to the first at which all was answered."""
    # The keeper asks for a token now and then while nobody else does: one request is not the beginning.
    in_work = [one.values["running"] + one.values["waiting"] > 1 for one in samples]
    first = samples[max(0, in_work.index(True) - 1)].at_s
    finished = samples[-1].values["finished"]
    return min(one.at_s for one in samples if one.values["finished"] == finished) - first


def _spread(table: pa.Table, rows: int) -> pa.Table:
    """`rows` rows, evenly from the whole."""
    return table.take([number * table.num_rows // rows for number in range(rows)])


def _answers(url: str) -> bool:
    """Whether the engine's counters are there; they are once it is set up."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answered:
            return b"vllm:prompt_tokens_total" in answered.read()
    except OSError:
        return False
