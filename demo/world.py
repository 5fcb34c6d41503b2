"""Where the demo keeps what it makes, and the run spec it asks for."""

import secrets
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from demo.airflow_services import Airflow
from demo.children import Children, write_private
from demo.postgres import Cluster
from tasks.errors import InputError
from tasks.settings import Settings

REPOSITORY = Path(__file__).resolve().parent.parent

LOCAL_MODELS = {
    "smollm2-135m": "local/smollm2-135m-instruct-qwen2",
    "tiny-qwen3.5": "local/tiny-qwen3.5",
}
"""Models that are built here, and the repository names under which the local hub offers them."""

SCHEMES = ("awq", "fp8", "none")

SIMULATED_NODES = {"dgx-a100": "a100-80*8"}
"""Nodes whose GPUs are simulated, and what their driver is told to be."""


@dataclass(frozen=True)
class World:
    """One demo: everything it keeps is below `home`."""

    home: Path
    model: str = "smollm2-135m"
    scheme: str = "awq"
    hub_url: str | None = None
    rows: int | None = None
    """How many of the prompts are asked; None: all."""
    sim: str | None = None
    """One of SIMULATED_NODES; None: no GPU at all."""

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise InputError(f"SCHEME={self.scheme} is not known; one of {', '.join(SCHEMES)}")
        if self.model not in LOCAL_MODELS and "/" not in self.model:
            raise InputError(
                f"MODEL={self.model} is not known; one of {', '.join(LOCAL_MODELS)}, or a repository on the hub as "
                f"Qwen/Qwen3.5-0.8B"
            )

        if self.rows is not None and self.rows < 1:
            raise InputError(f"ROWS={self.rows} is not possible; at least one prompt is asked")
        if self.sim is not None and self.sim not in SIMULATED_NODES:
            raise InputError(f"SIM={self.sim} is not known; one of {', '.join(SIMULATED_NODES)}")

    @property
    def deployment(self) -> str:
        """The mark of all processes of this demo."""
        return f"demo-{sha256(str(self.home).encode()).hexdigest()[:8]}"

    @property
    def is_local(self) -> bool:
        """Whether the model is built here, rather than fetched from the real hub."""
        return self.model in LOCAL_MODELS

    @property
    def repo(self) -> str:
        """The repository that the run spec names."""
        return LOCAL_MODELS.get(self.model, self.model)

    @property
    def hub_root(self) -> Path:
        """The local hub's repositories: one folder each, `owner/name`."""
        return self.home / "hub"

    @property
    def prompts(self) -> Path:
        """Holds prompts.parquet and prompts.jsonl."""
        return self.home / "prompts"

    @property
    def answers(self) -> Path:
        """Where the run publishes; one folder per model and scheme, so that they can be compared."""
        name = f"{self.model.replace('/', '--')}-{self.scheme}"
        # Answers that are there would leave nothing to cut GPUs for.
        return self.home / "answers" / (f"{name}-on-{self.sim}" if self.sim else name)

    @property
    def pipeline(self) -> Path:
        """The pipeline's own home: releases, locks, logs."""
        return self.home / "pipeline"

    @cached_property
    def children(self) -> Children:
        """The long-lived processes: database, Airflow's services, the hub."""
        return Children(self.home / "children", self.deployment)

    @cached_property
    def cluster(self) -> Cluster:
        """The database server."""
        return Cluster(self.home / "postgres", self.children)

    def airflow(self) -> Airflow:
        """Airflow's services; the database must run."""
        return Airflow(
            self.home / "airflow",
            self.children,
            database_url=self.cluster.url("airflow"),
            dags=REPOSITORY / "dags",
            plugins=REPOSITORY / "plugins",
            environment=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        """The pipeline's settings, as Airflow's tasks and the command line get them; no secret among them."""
        variables = {
            "QWEN_PIPELINE_HOME": str(self.pipeline),
            "QWEN_PIPELINE_DEPLOYMENT": self.deployment,
            "QWEN_PIPELINE_LEDGER_URL_FILE": str(self._ledger_url_file),
            # The stage `start` loads the release in the next minute, and proves the same.
            "QWEN_PIPELINE_TRY_RELEASES": "false",
            "AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[2]"}',
        }
        variables |= {f"QWEN_PIPELINE_{name.upper()}": str(value) for name, value in self._simulation.items()}
        return variables | ({"HF_ENDPOINT": self.hub_url} if self.hub_url else {})

    def settings(self) -> Settings:
        """The same settings for this process."""
        return Settings(
            home=self.pipeline,
            deployment=self.deployment,
            ledger_url_file=self._ledger_url_file,
            node="local",
            **self._simulation,
        )

    def write_secrets(self) -> None:
        """The files that the settings name; the database must run."""
        secret = self.pipeline / "secret"
        if not secret.exists():
            write_private(secret, secrets.token_hex(32))
        write_private(self._ledger_url_file, self.cluster.url("ledger"))

    def spec(self) -> dict[str, Any]:
        """The run spec, as REST's conf."""
        return {
            "version": 1,
            "tenant": "demo",
            "model": {"repo": self.repo, "revision": "main"},
            "convert": {
                "scheme": self.scheme,
                "group_size": 64,
                "calibration_tokens": 512,
                # Half the scales of the default take half the time, and two minutes are saved on two cores.
                "n_grid": 10,
                # Every forward pass costs seconds here: enough to tell a damaged release from a sound one.
                "gate": {"tokens": 512},
            },
            "node": "local",
            # Two workers, whatever they stand for: this machine has few cores.
            "layout": {"mig": {"3g.40gb": 2}, "gpus": 1} if self.sim else {"cpu": 2},
            "serving": {
                "max_model_len": 2048,
                "max_num_seqs": 32,
                "max_num_batched_tokens": 2048,
                "dtype": _fastest_dtype(self.model),
                "kv_cache_memory_mb": 512,
                "enforce_eager": True,
            },
            "batch": {
                "input": str(self.prompts / "prompts.parquet"),
                "output": str(self.answers),
                "id": "row_id",
                "prompt": "prompt",
                "sampling": {"max_tokens": 48, "temperature": 0.0},
            },
            "limits": {"deadline": "1h", "max_row_error_rate": 0.02, "partial": False},
        }

    @property
    def _simulation(self) -> dict[str, Any]:
        if self.sim is None:
            return {}
        return {"nvml": f"sim:{SIMULATED_NODES[self.sim]}", "nvml_state": self.pipeline / f"{self.sim}.json"}

    @property
    def _ledger_url_file(self) -> Path:
        return self.pipeline / "ledger-url"


def _fastest_dtype(model: str) -> str:
    """On this CPU: without instructions for bfloat16 torch multiplies it six times slower than float32. vLLM computes
    the gated delta nets of Qwen3.5 in bfloat16 alone."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    fast = bool(flags & {"avx512_bf16", "amx_bf16"})
    return "bfloat16" if fast or "qwen3.5" in model.lower() else "float32"
