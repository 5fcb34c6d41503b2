"""The run spec as one model. The YAML reader, the DAG's Params, REST and docs/run-spec.md all come from it.

Unknown fields are refused everywhere: a misspelt knob that is silently ignored costs a night.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from tasks.spec.times import Duration, Until, seconds_of

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Column = Annotated[str, Field(min_length=1, max_length=128)]


class Part(BaseModel):
    """A part of the spec: frozen, strict about its fields, documented by its attribute docstrings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        populate_by_name=True,
        serialize_by_alias=True,
    )


class Model(Part):
    """Which weights."""

    repo: str = Field(min_length=1, examples=["Qwen/Qwen3.5-9B", "/models/qwen3.5-9b", "release:ID"])
    """A repository on the hub (`owner/name`), a folder on the node (`/path`), or a release in its store
    (`release:ID`; `convert` then says nothing but its `gate`)."""
    revision: str = Field(default="main", min_length=1)
    """A branch, tag or commit; pinned to a commit when the run first starts."""


class Gate(Part):
    """What a converted release must hold to be published; null is the scheme's own limit (docs/weights.md)."""

    max_perplexity_ratio: float | None = Field(default=None, gt=1.0)
    """Perplexity of the release over that of the base, on held-out texts."""
    max_kl: float | None = Field(default=None, gt=0.0)
    """Mean KL divergence of the release's next token from the base's, in nats a token."""
    max_weight_error: float | None = Field(default=None, gt=0.0)
    """Of any one layer: norm of the difference to the base's matrix over the norm of that matrix."""
    texts: str | None = Field(default=None, min_length=1, examples=["/data/held-out.jsonl"])
    """Held-out texts, in a file like `calibration`'s; null: documentation texts that calibration never sees."""
    tokens: int = Field(default=2048, ge=256, le=16_384)
    """How many tokens of them are measured on."""


class Convert(Part):
    """How the weights are stored and computed with."""

    scheme: Literal["none", "fp8", "fp8_block", "awq"] = "awq"
    """`awq`: 4-bit weights. `fp8`: 8-bit floats, activations scaled per token. `fp8_block`: 8-bit floats, a scale
    for each 128 x 128 weights. `none`: as downloaded."""
    group_size: Literal[32, 64, 128] = 128
    """Weights that share one scale (awq only); must divide the input size of every layer."""
    symmetric: bool = False
    """Whether 4-bit values are spread evenly around zero (awq only): a little smaller and a little less exact."""
    converter: Literal["llm-compressor", "autoawq"] = "llm-compressor"
    """What makes awq. `autoawq` knows Qwen2, Qwen2.5 and dense Qwen3 only, and needs its own environment."""
    calibration: str | None = Field(default=None, min_length=1, examples=["/data/calibration.jsonl"])
    """Texts that awq measures activations on: a .jsonl or .parquet file with a column `text`, or a .txt file;
    best like the prompts to come. null: the documentation texts that ship with Python."""
    calibration_tokens: int = Field(default=4096, ge=256, le=1_000_000)
    """How many tokens of those texts awq looks at; its time grows with them."""
    n_grid: int = Field(default=20, ge=4, le=100)
    """How many scales awq tries for each group of layers (llm-compressor only): most of its time is spent on them."""
    gate: Gate = Gate()
    """What the release must hold to be published; null is the scheme's own limit (docs/weights.md)."""


class MigLayout(Part):
    """Cut GPUs into MIG devices; one worker each."""

    mig: Literal["auto"] | Annotated[dict[str, Annotated[int, Field(ge=1, le=7)]], Field(min_length=1)] = (
        Field(examples=[{"3g.40gb": 2}])
    )
    """Profile name, as the driver calls it, to how many of it on each GPU. `auto`: as many as go of the smallest
    profile that holds the release, the KV cache of max_num_seqs sequences of max_model_len, and what vLLM needs
    besides; `preflight` shows the numbers."""
    gpus: Literal["all"] | Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] = "all"
    """All GPUs, a number of them, or their indices. With a number, the best free ones are taken."""
    replace_foreign: bool = False
    """Whether idle instances that somebody else made may be destroyed where they are in the way. They are made
    again afterwards, with new UUIDs."""

    @model_validator(mode="before")
    @classmethod
    def _one_worker_per_device(cls, value: Any) -> Any:
        if isinstance(value, dict) and "tensor_parallel" in value:
            raise ValueError(
                "a MIG device is served by one worker alone, because NVIDIA does not support NCCL between MIG "
                "devices: remove layout.tensor_parallel, or remove layout.mig and use full GPUs"
            )
        return value


class MigPartedLayout(Part):
    """Cut GPUs as a configuration of NVIDIA's mig-parted says; one worker for each MIG device."""

    mig_parted: str = Field(min_length=1, examples=["/etc/nvidia-mig-manager/config.yaml"])
    """A configuration file of mig-parted, version v1, on the node."""
    config: str = Field(min_length=1, examples=["all-balanced"])
    """Which of its mig-configs. GPUs that it leaves without MIG are not used."""
    replace_foreign: bool = False
    """As for `mig`."""


class TensorParallelLayout(Part):
    """Full GPUs, grouped; one worker for each group."""

    tensor_parallel: int = Field(ge=1, le=16)
    """GPUs in a group; weights are split over them."""
    gpus: Literal["all"] | Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] = "all"
    """All GPUs, a number of them, or their indices."""


class CpuLayout(Part):
    """No GPU: workers on CPU cores. For a laptop and for tests; slow."""

    cpu: int = Field(ge=1, le=64)
    """Workers; the cores are split evenly between them."""


def _layout_kind(value: Any) -> str | None:
    fields = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    kinds = [kind for kind in ("mig", "mig_parted", "tensor_parallel", "cpu") if kind in fields]
    return kinds[0] if kinds else None


Layout = Annotated[
    Annotated[MigLayout, Tag("mig")]
    | Annotated[MigPartedLayout, Tag("mig_parted")]
    | Annotated[TensorParallelLayout, Tag("tensor_parallel")]
    | Annotated[CpuLayout, Tag("cpu")],
    Discriminator(
        _layout_kind,
        custom_error_type="layout",
        custom_error_message="a layout is one of {mig: {PROFILE: COUNT}}, {mig: auto}, "
        "{mig_parted: FILE, config: NAME}, {tensor_parallel: N} or {cpu: N}",
    ),
]


_SEQUENCES = 256


class Serving(Part):
    """How each worker serves the release."""

    max_model_len: int = Field(default=4096, ge=16)
    """Longest prompt plus answer, in tokens."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that one worker decodes at once; null: what was measured to be best for this GPU and model
    (docs/performance.md), and 256 where nothing was."""
    max_num_batched_tokens: int = Field(default=8192, ge=16)
    """Tokens of one engine step: how much prefill is mixed into decoding."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of activations; `auto` is what the checkpoint says. `float32` on a CPU without bfloat16 instructions, but for
    Qwen3.5, which vLLM computes in bfloat16 alone there."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """`fp8` halves the KV cache; on Ampere it saves memory only."""
    kv_cache_memory_mb: int | None = Field(default=None, ge=16)
    """KV cache of one worker in MiB; null: what gpu_memory_utilization leaves. Required on CPU."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0.0, le=0.98)
    """Share of the slot's memory that a worker may take; headroom avoids an out-of-memory that is hard to read."""
    kv_offload_gb: float | None = Field(default=None, gt=0.0)
    """Host memory of one worker, in GiB, for KV blocks that its device has no room for; null: none."""
    chunked_prefill: bool | None = None
    """Whether a long prompt is read in parts beside decoding; null: as vLLM chooses for the model."""
    prefix_caching: bool = True
    """Rows that begin alike share their prefill."""
    enforce_eager: bool = False
    """No CUDA graphs: starts sooner, decodes slower. Right for CPU."""
    min_workers: int = Field(default=1, ge=1)
    """The run goes on with this many workers; with fewer, because slots were given up, its pool ends."""
    extra_args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further flags of `vllm serve`, without dashes; checked against what the installed vLLM knows."""

    @property
    def sequences(self) -> int:
        """`max_num_seqs`, or the general default where it is open and nobody has looked into `tasks.tuning`."""
        return self.max_num_seqs or _SEQUENCES


class Sampling(Part):
    """How answers are drawn."""

    # The most is beyond every model's context, and what is stored in 32 bits.
    max_tokens: int = Field(default=512, ge=1, le=1 << 24)
    """Longest answer, in tokens."""
    temperature: float = Field(default=0.7, ge=0.0, le=2.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw from the most likely tokens that together have this probability."""
    seed: int | None = None
    """Makes the engine's draws repeatable as far as it can."""


_ONE_SOURCE_OF_TEXT: dict[str, Any] = {
    "oneOf": [
        *(
            {
                "required": [one],
                "properties": {
                    one: {"type": "string"},
                    other: {"type": "null"},
                    "format": {"const": "table"},
                },
            }
            for one, other in (("prompt", "messages"), ("messages", "prompt"))
        ),
        {
            "required": ["format"],
            "properties": {
                "format": {"const": "openai_batch"},
                **{
                    name: {"type": "null"}
                    for name in ("prompt", "messages", "system", "row_sampling", "row_schema")
                },
            },
        },
    ]
}
"""The same rule as the validator's, for those who check against the JSON schema alone."""


NO_BATCH = "(none)"
"""The input of a run that asks nothing: of one that makes a release, or keeps a pool."""


class Batch(Part):
    """The rows: where they come from, what is asked, where answers go."""

    model_config = ConfigDict(json_schema_extra=_ONE_SOURCE_OF_TEXT)

    input: str = Field(min_length=1, examples=["/prompts/{{ ds }}/"])
    """A parquet or JSONL file, a folder of them, or a glob. `{{ ds }}` is the run's date."""
    format: Literal["table", "openai_batch"] = "table"
    """`table`: columns as named below. `openai_batch`: JSONL of requests for OpenAI's batch API; `custom_id` is
    the id, `body` the chat with its own sampling and schema; its `model` is not looked at."""
    output: str = Field(min_length=1, examples=["/answers/{{ ds }}/"])
    """A folder; answers and their manifest are published there."""
    also: list[Literal["jsonl", "openai_batch"]] = []
    """Answers are published as parquet; also in these formats."""
    id: Column = "row_id"
    """The column that names a row; unique and never null."""
    bad_ids: Literal["refuse", "keep_apart"] = "refuse"
    """Rows without an id that can be stored, or with another row's. `refuse`: bad input, with examples.
    `keep_apart`: they get ids of their own (`row-7`, `ID#2`: the seventh row, the second row of that id); rows are
    never merged."""
    prompt: Column | None = None
    """The column with the prompt text; exactly one of `prompt` and `messages`."""
    messages: Column | None = None
    """The column with a chat: a list of {role, content}."""
    system: str | None = None
    """A system message before every `prompt`."""
    session: Column | None = None
    """The column that names a conversation, or null for a row that stands alone. Rows of one session are its turns,
    in the input's order; each is asked with the turns before it and their answers."""
    sampling: Sampling = Sampling()
    row_sampling: Column | None = None
    """The column with a row's own sampling: an object (or its JSON) with some of the fields of `sampling`."""
    answer_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON schema that every answer must satisfy."""
    row_schema: Column | None = None
    """The column with a row's own JSON schema (an object or its JSON), in place of `schema`; null: `schema`."""
    too_long: Literal["fail", "truncate"] = "fail"
    """A prompt that does not fit beside its answer. `fail`: a typed error, without asking. `truncate`: the engine
    keeps its last tokens."""

    @property
    def is_none(self) -> bool:
        """Whether there are no rows at all: see `NO_BATCH`."""
        return self.input == NO_BATCH

    @model_validator(mode="after")
    def _one_source_of_text(self) -> "Batch":
        if self.format == "openai_batch":
            columns = ("prompt", "messages", "system", "row_sampling", "row_schema")
            named = [name for name in columns if getattr(self, name) is not None]
            if named:
                raise ValueError(
                    f"leave out {', '.join(named)}: an openai_batch says in each row what is asked"
                )
            return self
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("name exactly one of `prompt` (a text column) and `messages` (a chat column)")
        return self


class Limits(Part):
    """When a run stops itself, and what it may publish."""

    deadline: Until = "6h"
    """When the answers are to be there: a time from the run's start, the next time that the wall's clock shows
    (`07:00`, in the DAG's time zone), or a moment (`2026-12-01T07:00+01:00`)."""
    wind_down: Duration | None = None
    """So long before the deadline no row is started any more: those in flight finish, and what is there is published
    in time. null: a twentieth of the time to the deadline, at most 5m."""
    warn: Duration | None = None
    """So long before the deadline whoever `QWEN_PIPELINE_NOTIFY` names for it is told of a run that has not ended.
    null: a sixth of the time to the deadline, at most 1h."""
    wait: Duration = "12h"
    """How long the run may wait for what another one holds: devices, or the same batch. It holds nothing then."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Prompt and answer tokens that the run may spend in all."""
    max_row_error_rate: float = Field(default=0.02, ge=0.0, le=1.0)
    """Failed rows over all rows; above it nothing is published and the answers stay resumable."""
    partial: bool = False
    """Whether a run that ends early publishes what it has, as a version of its own."""

    @property
    def wait_s(self) -> int:
        """`wait` in seconds."""
        return seconds_of(self.wait)

    def wind_down_s(self, span_s: float) -> float:
        """`wind_down` in seconds, for a deadline `span_s` after the run's start."""
        return _of_span(self.wind_down, span_s, part=20, most_s=300.0)

    def warn_s(self, span_s: float) -> float:
        """`warn` in seconds, for a deadline `span_s` after the run's start."""
        return _of_span(self.warn, span_s, part=6, most_s=3600.0)


def _of_span(duration: str | None, span_s: float, *, part: int, most_s: float) -> float:
    if duration is not None:
        return float(seconds_of(duration))
    return max(0.0, min(span_s / part, most_s))


def section(title: str) -> dict[str, Any]:
    """Where a field stands in Airflow's form."""
    return {"section": title}


WHO, WEIGHTS, WORKERS, ROWS, LIMITS = (
    "Who asks",
    "Weights",
    "Node and workers",
    "Rows: input, question, output",
    "Limits and deadline",
)
"""The sections of the form, in their order."""


class RunSpec(Part):
    """Everything a run needs."""

    version: Literal[1] = Field(default=1, json_schema_extra=section(WHO))
    """Of this document's schema."""
    tenant: Name = Field(default="default", json_schema_extra=section(WHO))
    """Who pays; quotas and accounts are per tenant."""
    model: Model = Field(json_schema_extra=section(WEIGHTS))
    convert: Convert = Field(default=Convert(), json_schema_extra=section(WEIGHTS))
    node: Name = Field(default="local", json_schema_extra=section(WORKERS))
    """The host whose GPUs are used; one Airflow queue has the same name."""
    layout: Layout = Field(json_schema_extra=section(WORKERS))
    serving: Serving = Field(default=Serving(), json_schema_extra=section(WORKERS))
    batch: Batch = Field(json_schema_extra=section(ROWS))
    limits: Limits = Field(default=Limits(), json_schema_extra=section(LIMITS))
