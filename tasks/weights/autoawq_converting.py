"""awq by AutoAWQ 0.2.9, in its own format. Runs in the environment `autoawq`, as a child process of the stage:

    PYTHON -m tasks.weights.autoawq_converting JOB.json

Keeps: as `activation_aware` does, what was scaled is written down, what was neither scaled nor quantized has the
bytes of the source, and nothing of the repository's own code is run (AutoAWQ's default is to run it).
"""

import json
import logging
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from tasks.weights import tensors
from tasks.weights.converting import Job
from tasks.weights.scales import SCALES, Noted

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def main() -> None:
    """Read the job named by the first argument and do it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    convert(Job(**json.loads(Path(sys.argv[1]).read_text())))


def convert(job: Job) -> None:
    """Fill the candidate's folder with weights, config.json and the scales."""
    import torch
    import transformers
    from awq import AutoAWQForCausalLM
    from awq.quantize.quantizer import AwqQuantizer

    scales = Noted()
    _note_scales(AwqQuantizer, scales)
    model = AutoAWQForCausalLM.from_pretrained(
        job.source, torch_dtype=torch.float32, device_map="cpu", safetensors=True, trust_remote_code=False
    )
    config = {"w_bit": 4, "q_group_size": job.group_size, "zero_point": True, "version": "GEMM"}
    model.quantize(
        transformers.AutoTokenizer.from_pretrained(job.source, local_files_only=True),
        quant_config=config,
        calib_data=tensors.sequences(
            job.source, job.texts, job.tokens, job.sample_tokens, "convert.calibration"
        ),
        max_calib_seq_len=job.sample_tokens,
    )
    made = Path(job.made, "awq")
    made.mkdir(parents=True)
    _save(job.source, model.model.state_dict(), scales, made)
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": job.group_size,
        "zero_point": True,
        "version": "gemm",
    }
    (made / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    scales.save(made / SCALES)


def _note_scales(quantizer: Any, scales: Noted) -> None:
    from awq.utils.module import get_op_name

    original = quantizer._search_best_scale

    @wraps(original)
    def search(searching: Any, module: Any, *arguments: Any, **named: Any) -> Any:
        found = original(searching, module, *arguments, **named)
        previous, layers, best = found
        prefix = get_op_name(searching.model, module)
        scales.note(f"{prefix}.{previous}", [f"{prefix}.{layer}" for layer in layers], best)
        return found

    quantizer._search_best_scale = search


def _save(source: str, state: dict[str, Any], scales: Noted, made: Path) -> None:
    """One file: the models that this converter knows are small."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    stored = tensors.read(Path(source))
    kept = {}
    for name, value in state.items():
        if name.endswith((".qweight", ".qzeros", ".scales")):
            kept[name] = value.contiguous()
        elif name not in stored:
            continue  # the head, where it is the embedding
        elif name.rpartition(".")[0] in scales.modules:
            kept[name] = value.to(getattr(torch, _DTYPES[stored[name].dtype])).contiguous()
        else:
            with safe_open(Path(source, stored[name].file), "pt") as file:
                kept[name] = file.get_tensor(name)
    save_file(kept, made / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
