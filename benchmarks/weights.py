"""Hashing and fp8 streaming against `cat`, and converting against llm-compressor's own examples.

    .venv/bin/python -m benchmarks.weights [MODEL_FOLDER] [--rounds N] [--tokens N] [--n-grid N]

Within one run: the same files are read by `cat`, hashed as a download is, and streamed to fp8, in turn. With a
model's folder (demo/models makes some) it is then converted to fp8 and to awq by this project and by what
llm-compressor's examples do, each in a fresh process: seconds (importing included), processor seconds (which a busy
machine blurs less) and peak resident memory. Both awqs look at the same tokens and try as many scales.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.settings import Settings
from tasks.weights import store

_FILES, _ROWS, _COLUMNS = 3, 16_384, 4096
_FILE_BYTES = 2 * _ROWS * _COLUMNS
_GROUP_SIZE, _SAMPLE_TOKENS = 64, 128

_STREAM = f"""
import json, sys, time
from pathlib import Path
from tasks.weights import converting, recipes
recipe = recipes.RECIPES["Qwen2ForCausalLM"]
def job(base, made):
    return converting.Job(source=base, made=made, scheme="fp8", candidates=["fp8"], group_size=128, symmetric=False,
        ignored=list(recipe.ignored), loader=recipe.loader, texts=[], tokens=0, sample_tokens={_SAMPLE_TOKENS},
        memory_bytes=0, progress="")
converting.stream(job(sys.argv[1], sys.argv[3]), Path(sys.argv[3]), "FP8_DYNAMIC")
began, used = time.perf_counter(), time.process_time()
converting.stream(job(sys.argv[2], sys.argv[4]), Path(sys.argv[4]), "FP8_DYNAMIC")
print("took", time.perf_counter() - began, "used", time.process_time() - used)
"""

_OURS = f"""
import sys
from pathlib import Path
from tasks.weights import calibration, converting, recipes, tensors
base, made, candidate, tokens, n_grid = *sys.argv[1:4], *map(int, sys.argv[4:])
recipe = recipes.of(tensors.read_config(Path(base)))
converting.convert(converting.Job(source=base, made=made, scheme=candidate, candidates=[candidate],
    group_size={_GROUP_SIZE}, symmetric=False, ignored=list(recipe.ignored), loader=recipe.loader,
    texts=calibration.texts(None, tokens), tokens=tokens, sample_tokens={_SAMPLE_TOKENS}, n_grid=n_grid,
    memory_bytes=2**50, progress=made + ".progress"))
"""

_THEIRS = f"""
import sys
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer
from tasks.weights import calibration, tensors
base, made, candidate, tokens, n_grid = *sys.argv[1:4], *map(int, sys.argv[4:])
IntermediatesCache._pin_intermediate = classmethod(lambda cls, intermediate: None)  # else it crashes without a GPU
model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(base)
if candidate == "fp8":
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]))
else:
    cut = torch.tensor(tensors.sequences(base, calibration.texts(None, tokens), tokens, {_SAMPLE_TOKENS}, ""))
    samples = [{{"input_ids": row, "attention_mask": torch.ones_like(row)}} for row in cut]
    weights = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size={_GROUP_SIZE})
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    oneshot(model=model, dataset=torch.utils.data.DataLoader(samples, batch_size=1), processor=tokenizer,
        recipe=[AWQModifier(n_grid=n_grid),
            QuantizationModifier(ignore=["lm_head"], config_groups={{"group": scheme}})],
        max_seq_length={_SAMPLE_TOKENS}, num_calibration_samples=len(samples))
model.save_pretrained(made, save_compressed=True)
tokenizer.save_pretrained(made)
"""


def measure_files(rounds: int) -> dict[str, float]:
    """GB/s of reading, hashing and streaming to fp8, medians over rounds, and GB for each second of processor time; the
    files are in the page cache."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        base, small = folder / "base", folder / "small"
        _write_model(base, _FILES, _ROWS)
        _write_model(small, 1, 64)
        paths = sorted(base.glob("*.safetensors"))
        seconds: dict[str, list[tuple[float, float]]] = {"cat": [], "sha256": [], "fp8": []}
        for number in range(rounds):
            seconds["cat"].append(
                _time(lambda: subprocess.run(["cat", *paths], check=True, stdout=subprocess.DEVNULL))
            )
            seconds["sha256"].append(_time(lambda: store.sha256_of_all(paths)))
            made = [str(folder / f"{name}-{number}") for name in ("small", "made")]
            said = _run(_STREAM, str(small), str(base), *made).stdout
            ((took, used),) = re.findall(r"took ([\d.]+) used ([\d.]+)", said)
            seconds["fp8"].append((float(took), float(used)))
    size = _FILES * _FILE_BYTES / 1e9
    return {
        f"{name}_gb_per_{what}": round(size / statistics.median(one[number] for one in found), 3)
        for name, found in seconds.items()
        for number, what in enumerate(("s", "processor_s"))
    }


def measure_conversions(model: Path, tokens: int, n_grid: int) -> Iterator[dict[str, Any]]:
    """Seconds and peak memory of each conversion, ours and theirs in turn."""
    with tempfile.TemporaryDirectory() as place:
        for candidate in ("fp8", "awq"):
            for whose, code in (("ours", _OURS), ("theirs", _THEIRS)):
                asked = (str(model), f"{place}/{candidate}-{whose}", candidate, str(tokens), str(n_grid))
                said = _run(_WITH_PEAK + code + _SAY_PEAK, *asked).stdout
                took, used, peak = re.findall(r"took ([\d.]+) used ([\d.]+) peak (\d+)", said)[-1]
                yield {
                    "converted": candidate,
                    "by": whose,
                    "seconds": round(float(took), 1),
                    "processor_seconds": round(float(used), 1),
                    "peak_gb": round(int(peak) / 1e9, 2),
                }


_WITH_PEAK = "import time; _began = time.perf_counter()\n"
_SAY_PEAK = """
import resource
_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("took", time.perf_counter() - _began, "used", time.process_time(), "peak", _peak)
"""


def _run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [str(Settings().python_convert), "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True)


def _time(act: Any) -> tuple[float, float]:
    """Seconds, and seconds of processor time of this process and its children."""
    began, before = time.perf_counter(), os.times()
    act()
    after = os.times()
    return time.perf_counter() - began, sum(after[:4]) - sum(before[:4])


def _write_model(folder: Path, files: int, rows: int) -> None:
    """Matrices of random bytes that are finite as bf16."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    )
    size = 2 * rows * _COLUMNS
    row = bytes(byte if place % 2 == 0 else 0x3C for place, byte in enumerate(os.urandom(2 * _COLUMNS)))
    index = {
        f"model.layers.{number}.mlp.up_proj.weight": f"model-{number}.safetensors" for number in range(files)
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for number in range(files):
        entry = {"dtype": "BF16", "shape": [rows, _COLUMNS], "data_offsets": [0, size]}
        header = json.dumps({f"model.layers.{number}.mlp.up_proj.weight": entry}).encode()
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _ in range(rows):
                file.write(row)


def main() -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3, help="of reading, hashing and streaming; 0: none")
    parser.add_argument("--tokens", type=int, default=4096, help="that awq looks at")
    parser.add_argument("--n-grid", type=int, default=20, help="scales that awq tries")
    given = parser.parse_args()
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    if given.rounds:
        print(
            json.dumps({"benchmark": "weights_files", "load": load, **measure_files(given.rounds)}),
            flush=True,
        )
    if given.model:
        for found in measure_conversions(given.model, given.tokens, given.n_grid):
            print(json.dumps({"benchmark": "conversions", "model": given.model.name, **found}), flush=True)


if __name__ == "__main__":
    main()
