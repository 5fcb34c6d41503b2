"""Convert a checkpoint. Runs in the converting environment, as a child process of the stage:

    PYTHON -m tasks.weights.converting JOB.json

Keeps: nothing is fetched, nothing but the job's folder is written, no tokenizer is saved. FP8 streams file by
file and never builds the model; awq builds it in float32, because CPUs without bfloat16 units multiply
bfloat16 ten times slower, and the search for scales is more exact.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

log = logging.getLogger("converting")

_PRESETS = {"fp8": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK"}

_SEED = 20_480

_SHARD_SIZE = "4GB"
"""Several files load in parallel, and each is hashed on its own."""

_BATCH = 4
"""Sequences that pass a layer at once: more only makes the activations larger than the processor's cache."""


@dataclass(frozen=True)
class Job:
    """What to convert, and where to."""

    source: str
    """The downloaded checkpoint."""
    made: str
    """The folder that receives weights, index and config.json."""
    scheme: str
    group_size: int
    ignored: list[str]
    """Modules that stay as they are; see `recipes`."""
    loader: str
    texts: list[str]
    """Calibration texts; empty when the scheme needs none."""
    tokens: int
    sample_tokens: int
    progress: str
    """A file that is replaced with {done, total, unit} as the work goes on."""

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def main() -> None:
    """Read the job named by the first argument and do it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    convert(Job(**json.loads(Path(sys.argv[1]).read_text())))


def convert(job: Job) -> None:
    """Fill the job's folder with weights, index and config.json."""
    _fix_randomness()
    if job.scheme == "awq":
        _awq(job)
    else:
        _fp8(job)
    _keep_what_the_loader_dropped(job)


def _fp8(job: Job) -> None:
    from llmcompressor import model_free_ptq
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

    _make_contiguous(ModelFreePtqConverter)
    model_free_ptq(
        model_stub=job.source,
        save_directory=job.made,
        scheme=_PRESETS[job.scheme],
        ignore=job.ignored,
        max_workers=1,
        device="cpu",
    )


def _awq(job: Job) -> None:
    import torch
    import transformers
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    model = getattr(transformers, job.loader).from_pretrained(
        job.source, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    _run_without_accelerator()
    layers = int(model.config.get_text_config().num_hidden_layers)
    _after_each(AWQModifier, "on_sequential_epoch_end", _reporter(job, layers))
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": job.group_size,
    }
    recipe = [
        AWQModifier(),
        QuantizationModifier(
            ignore=job.ignored, config_groups={"matrices": {"targets": ["Linear"], "weights": weights}}
        ),
    ]
    samples = _samples(job)
    oneshot(
        model=model,
        processor=transformers.AutoTokenizer.from_pretrained(job.source, local_files_only=True),
        dataset=torch.utils.data.DataLoader(samples, batch_size=_BATCH),
        recipe=recipe,
        num_calibration_samples=len(samples),
        max_seq_length=job.sample_tokens,
    )
    _store_as_in(job.source, model)
    model.save_pretrained(job.made, save_compressed=True, max_shard_size=_SHARD_SIZE)


def _samples(job: Job) -> list[dict[str, Any]]:
    """The texts joined and cut into sequences of equal length, so that nothing is padded.

    Raises:
        SystemExit: the texts are too short for one sequence.
    """
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(job.source, "tokenizer.json")))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = [number for text in job.texts for number in tokenizer.encode(text, add_special_tokens=False).ids]
    length = job.sample_tokens
    count = min(len(ids), job.tokens) // length
    if count == 0:
        sys.exit(f"convert.calibration: the texts have {len(ids)} tokens; at least {length} are needed")
    cut = torch.tensor(ids[: count * length]).reshape(count, length)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in cut]


def _make_contiguous(converter: Any) -> None:
    """safetensors refuses views, which fp8_block makes where 128 does not divide a matrix (0.14.0.1)."""
    original = converter.process

    @wraps(original)
    def process(self: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: tensor.contiguous() for name, tensor in original(self, tensors).items()}

    converter.process = process


def _store_as_in(source: str, model: Any) -> None:
    """Give every float the type that the source stores it in; scales get the type that most of it has."""
    import torch

    from tasks.weights import tensors

    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    stored = {name: tensor for name, tensor in tensors.read(Path(source)).items() if tensor.dtype in types}
    usual = max(types, key=lambda kind: sum(t.bytes for t in stored.values() if t.dtype == kind))
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point():
            value.data = value.data.to(types[stored[name].dtype if name in stored else usual])


def _keep_what_the_loader_dropped(job: Job) -> None:
    """Copy tensors over that the model class does not load (the layers that predict several tokens ahead)."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from tasks.weights import tensors

    source, made = tensors.read(Path(job.source)), tensors.read(Path(job.made))
    stems = {name.rpartition(".")[0] for name in made}
    dropped = {name: tensor for name, tensor in source.items() if name.rpartition(".")[0] not in stems}
    if not dropped:
        return
    log.info("kept as they are, because the model class does not load them: %d tensors", len(dropped))
    kept = {}
    for name, tensor in dropped.items():
        with safe_open(Path(job.source, tensor.file), "pt") as file:
            kept[name] = file.get_tensor(name)
    file_name = "model-kept.safetensors"
    save_file(kept, Path(job.made, file_name), {"format": "pt"})
    files = {name: tensor.file for name, tensor in made.items()} | dict.fromkeys(kept, file_name)
    total = sum(tensor.bytes for tensor in (*made.values(), *dropped.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    Path(job.made, "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _run_without_accelerator() -> None:
    """llm-compressor 0.14.0.1 pins memory for an accelerator without looking whether there is one."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        IntermediatesCache._pin_intermediate = classmethod(lambda cls, intermediate: None)


def _fix_randomness() -> None:
    import torch

    torch.manual_seed(_SEED)
    torch.use_deterministic_algorithms(True, warn_only=True)


def _after_each(owner: Any, method: str, report: Callable[[], None]) -> None:
    original = getattr(owner, method)

    @wraps(original)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        report()
        return result

    setattr(owner, method, reporting)


def _reporter(job: Job, total: int) -> Callable[[], None]:
    done = 0

    def report() -> None:
        nonlocal done
        done = min(done + 1, total)
        temporary = Path(f"{job.progress}.new")
        temporary.write_text(json.dumps({"done": done, "total": total, "unit": "layers"}))
        os.replace(temporary, job.progress)

    return report


if __name__ == "__main__":
    main()
