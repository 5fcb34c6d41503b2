"""A deployment of the pipeline below the kit: real PostgreSQL, real settings, runs that begin at `provision`.

What is bypassed: download, convert and prepare are not executed; what they would have found is written into
the ledger as their facts. Airflow and Spark are not there. All else is the stages themselves.
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import ENVIRONMENT, FLAGS
from benchmarks.gpu.kit import Kit, gpu_index, gpu_suffix
from demo.children import Children, write_private
from demo.postgres import Cluster
from tasks import ledger as ledger_package
from tasks import pool_key
from tasks import settings as deployment
from tasks.gpu import inventory
from tasks.ledger import Ledger, take
from tasks.ledger.migrations import migrate
from tasks.serving import pools
from tasks.settings import REPOSITORY, Settings
from tasks.spec import parse
from tasks.stages import Result, execute

_OF_THE_MACHINE = (
    *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CC", "CXX"),
    *("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"),
)
"""Variables by which a machine says where its driver and compiler are, and what of it must not be used."""

_FIRST_PORT, _PORTS = 21000, 1000
"""Of the first GPU's deployment, and how many each has."""


class Deployment:
    """One for each GPU of the kit, all with one ledger; found again by every step."""

    def __init__(self, kit: Kit, settings: Mapping[str, str] | None = None) -> None:
        """
        Args:
            settings: further ones, by their names without prefix.
        """
        self.kit = kit
        self.home = kit / f"home{gpu_suffix()}"
        self.node = f"bench{gpu_suffix()}"
        self._further = settings or {}
        self._children = Children(kit / "postgres" / "children", f"{kit.mark}-postgres")
        self._cluster = Cluster(kit / "postgres", self._children, databases=("ledger",))
        self._enter()

    def begin(self) -> None:
        """Make what is missing: the secret, the ledger with its schema, the folder of compiled kernels."""
        home = self.home
        home.mkdir(parents=True, exist_ok=True)
        if gpu_suffix() and not (home / "cache").is_symlink():
            (self.kit / "home/cache").mkdir(parents=True, exist_ok=True)
            (home / "cache").symlink_to(self.kit / "home/cache")
        if not (home / "secret").exists():
            write_private(home / "secret", secrets.token_hex(32))
        self._cluster.start()
        url = self._cluster.url("ledger")
        write_private(home / "ledger", url)
        migrate(url, REPOSITORY / "sql/migrations")

    def end(self) -> None:
        """End PostgreSQL."""
        self._cluster.stop()

    @property
    def settings(self) -> Settings:
        """Of this process and of all that it starts."""
        return deployment.current()

    def ledger(self) -> Ledger:
        """A context manager that closes it."""
        return Ledger(self.settings.database_url(), self.settings.sql)

    def add_run(self, run_id: str, model: str, serving: dict[str, Any]) -> None:
        """A run that has come as far as `provision`, with a checkpoint of the kit as its release."""
        release = self.kit.model(model)
        on_gpu = bool(inventory.read(self.settings).gpus)
        spec = parse(
            {
                "model": {"repo": f"bench/{model}"},
                "convert": {"scheme": {"none": "none", "fp8": "fp8"}.get(model, "awq")},
                "node": self.node,
                "layout": {"tensor_parallel": 1, "gpus": [gpu_index()]} if on_gpu else {"cpu": 1},
                "serving": {**serving, **({"extra_args": self._flags(serving)} if on_gpu else {})},
                "batch": {"input": "/none", "output": "/none", "prompt": "prompt"},
            }
        )
        with self.ledger() as ledger:
            ledger_package.register(ledger, run_id, spec, {"asked": spec.model_dump(mode="json")})
            for stage, facts in (
                ("prepare", {"to_do": 1}),
                ("convert", {"release_id": f"bench-{model}", "path": str(release)}),
            ):
                claim, _ = take(ledger, run_id, stage, frozenset({stage}))
                claim.finish("done", "written by the benchmark", facts)

    def execute(self, stage: str, run_id: str) -> Result:
        """One stage, in this process."""
        return execute(stage, run_id, settings=self.settings)

    def pool(self, run_id: str) -> tuple[pools.Pool, str]:
        """The open pool and its key.

        Raises:
            SystemExit: there is none.
        """
        with self.ledger() as ledger:
            found = pools.open_pool(ledger, run_id)
        if found is None:
            raise SystemExit(f"run {run_id} has no open pool")
        return found, pool_key.derive(self.settings.secret(), found.pool_id)

    def log(self, run_id: str, name: str) -> Path:
        """A log of the run's pool."""
        return self.settings.logs / run_id / f"{name}.log"

    def _flags(self, serving: dict[str, Any]) -> dict[str, Any]:
        return {**FLAGS, **serving.get("extra_args", {})}

    def _enter(self) -> None:
        """Settings travel to keepers by the environment."""
        home, first_port = self.home, _FIRST_PORT + _PORTS * gpu_index()
        for name in [name for name in os.environ if name.startswith("QWEN_PIPELINE_")]:
            if name != "QWEN_PIPELINE_WORKER_COMMAND":
                del os.environ[name]
        values = {
            "HOME": str(home),
            "DEPLOYMENT": f"{self.kit.mark}-pool{gpu_suffix()}",
            "NODE": self.node,
            "PORT_RANGE": json.dumps([first_port, first_port + _PORTS - 1]),
            "LEDGER_URL_FILE": str(home / "ledger"),
            "PYTHON_SERVING": str(self.kit.python("serving")),
            "PYTHON_CONVERT": str(self.kit.python("convert")),
            "SERVING_FLAGS": str(self.kit / "serving/vllm-flags.json"),
            "KEEPER_UNIT": "never",  # a unit would not stay on the cores that the plan was given
            "WORKER_ENVIRONMENT": json.dumps({**_of_the_machine(), **ENVIRONMENT}),
        }
        for name, value in {**values, **self._further}.items():
            os.environ[f"QWEN_PIPELINE_{name}"] = value
        deployment.current.cache_clear()


def _of_the_machine() -> dict[str, str]:
    return {name: os.environ[name] for name in _OF_THE_MACHINE if name in os.environ}
