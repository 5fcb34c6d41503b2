"""A deployment with one batch in it, whose earlier stages are done and whose workers are stand-ins."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tasks import ledger as ledger_package
from tasks import pool_key
from tasks.ledger import Ledger, Run
from tasks.ledger.claims import take
from tasks.settings import REPOSITORY, Settings
from tasks.spec import RunSpec, parse
from tasks.stages import Result, execute

RELEASE = "release-1"
POOL = "pool-1"


def prompt_of(row_id: object) -> str:
    """Contains the id, so that the stand-in's count of prompts is a count of rows."""
    return f"question {row_id} : what is it ? 日本語 🙂"


def tokenizer_folder(folder: Path) -> Path:
    """A model folder with a tokenizer that counts words, and a chat template of two words a message."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"[unk]": 0}, unk_token="[unk]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    each = "{% for m in messages %}start {{ m.content }} end {% endfor %}"
    template = each + "{% if add_generation_prompt %}go{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def write_input(path: Path, ids: Iterable[object], **columns: list[Any]) -> Path:
    """A parquet file of prompts."""
    ids = list(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table(
            {
                "row_id": pa.array(ids, None if ids else pa.string()),
                "prompt": [prompt_of(one) for one in ids],
                **columns,
            }
        ),
        path,
    )
    return path


class World:
    """A deployment in `root`; it needs the environment to say so (`environment`)."""

    def __init__(self, root: Path, database_url: str) -> None:
        self.root = root
        self.home = root / "home"
        self.output = root / "answers"
        self.home.mkdir(parents=True, exist_ok=True)
        for name, content in (("ledger-url", database_url), ("secret", "0" * 64)):
            (self.home / name).touch(mode=0o600)
            (self.home / name).write_text(content)
        self.environment = {
            "QWEN_PIPELINE_HOME": str(self.home),
            "QWEN_PIPELINE_LEDGER_URL_FILE": str(self.home / "ledger-url"),
            "QWEN_PIPELINE_SECRET_FILE": str(self.home / "secret"),
            "QWEN_PIPELINE_SEGMENT_FLUSH_S": "0.5",
            "QWEN_PIPELINE_CLAIM_WATCH_S": "1.0",
            "QWEN_PIPELINE_REGISTRY_POLL_S": "0.3",
            "QWEN_PIPELINE_ENGINE_PATIENCE_S": "30",
        }
        self.model = tokenizer_folder(root / "model")
        self._url = database_url

    @property
    def settings(self) -> Settings:
        """As a process with this world's environment reads them."""
        return Settings()

    @property
    def key(self) -> str:
        """Of the pool."""
        return pool_key.derive(self.settings.secret(), POOL)

    def ledger(self) -> Ledger:
        """A way to the ledger; the caller closes it."""
        return Ledger(self._url, REPOSITORY / "sql")

    def spec(self, input_path: Path, **changes: Any) -> RunSpec:
        """A run over `input_path`; `batch`, `limits` and `serving` are merged into what is usual here."""
        batch = {
            "input": str(input_path),
            "output": str(self.output),
            "id": "row_id",
            "prompt": "prompt",
            "sampling": {"max_tokens": 16, "temperature": 0.0},
            **changes.pop("batch", {}),
        }
        return parse(
            {
                "model": {"repo": "owner/name"},
                "layout": {"cpu": 1},
                "batch": batch,
                "limits": {"max_row_error_rate": 0.5, **changes.pop("limits", {})},
                "serving": {"max_model_len": 256, **changes.pop("serving", {})},
                **changes,
            }
        )

    def run(self, run_id: str, spec: RunSpec, registry: str | None = None) -> Run:
        """A run whose download is done and whose pool, if there is one, answers at `registry`."""
        asked = spec.model_dump(mode="json")
        with self.ledger() as ledger:
            run = ledger_package.register(ledger, run_id, spec, {"asked": asked, "release_id": RELEASE})
        self.finish(run_id, "download", {"path": str(self.model), "commit": "c", "bytes": 1, "files": 1})
        start = {"pool_id": POOL if registry else None, "registry": registry, "model": RELEASE, "workers": 2}
        self.finish(run_id, "start", start)
        return run

    def finish(self, run_id: str, stage: str, facts: dict[str, Any]) -> None:
        """Record that a stage of another package is done."""
        with self.ledger() as ledger:
            claim, _ = take(ledger, run_id, stage, frozenset({stage}))
            claim.finish("done", "made by a test", facts)

    def end_pool(self, run_id: str, reason: str) -> None:
        """Record that the run's pool was there and has ended, as the reaper does."""
        with self.ledger() as ledger:
            claim, _ = take(ledger, run_id, "reap", frozenset({"reap"}))
            with claim.writing() as connection:
                connection.execute(
                    "insert into ledger.pool "
                    "(pool_id, run_id, node, release_id, release_path, slots, ended_at, reason) "
                    "values (%s, %s, 'local', %s, %s, '[]', clock_timestamp(), %s)",
                    (POOL, run_id, RELEASE, str(self.model), reason),
                )
            claim.finish("done", "made by a test", {})

    def execute(self, stage: str, run_id: str) -> Result:
        """One stage, in this process."""
        return execute(stage, run_id, settings=self.settings)

    def manifest(self) -> dict[str, Any]:
        """What readers begin with."""
        document: dict[str, Any] = json.loads((self.output / "manifest.json").read_text())
        return document

    def published(self) -> list[dict[str, Any]]:
        """The published rows, in their order, read as a reader does."""
        manifest = self.manifest()
        folder = self.output / manifest["version"]
        names = [item["name"] for item in manifest["files"] if item["name"].endswith(".parquet")]
        return [row for name in names for row in pq.read_table(folder / name).to_pylist()]
