"""A deployment whose hub is a local one that can be made to fail, and whose weights are small."""

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from demo.hub import Hub
from demo.hub_faults import Faults
from tasks import ledger as ledger_package
from tasks import stages
from tasks.ledger import Ledger, Run
from tasks.settings import REPOSITORY, Settings
from tests.runs import a_spec

REPO = "owner/Tiny-Qwen2"

EXECUTE = """
import sys
from tasks import stages
result = stages.execute(sys.argv[1], sys.argv[2])
print("changed" if result.changed else "unchanged")
"""


class Stalling(Faults):
    """Sends the first MiB of a file, then nothing until it is told to go on."""

    def __init__(self, file: str, after_mib: int) -> None:
        super().__init__()
        self._file = file
        self._after_mib = after_mib
        self._chunks = 0
        self.stalled = threading.Event()
        self.go_on = threading.Event()

    def falsifies(self, file_path: str) -> bool:
        """Asked before each MiB."""
        if file_path == self._file:
            self._chunks += 1
            if self._chunks > self._after_mib and not self.go_on.is_set():
                self.stalled.set()
                self.go_on.wait(60)
        return False


class World:
    """One deployment in `root`, one hub, one ledger."""

    def __init__(self, root: Path, database_url: str) -> None:
        self.home = root / "home"
        self.repositories = root / "hub"
        self.hub = Hub(self.repositories)
        self.database_url = database_url
        self.ledger = Ledger(database_url, REPOSITORY / "sql")
        self.settings = self.settings_with()

    def settings_with(self, **changes: Any) -> Settings:
        """This deployment's settings."""
        return Settings(
            **{
                "home": self.home,
                "ledger_url": SecretStr(self.database_url),
                "HF_ENDPOINT": self.hub.url,
                "claim_watch_s": 0.2,
                "try_releases": False,  # vLLM takes a minute to start
                **changes,
            }
        )

    @property
    def environment(self) -> dict[str, str]:
        """The same settings for a child process."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "QWEN_PIPELINE_HOME": str(self.home),
            "QWEN_PIPELINE_LEDGER_URL": self.database_url,
            "QWEN_PIPELINE_PYTHON_CONVERT": str(self.settings.python_convert),
            "QWEN_PIPELINE_TRY_RELEASES": "false",
            "HF_ENDPOINT": self.hub.url,
        }

    def start(self, run_id: str = "run-1", repo: str = REPO, revision: str = "main", **convert: Any) -> Run:
        """Start a run: pin it to a commit and a release, as the pipeline does."""
        spec = a_spec(model={"repo": repo, "revision": revision}, convert={"scheme": "none", **convert})
        return stages.freeze(self.ledger, run_id, spec, datetime.now(UTC), self.settings)

    def execute(self, *names: str, run_id: str = "run-1", settings: Settings | None = None) -> stages.Result:
        """Execute stages in this process; returns the last one's result."""
        results = [stages.execute(name, run_id, settings=settings or self.settings) for name in names]
        return results[-1]

    @contextmanager
    def executing(self, name: str, run_id: str = "run-1") -> Iterator[subprocess.Popen[str]]:
        """Execute a stage in a process of its own; killed at the end of the block if it still lives."""
        process = subprocess.Popen(
            [sys.executable, "-c", EXECUTE, name, run_id],
            env=self.environment,
            cwd=self.home.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def fetched(self, name: str | None = None) -> list[str]:
        """The files that the hub was asked for so far, in order; or how often one was."""
        asked = [
            seen.path.rpartition("/")[2]
            for seen in self.hub.seen
            if seen.method == "GET" and "/resolve/" in seen.path
        ]
        return asked if name is None else [one for one in asked if one == name]

    def facts(self, stage: str, run_id: str = "run-1") -> dict[str, Any]:
        """What the stage left for later ones."""
        facts = ledger_package.claims.facts_of(self.ledger, run_id, stage)
        assert facts is not None
        return facts

    def staging(self) -> list[str]:
        """What lies in the store's staging area."""
        return sorted(path.name for path in (self.home / "store" / "staging").glob("*"))

    def close(self) -> None:
        """Close hub and ledger."""
        self.hub.close()
        self.ledger.close()


def write_checkpoint(folder: Path, weights_bytes: int = 4096, **config: Any) -> Path:
    """A repository with two files of weights, a tokenizer, and things that are not fetched."""
    folder.mkdir(parents=True)
    values = weights_bytes // 2
    first = {"model.layers.0.mlp.up_proj.weight": ("BF16", (values // 64, 64))}
    second = {"model.norm.weight": ("BF16", (64,)), "model.layers.0.mlp.down_proj.weight": ("BF16", (64, 64))}
    write_safetensors(folder / "model-00001-of-00002.safetensors", first)
    write_safetensors(folder / "model-00002-of-00002.safetensors", second)
    index = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    index |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    documents: dict[str, Any] = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": index},
        "config.json": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **config},
        "tokenizer.json": {"version": "1.0"},
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (folder / "onnx").mkdir()
    write_safetensors(folder / "onnx" / "model.safetensors", first)
    return folder


FETCHED = {
    "chat_template.jinja",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""Of the repository above."""


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A file with tensors of those types and shapes; their bytes count up, so no two files are alike."""
    widths = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8}
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * widths[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write((bytes(range(256)) * (end // 256 + 1))[:end])
