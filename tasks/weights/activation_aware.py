"""awq: scale what matters most to the activations before it is rounded. In the converting environment only.

Keeps:
- What was scaled is written down (`SCALES`), so that the release can be compared with its base matrix by matrix.
- Whatever was neither scaled nor quantized has the bytes of the source.
- The model is built in float32, because CPUs without bfloat16 units multiply bfloat16 ten times slower, and
  the search for scales is more exact.
"""

import json
import os
from collections.abc import Callable
from functools import wraps
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.weights import offloaded, tensors
from tasks.weights.scales import SCALES, Noted

if TYPE_CHECKING:
    from tasks.weights.converting import Job

SHARD_BYTES = 4_000_000_000
"""Several files load in parallel, and each is hashed on its own."""

_BATCH = 4
"""Sequences that pass a layer at once: more only makes the activations larger than the processor's cache."""

_ROUTER = r"re:.*mlp\.gate$"


def convert_with_activations(job: "Job", made: Path) -> None:
    """Fill `made` with weights, index, config.json and the scales."""
    import torch
    import transformers
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    from tasks.weights.converting import weights_of

    model = _load(job)
    _run_without_accelerator()
    layers = int(model.config.get_text_config().num_hidden_layers)
    _after_each(AWQModifier, "on_sequential_epoch_end", _reporter(job, layers))
    scales = Noted()
    _note_scales(AWQModifier, scales)
    samples = _samples(job)
    oneshot(
        model=model,
        processor=transformers.AutoTokenizer.from_pretrained(job.source, local_files_only=True),
        dataset=torch.utils.data.DataLoader(samples, batch_size=_BATCH),
        recipe=[
            AWQModifier(mappings=_mappings(model), n_grid=job.n_grid),
            QuantizationModifier(
                ignore=job.ignored,
                config_groups={"matrices": {"targets": ["Linear"], "weights": weights_of(job)}},
            ),
        ],
        num_calibration_samples=len(samples),
        max_seq_length=job.sample_tokens,
    )
    _store_as_in(job.source, model, scales.modules)
    model.save_pretrained(made, save_compressed=True, max_shard_size=SHARD_BYTES)
    scales.save(made / SCALES)
    _keep_what_the_loader_dropped(job, made)


def _load(job: "Job") -> Any:
    import transformers

    values = sum(prod(tensor.shape) for tensor in tensors.read(Path(job.source)).values())
    folder = Path(job.made).parent / "offload"
    return offloaded.load(getattr(transformers, job.loader), job.source, values, job.memory_bytes, folder)


def _mappings(model: Any) -> list[Any]:
    """llm-compressor's own, with the router among those that a scaled norm is made up for (0.14.0.1 leaves
    Qwen3.5's out)."""
    from llmcompressor.modifiers.transform.awq.dynamic_mappings import get_layer_mappings_from_model

    mappings: list[Any] = list(get_layer_mappings_from_model(model))
    for mapping in mappings:
        feeds_experts = any("experts" in layer for layer in mapping.balance_layers)
        routed = any(layer.endswith("mlp.gate$") for layer in mapping.balance_layers)
        if feeds_experts and not routed:
            mapping.balance_layers.append(_ROUTER)
    return mappings


def _note_scales(modifier: Any, scales: Noted) -> None:
    """Listen to the search for scales; what it finds is applied at once, always in the same way."""
    original = modifier._compute_best_scale
    original = getattr(original, "__wrapped__", original)

    @wraps(original)
    def compute(modifying: Any, mapping: Any, *arguments: Any) -> Any:
        found = original(modifying, mapping, *arguments)
        scales.note(mapping.smooth_name, mapping.balance_names, found)
        return found

    modifier._compute_best_scale = compute


def _samples(job: "Job") -> list[dict[str, Any]]:
    """The texts joined and cut into sequences of equal length, so that nothing is padded.

    Raises:
        SystemExit: the texts are too short for one sequence.
    """
    import torch

    cut = torch.tensor(
        tensors.sequences(job.source, job.texts, job.tokens, job.sample_tokens, "convert.calibration")
    )
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in cut]


def _store_as_in(source: str, model: Any, scaled: dict[str, Any]) -> None:
    """Give every float the type that the source stores it in, and what was not changed its very bytes; scales
    get the type that most of the source has."""
    import torch
    from safetensors import safe_open

    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    stored = {name: tensor for name, tensor in tensors.read(Path(source)).items() if tensor.dtype in types}
    usual = max(types, key=lambda kind: sum(t.bytes for t in stored.values() if t.dtype == kind))
    quantized = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    held = offloaded.Tensors(model)
    for place in held:
        name, value = place.full_name, place.held[place.name]
        if not value.is_floating_point():
            continue
        if name in stored and place.module not in quantized and place.module not in scaled:
            with safe_open(Path(source, stored[name].file), "pt") as file:
                right = file.get_tensor(name)
        else:
            right = value.data.to(types[stored[name].dtype if name in stored else usual])
        held.replace(place, right)


def _keep_what_the_loader_dropped(job: "Job", folder: Path) -> None:
    """Copy tensors over that the model class does not load (the layers that predict several tokens ahead)."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from tasks.weights import recipes

    source = tensors.read(Path(job.source))
    made = tensors.read(folder)
    stems = {name.rpartition(".")[0] for name in made}

    def is_there(name: str, tensor: tensors.Tensor) -> bool:
        parts = recipes.cut_experts(name, tensor.shape) if len(tensor.shape) == 3 else {}
        return any(part.rpartition(".")[0] in stems for part in (*parts, name))

    dropped = {name: tensor for name, tensor in source.items() if not is_there(name, tensor)}
    if not dropped:
        return
    kept = {}
    for name, tensor in dropped.items():
        with safe_open(Path(job.source, tensor.file), "pt") as file:
            kept[name] = file.get_tensor(name)
    file_name = "model-kept.safetensors"
    save_file(kept, folder / file_name, {"format": "pt"})
    files = {name: tensor.file for name, tensor in made.items()} | dict.fromkeys(kept, file_name)
    total = sum(tensor.bytes for tensor in (*made.values(), *dropped.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _run_without_accelerator() -> None:
    """llm-compressor 0.14.0.1 pins memory for an accelerator without looking whether there is one."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        IntermediatesCache._pin_intermediate = classmethod(lambda cls, intermediate: None)


def _after_each(owner: Any, method: str, report: Callable[[], None]) -> None:
    original = getattr(owner, method)
    original = getattr(original, "__wrapped__", original)

    @wraps(original)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        report()
        return result

    setattr(owner, method, reporting)


def _reporter(job: "Job", total: int) -> Callable[[], None]:
    done = 0

    def report() -> None:
        nonlocal done
        done = min(done + 1, total)
        temporary = Path(f"{job.progress}.new")
        temporary.write_text(json.dumps({"done": done, "total": total, "unit": "layers"}))
        os.replace(temporary, job.progress)

    return report
