"""One conversion: candidates made by the converter, put together, proven, measured, and the best one chosen.

The converting libraries are in an environment of their own, so they run in children, tied to this process. Only
weights and the quantization part of config.json are taken from them; all else is the repository's, byte by byte.
"""

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.contract import Context
from tasks.errors import InputError
from tasks.spec import Convert
from tasks.weights import (
    autoawq,
    calibration,
    child,
    converting,
    gate,
    measuring,
    memory,
    pin,
    recipes,
    store,
    tensors,
    trial,
)
from tasks.weights.scales import SCALES
from tasks.weights.store import Manifest
from tasks.weights.verify import is_converted, verify

log = logging.getLogger(__name__)


def convert(base: Path, base_manifest: Manifest, work: Path, context: Context) -> tuple[Path, dict[str, Any]]:
    """Make a release that passed every check.

    Args:
        base: the download.
        work: an empty folder for all that is written.

    Returns:
        The release's folder below `work`, and what to record about it: `metrics`, and `reading`.

    Raises:
        InputError: the architecture is unknown, a layer does not divide, the texts or the converting libraries
            changed, or the texts are too short.
        StageFailed: memory or disk are too small, a child failed, or no candidate is good enough.
    """
    asked = context.run.spec.convert
    recipe = recipes.of(tensors.read_config(base))
    if asked.scheme == "awq":
        tensors.check_group_size(base, asked.group_size)
        autoawq.check(asked, tensors.read_config(base), context.settings)
    if asked.scheme == "fp8_block":
        tensors.check_blocks(base)
    _refuse_changed_libraries(context)
    held_out = _held_out(context)
    job = _job(base, recipe, work, context)
    child.run(
        context.settings.python_convert,
        "tasks.weights.converting",
        job.dumps(),
        work,
        context,
        says="the converter",
        progress=Path(job.progress),
    )
    if asked.converter == "autoawq":
        autoawq.run(job, work, context)
    candidates = {}
    for made in sorted(Path(job.made).iterdir()):
        candidates[made.name] = release = work / made.name
        release.mkdir()
        assemble(base, base_manifest, made, release)
        layout = autoawq.LAYOUT if asked.converter == "autoawq" and made.name == "awq" else asked.scheme
        verify(base, release, layout, asked.group_size, asked.symmetric, recipe)
    measured = measure(base, candidates, Path(job.made), held_out, work, context)
    chosen = gate.choose(measured, gate.limits_of(asked.scheme, asked.gate))
    records = {name: candidate.record() for name, candidate in measured.items()}
    log.info("published is %s of %s", chosen, records)
    metrics = {"made_by": chosen, **records[chosen]}
    if len(records) > 1:
        metrics["others"] = {name: record for name, record in records.items() if name != chosen}
    reason = trial.why_not(asked.scheme, recipe, base_manifest.bytes, context.settings)
    metrics["served"] = (
        f"{trial.NOT_SERVED}: {reason}"
        if reason
        else trial.try_out(
            candidates[chosen],
            measured[chosen],
            held_out,
            calibration.HELD_OUT_SAMPLE_TOKENS,
            work,
            context,
        )
    )
    return candidates[chosen], {"metrics": metrics, "reading": measured[chosen].reading()}


def assemble(base: Path, base_manifest: Manifest, made: Path, release: Path) -> None:
    """The converter's weights, the repository's other files, its config.json with the quantization added."""
    for path in sorted(made.iterdir()):
        if path.suffix == ".safetensors" or path.name == "model.safetensors.index.json":
            path.rename(release / path.name)
    for name in base_manifest.files:
        if not is_converted(name):
            carry_over(name, base, release)
    quantization = tensors.read_config(made).get("quantization_config")
    document = {**tensors.read_config(base), "quantization_config": quantization}
    (release / "config.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def carry_over(name: str, base: Path, release: Path) -> None:
    """Weights share their bytes with the download. Small files are copied: editing one spares the other."""
    target = release / name
    if name.endswith(".safetensors"):
        store.put(base / name, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / name, target)


def measure(
    base: Path,
    candidates: dict[str, Path],
    made: Path,
    held_out: Sequence[str],
    work: Path,
    context: Context,
) -> dict[str, gate.Measured]:
    """Each candidate's numbers."""
    scales = {name: made / name / SCALES for name in candidates}
    job = measuring.Job(
        base=str(base),
        candidates={name: str(folder) for name, folder in candidates.items()},
        scales={name: str(path) for name, path in scales.items() if path.exists()},
        texts=list(held_out),
        tokens=context.run.spec.convert.gate.tokens,
        sample_tokens=calibration.HELD_OUT_SAMPLE_TOKENS,
        report=str(work / "measured.json"),
    )
    child.run(
        context.settings.python_convert,
        "tasks.weights.measuring",
        job.dumps(),
        work,
        context,
        says="measuring",
    )
    report = json.loads(Path(job.report).read_text())
    return {name: gate.Measured(**found) for name, found in report.items()}


def _job(base: Path, recipe: recipes.Recipe, work: Path, context: Context) -> converting.Job:
    """What the converter is to do, once it is known to fit."""
    asked = context.run.spec.convert
    stored = tensors.read(base)
    need = memory.need(stored, asked.scheme, max(asked.calibration_tokens, asked.gate.tokens))
    if asked.converter == "autoawq":
        need = need.all_in_memory()
    available = memory.available()
    what = f"converting {context.run.spec.model.repo} to {asked.scheme}"
    memory.require(need, available, what)
    copies = 2 if asked.scheme == "awq" else 1
    size = copies * sum(tensor.bytes for tensor in stored.values()) + need.on_disk_bytes(available)
    store.require_space(context.settings, size, what)
    return converting.Job(
        source=str(base),
        made=str(work / "made"),
        scheme=asked.scheme,
        candidates=_candidates(asked),
        group_size=asked.group_size,
        symmetric=asked.symmetric,
        ignored=list(recipe.ignored),
        loader=recipe.loader,
        texts=_calibration(context),
        tokens=asked.calibration_tokens,
        sample_tokens=calibration.SAMPLE_TOKENS,
        n_grid=asked.n_grid,
        memory_bytes=need.in_memory_bytes(available),
        progress=str(work / "progress.json"),
    )


def _candidates(asked: Convert) -> list[str]:
    """What the converter makes: awq is always measured against plain rounding to the same bits and groups."""
    if asked.scheme != "awq":
        return [asked.scheme]
    return [converting.ROUNDED] if asked.converter == "autoawq" else [converting.ROUNDED, "awq"]


def _calibration(context: Context) -> list[str]:
    asked = context.run.spec.convert
    if asked.scheme != "awq":
        return []
    texts = calibration.texts(asked.calibration, asked.calibration_tokens)
    _refuse_changed("calibration", asked.calibration, texts, context)
    return texts


def _held_out(context: Context) -> list[str]:
    asked = context.run.spec.convert
    texts = calibration.held_out(asked.gate.texts, asked.gate.tokens)
    if asked.scheme == "awq":
        _refuse_changed("held_out", asked.gate.texts, texts, context)
    return texts


def _refuse_changed(name: str, source: str | None, texts: list[str], context: Context) -> None:
    if calibration.digest(texts) != context.run.pins["fingerprint"][name]:
        field = {"calibration": "convert.calibration", "held_out": "convert.gate.texts"}[name]
        raise InputError(
            f"{field}: {source or 'what ships with Python'} changed since this run started, and its release is "
            f"named by the old texts: start another run"
        )


def _refuse_changed_libraries(context: Context) -> None:
    asked, fingerprint = context.run.spec.convert, context.run.pins["fingerprint"]
    then = {**fingerprint["settings"], **fingerprint["versions"]}
    now = {**pin.settings_of(asked), **pin.versions_of(asked, context.settings)}
    changed = [
        f"{name} {then.get(name)} then, {now.get(name)} now"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
    if changed:
        raise InputError(
            f"convert: the converting libraries, or how they are used, changed since this run started "
            f"({'; '.join(changed)}), and its release is named by what there was: start another run"
        )
