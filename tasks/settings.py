"""Every knob of a deployment, each with its reason. What belongs to one run is in its spec instead.

Values come from the environment (`QWEN_PIPELINE_<NAME>`); `docs/settings.md` lists them. Import is cheap and
reads nothing: call `current()`.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tasks.errors import InputError

REPOSITORY = Path(__file__).resolve().parent.parent


class Notification(BaseModel):
    """One of Airflow's notifiers, and when it is used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on: tuple[Literal["failure", "success", "deadline"], ...] = ("failure",)
    notifier: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    arguments: dict[str, Any] = Field(default_factory=dict)


class Quota(BaseModel):
    """What one tenant may have of this deployment; null: no bound."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: int | None = Field(default=None, ge=1)
    device_hours_per_day: float | None = Field(default=None, gt=0)
    tokens_per_day: int | None = Field(default=None, ge=1)


def _beside_the_interpreter(given: dict[str, Any]) -> Path:
    interpreter: Path = given["python_serving"]
    return interpreter.parent.parent / "vllm-flags.json"


class Settings(BaseSettings):
    """The deployment's settings; frozen, because a run must not see them change under it."""

    model_config = SettingsConfigDict(
        env_prefix="QWEN_PIPELINE_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    home: Path = REPOSITORY / "var" / "pipeline"
    """Everything this deployment keeps on the node lies below: releases, locks, logs, caches. Survives runs."""

    deployment: str = ""
    """Names this deployment in the environment of all its processes, so that a scan of /proc finds them all.
    Default: derived from `home`, so that two deployments on one host never take each other's processes."""

    node: str = "local"
    """The name of this host in run specs and in the ledger; one Airflow queue per node carries the same name."""

    nodes: tuple[str, ...] = ()
    """All hosts of the deployment (a JSON list), for the DAG that reaps on each; default: this one."""

    node_queues: bool = False
    """Whether the Airflow worker of each node serves a queue of the node's name, so that tasks go to their node."""

    nightly: Path | None = None
    """A folder of YAML files, one for each scheduled run; default: home/nightly."""

    retry_delay_s: float = Field(default=20.0, ge=0.0)
    """Between two tries of a task whose failure a retry can mend: a hub or a database that did not answer."""

    wait_step_s: float = Field(default=60.0, ge=1.0)
    """How often a task that waits for what another run holds looks again; in between it holds no worker slot."""

    quotas: dict[str, Quota] = Field(default_factory=dict)
    """By tenant (a JSON object): `devices` (GPUs, or CPU cores) held at once, `device_hours_per_day` and
    `tokens_per_day` (of prompts and answers) of the last 24 hours. A run that would be over them waits, one
    that alone wants more devices is refused, and one whose tenant spends the last token starts no further row. `*` is
    for tenants that are not named."""

    notify: tuple[Notification, ...] = ()
    """Who is told how a run ended, or that its deadline is near (a JSON list of {on, notifier, arguments}; `on` lists
    `failure`, `success`, `deadline`); nobody by default."""

    ledger_url: SecretStr | None = None
    """libpq URL of the ledger. Prefer `ledger_url_file`: a file does not travel to child processes. Runs with a batch
    need it in any case, because Spark's processes get no other."""

    ledger_url_file: Path | None = None
    """A 0600 file that holds the URL. Spark's Python workers inherit its name, never its content."""

    secret_file: Path | None = None
    """A 0600 file with the deployment secret, from which each pool's key is derived (default: home/secret)."""

    sql: Path = REPOSITORY / "sql"
    """Where the migrations and named queries are; another place only for an installed copy without sources."""

    python_convert: Path = REPOSITORY / ".envs/convert/bin/python"
    """Converts weights; an environment of its own, because its pins conflict with Airflow's and vLLM's."""

    python_autoawq: Path = REPOSITORY / ".envs/autoawq/bin/python"
    """The other converter, which few need; `make setup WITH=autoawq` makes its environment."""

    python_serving: Path = REPOSITORY / ".envs/serving/bin/python"
    """Runs vLLM; point it at a CUDA build on a node with GPUs, with this project installed (--no-deps) beside it
    (docs/deployment.md)."""

    python_spark: Path = REPOSITORY / ".envs/spark/bin/python"
    """Drives Spark and runs its Python workers; pyspark clashes with what Airflow's provider requires."""

    serving_flags: Path = Field(default_factory=_beside_the_interpreter)
    """The flags that the installed vLLM knows, read once (`make flags OF=...`) because importing vllm takes 13 s.
    Default: vllm-flags.json in the environment of `python_serving`."""

    spark_master: str = "local[2]"
    """Where Spark runs. The DAG submits to the Airflow connection `spark_default`: name the same master in both,
    because checks and `spark_cores` go by this one."""

    spark_cores: int | None = Field(default=None, ge=1)
    """Tasks that ask at once, each with an event loop of its own; one fills a GPU. null: what the master offers when
    the application starts, which on a cluster may be less than it offers later."""

    spark_prepare_rows: int = Field(default=200_000, ge=1)
    """Rows from which Spark reads the input, on all its cores. Below, the stage `prepare` does, in its own process:
    that takes 0.1 ms a row, and Spark's start about ten seconds."""

    spark_conf: dict[str, str] = Field(default_factory=dict)
    """Further configuration of the application (a JSON object): what a YARN or Kubernetes master needs."""

    spark_history: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Address of a page that lists Spark's applications (a history server, or the master's); the task `run` links
    there. While an application runs whose `spark_conf` says `"spark.ui.enabled": "true"`, it links to its own page."""

    spark_driver_memory: str = "1g"
    """Rows stay in the Python workers and in files, so the driver needs little however large the batch is."""

    java_home: Path | None = None
    """For a host with several Javas; Spark 4 needs 17 or later."""

    serve_host: str = "127.0.0.1"
    """The address workers and keepers bind to. The node's own address where Spark runs on other hosts."""

    port_range: tuple[int, int] = (21000, 21999)
    """Ports for keepers and workers; below the kernel's ephemeral range, so no client socket takes one first."""

    ports_per_worker: int = Field(default=10, ge=4)
    """vLLM opens several ports itself, counting up from VLLM_PORT; ranges of workers must not overlap."""

    start_timeout_s: float = 600.0
    """How long a worker may take to be ready. 200 s were seen for a 9B model with cold compile caches."""

    stop_grace_s: float = 10.0
    """After SIGTERM, before SIGKILL. A clean stop takes vLLM 1 s over HTTP, 10 s over gRPC."""

    drain_s: float = 3.0
    """How long a pool that ends lets requests finish: whoever ends it has no use for their answers."""

    canary_timeout_s: float = 120.0
    """How long one of a worker's first requests may take: kernels are still being compiled in them."""

    prewarm_s: float = 120.0
    """After this long no further round of first requests is sent; rounds end earlier once they are stable."""

    prewarm_rounds: int | None = Field(default=None, ge=0)
    """Rounds of first requests at most; 0: a single chat proves the worker, and the batch's rows warm it. null: 5 on
    GPUs, where kernels are compiled when a shape is first met; 0 on CPU cores, where none are."""

    worker_silence_s: float = 60.0
    """A worker that makes no token and answers no canary for this long is replaced. Longer than the longest
    prefill and the longest compilation that the batch can still meet."""

    memory_tolerance_mb: int = 512
    """GPU memory that may be in use beyond what was before a pool, once it has ended: the driver keeps some."""

    cache_retention_d: float = 30.0
    """Compile caches that no worker used for this long are removed."""

    log_max_mb: int = Field(default=50, ge=1)
    """A worker's log is put aside when it has grown to this."""

    log_keep: int = Field(default=4, ge=1)
    """Logs put aside that are kept for each worker, older attempts' among them."""

    keeper_unit: Literal["auto", "always", "never"] = "auto"
    """Whether keepers run as transient units of systemd, outside of the cgroup of whoever starts them. `auto`:
    where systemd runs: the system's for root, for others their own."""

    worker_attempts: int = Field(default=3, ge=1)
    """Starts of one worker in a row before its slot is given up."""

    worker_settled_s: float = 300.0
    """A worker that has served for this long did not fail at its start: its starts are counted anew."""

    starts_at_once: int | None = Field(default=None, ge=1)
    """Workers of a pool that may load at once; null: as many as the free memory holds."""

    worker_command: tuple[str, ...] = ()
    """What stands before a worker's flags, instead of `vllm serve` of the serving environment (a JSON list)."""

    worker_environment: dict[str, str] = Field(default_factory=dict)
    """Further environment of every worker (a JSON object), such as a vLLM switch that this host needs."""

    lease_s: float = 900.0
    """How long a claim on devices outlives its last renewal: the longest that a dead node's GPUs stay idle."""

    lease_renew_s: float = 60.0
    """How often a keeper renews; several failures in a row must fit into one lease."""

    claim_watch_s: float = 3.0
    """How often an actor checks that it is still the holder: bounds how long two of them overlap."""

    lock_wait_s: float = 30.0
    """How long a successor waits for the node lock of the holder it has ended, before it says busy."""

    registry_poll_s: float = 1.0
    """How often clients ask the keeper who is ready; a change must reach them in under 2 s."""

    request_timeout_s: float = 600.0
    """One request to a worker, answer included; a worker that is silent longer counts as hung."""

    request_timeout_least_s: float = 60.0
    """The least time that a request is given, however short the answers that were seen."""

    engine_patience_s: float = 300.0
    """How long a run waits while no worker answers; a worker that was killed is back within that."""

    batch_wait_s: float = 3600.0
    """How long a run waits for another run of the same batch before it says busy."""

    segment_flush_s: float = 2.0
    """Finished rows are on disk after at most this long; what is lost by a kill is generated again."""

    batch_retention_h: float = Field(default=168.0, ge=24.0)
    """Prepared rows and segments stay this long after all of a batch is published and its last run has ended: with
    them a run of it takes seconds, and a deleted answer file is rebuilt without a GPU. A day at least, because
    tokens of a day are counted by segments."""

    hub_endpoint: str | None = Field(default=None, validation_alias="HF_ENDPOINT")
    """A mirror of the hub; the name is the hub client's own."""

    hub_token: SecretStr | None = Field(default=None, validation_alias="HF_TOKEN")
    """Only for gated repositories; goes to the downloading process alone."""

    hub_connections: int = Field(default=4, ge=1, le=32)
    """Files fetched at once: one connection to the hub's storage seldom fills a server's line."""

    weights_wait_s: float = 6 * 3600.0
    """How long a run waits for another run that is making the same release: the longest conversion, with room."""

    try_releases: bool = True
    """Load each release in vLLM and let it generate before it is published, where this node's vLLM is a CPU's and
    the model is small. Elsewhere, and when this is off, the first workers prove the same when they start."""

    hub_offline: bool = Field(default=False, validation_alias="HF_HUB_OFFLINE")
    """Never ask the hub; use what is on disk."""

    nvml: str = "driver"
    """`driver` is the real one. `sim:PRODUCT[*COUNT]` is a simulated node (a100-40, a100-80, h100-80, h200-141,
    b200-180; 8 GPUs); everything it shows is labelled as simulated."""

    nvml_state: Path | None = None
    """The file that holds a simulated node. Must be named for one, so that nobody gets one by a mistyped word."""

    mig_command: tuple[str, ...] = ()
    """What changes MIG layouts in this process's stead, as root (a JSON list); docs/dgx.md has the sudoers line.
    Empty: the stage does it itself, and needs the rights."""

    lease_wait_s: float = 3600.0
    """How long a stage waits in line for devices that other runs hold, before it says busy."""

    lease_place_s: float = 300.0
    """How long a run that went away keeps its place in line; one that waits renews it all the time."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Logs go to standard error; standard output belongs to `--json`."""

    @field_validator("home", "sql", "nvml_state", mode="after")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value.absolute() if value is not None else None

    @model_validator(mode="after")
    def _defaults_from_home(self) -> "Settings":
        if not self.deployment:
            digest = sha256(str(self.home).encode()).hexdigest()[:8]
            object.__setattr__(self, "deployment", f"qwen-{digest}")
        return self

    @property
    def spark_has_ui(self) -> bool:
        """Whether an application serves a page of its own while it runs; off by default: a port for each run."""
        return self.spark_conf.get("spark.ui.enabled", "false") == "true"

    def quota_of(self, tenant: str) -> Quota | None:
        """What bounds the tenant's runs, if anything."""
        return self.quotas.get(tenant, self.quotas.get("*"))

    @property
    def store(self) -> Path:
        """Where downloads and releases are."""
        return self.home / "store"

    @property
    def nightly_folder(self) -> Path:
        """Where scheduled runs are described."""
        return self.nightly or self.home / "nightly"

    @property
    def logs(self) -> Path:
        """Where workers, keepers and Spark log."""
        return self.home / "logs"

    @property
    def locks(self) -> Path:
        """Where the node's lock files are; must be a local file system (flock)."""
        return self.home / "locks"

    def queue_of(self, node: str) -> str | None:
        """The Airflow queue of what acts on `node`; None: the default one.

        Raises:
            InputError: nobody serves that queue, and what is put there would wait for ever.
        """
        if not self.node_queues:
            return None
        if self.nodes and node not in self.nodes:
            raise InputError(
                f"node: {node!r} is none of this deployment's ({', '.join(self.nodes)}; QWEN_PIPELINE_NODES)"
            )
        return node

    def database_url(self) -> str:
        """The ledger's URL, with its password.

        Raises:
            InputError: neither `ledger_url` nor `ledger_url_file` is set, or the file cannot be read.
        """
        if self.ledger_url is not None:
            return self.ledger_url.get_secret_value()
        if self.ledger_url_file is None:
            raise InputError(
                "no ledger is configured: set QWEN_PIPELINE_LEDGER_URL_FILE to a 0600 file that holds the "
                "PostgreSQL URL (or QWEN_PIPELINE_LEDGER_URL to the URL itself)"
            )
        try:
            return self.ledger_url_file.read_text().strip()
        except OSError as error:
            raise InputError(
                f"QWEN_PIPELINE_LEDGER_URL_FILE names {self.ledger_url_file}, which cannot be read: "
                f"{error.strerror}"
            ) from None

    def secret(self) -> bytes:
        """The deployment secret.

        Raises:
            InputError: the file is missing, empty or readable by others.
        """
        path = self.secret_file or self.home / "secret"
        try:
            mode = path.stat().st_mode & 0o077
            content = path.read_bytes().strip()
        except OSError as error:
            raise InputError(
                f"the deployment secret {path} cannot be read ({error.strerror}): write 32 random bytes there "
                f"with mode 0600, the same on every host of the deployment"
            ) from None
        if mode:
            raise InputError(f"the deployment secret {path} is readable by others: chmod 600 {path}")
        if len(content) < 16:
            raise InputError(
                f"the deployment secret {path} holds {len(content)} bytes; at least 16 are needed"
            )
        return content


def variable(name: str) -> str:
    """The environment variable that holds the setting `name`."""
    field = Settings.model_fields.get(name)
    if field is not None and isinstance(field.validation_alias, str):
        return field.validation_alias
    return name if field is None else f"{Settings.model_config['env_prefix']}{name.upper()}"


@cache
def current() -> Settings:
    """The settings of this process, read from its environment once."""
    return Settings()
