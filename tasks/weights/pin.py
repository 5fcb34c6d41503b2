"""Fix what is open about a run's weights: the commit, the library versions, and so the release.

A release is named by the fingerprint of everything that its bytes depend on. Two runs with one fingerprint
share one release; a new commit, scheme, calibration text or library version gives another.
"""

import hashlib
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks.contract import Context
from tasks.errors import InputError, StageFailed
from tasks.node.atomic import replace_text
from tasks.settings import Settings
from tasks.spec import RunSpec
from tasks.spec.model import Convert
from tasks.weights import calibration, source, store

RECIPE_VERSION = 2
"""Raise it when `recipes` or `converting` change what comes out for the same inputs."""

_LIBRARIES = ("compressed-tensors", "llmcompressor", "safetensors", "torch", "transformers")
"""What decides over a converted checkpoint's bytes."""

_AUTOAWQ_LIBRARIES = ("autoawq", "torch", "transformers")

_COMMIT = re.compile(r"[0-9a-f]{40}")


def pin(spec: RunSpec, settings: Settings) -> dict[str, Any]:
    """`commit`, `versions`, `fingerprint` and `release_id` for this spec, as of now.

    Raises:
        InputError: the repository, the revision or the calibration file does not exist.
        Unavailable: the hub did not answer.
        StageFailed: the converting environment is not there.
    """
    if source.release_named(spec.model.repo) is not None:
        return _pins_of_release(spec.model.repo, settings)
    commit = _commit(spec.model.repo, spec.model.revision, settings)
    versions = versions_of(spec.convert, settings)
    fingerprint = {
        "repo": spec.model.repo,
        "commit": commit,
        "scheme": spec.convert.scheme,
        "settings": settings_of(spec.convert),
        "calibration": _calibration_of(spec.convert),
        "held_out": _held_out_of(spec.convert),
        "versions": versions,
    }
    return {
        "commit": commit,
        "versions": versions,
        "fingerprint": fingerprint,
        "release_id": release_id(fingerprint),
    }


def versions_of(convert: Convert, settings: Settings) -> dict[str, str]:
    """Of the libraries that would convert now; empty where nothing is converted.

    Raises:
        StageFailed: the converting environment is not there.
    """
    if convert.scheme == "none":
        return {}
    versions = converter_versions(settings.python_convert)
    if convert.scheme == "awq" and convert.converter == "autoawq":
        versions |= {
            f"autoawq: {name}": found for name, found in autoawq_versions(settings.python_autoawq).items()
        }
    return versions


def settings_of(convert: Convert) -> dict[str, Any]:
    """What else decides over the bytes of a conversion: the recipe's version, and what the spec asks of the scheme."""
    match convert.scheme:
        case "none":
            return {}
        case "awq":
            return {
                "recipe": RECIPE_VERSION,
                "group_size": convert.group_size,
                "symmetric": convert.symmetric,
                "converter": convert.converter,
                "calibration_tokens": convert.calibration_tokens,
                "n_grid": convert.n_grid,
                "sample_tokens": calibration.SAMPLE_TOKENS,
                "held_out_tokens": convert.gate.tokens,
            }
        case _:
            return {"recipe": RECIPE_VERSION}


def release_id(fingerprint: dict[str, Any]) -> str:
    """A readable name with 48 bits of the fingerprint's hash; lower case, usable as file and model name."""
    hexadecimal = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9.]+", "-", fingerprint["repo"].rpartition("/")[2].lower()).strip("-.")
    group_size = fingerprint["settings"].get("group_size")
    parts = [
        name[:48],
        fingerprint["scheme"].replace("_", "-"),
        f"g{group_size}" if group_size else "",
        hexadecimal,
    ]
    return "-".join(part for part in parts if part)


def converter_versions(python: Path) -> dict[str, str]:
    """Versions of the converting libraries, read from their environment's metadata; nothing is imported.

    Args:
        python: the environment's interpreter.

    Raises:
        StageFailed: it is not there, or a library is missing in it.
    """
    return _installed(python, _LIBRARIES, "make setup", "QWEN_PIPELINE_PYTHON_CONVERT")


def autoawq_versions(python: Path) -> dict[str, str]:
    """Likewise, of the other converter's environment."""
    return _installed(python, _AUTOAWQ_LIBRARIES, "make setup WITH=autoawq", "QWEN_PIPELINE_PYTHON_AUTOAWQ")


def _installed(python: Path, libraries: tuple[str, ...], command: str, setting: str) -> dict[str, str]:
    folders = [str(path) for path in python.parent.parent.glob("lib/python3*/site-packages")]
    found = {
        distribution.metadata["Name"].lower().replace("_", "-"): distribution.version
        for distribution in metadata.distributions(path=folders)
    }
    missing = [library for library in libraries if library not in found]
    if missing:
        raise StageFailed(
            f"the converting environment of {python} lacks {', '.join(missing)}: run `{command}`, or set "
            f"{setting} to the interpreter of one that has them"
        )
    return {library: found[library] for library in libraries}


def is_recalled(repo: str, revision: str, commit: str, context: Context) -> bool:
    """Whether `recall_revision` has nothing to note for this run: a newer run's note is not taken back."""
    if _COMMIT.fullmatch(revision) or not source.needs_the_hub(repo):
        return True
    path = _revision_file(repo, revision, context.settings)
    try:
        return path.read_text().strip() == commit or path.stat().st_mtime > context.run.started_at.timestamp()
    except OSError:
        return False


def recall_revision(repo: str, revision: str, commit: str, settings: Settings) -> None:
    """Note what a branch or tag stood for when it was downloaded, for runs that may not ask the hub."""
    if not _COMMIT.fullmatch(revision):
        replace_text(_revision_file(repo, revision, settings), commit)


def _pins_of_release(repo: str, settings: Settings) -> dict[str, Any]:
    """Those that the release was made by: the run serves it as it is."""
    fingerprint = source.release_manifest(repo, settings).about["fingerprint"]
    return {
        "commit": fingerprint["commit"],
        "versions": fingerprint["versions"],
        "fingerprint": fingerprint,
        "release_id": source.release_named(repo),
    }


def _commit(repo: str, revision: str, settings: Settings) -> str:
    if _COMMIT.fullmatch(revision) and _is_downloaded(repo, revision, settings):
        return revision
    if not settings.hub_offline or not source.needs_the_hub(repo):
        return source.commit_of(repo, revision, settings)
    try:
        commit = _revision_file(repo, revision, settings).read_text().strip()
    except OSError:
        commit = ""
    if not _COMMIT.fullmatch(commit) or not _is_downloaded(repo, commit, settings):
        raise InputError(
            f"model.revision: {repo} at {revision!r} is not in {settings.store}, and HF_HUB_OFFLINE forbids "
            f"asking the hub: download it once without, or name a commit that is there"
        )
    return commit


def _is_downloaded(repo: str, commit: str, settings: Settings) -> bool:
    folder = store.download_folder(settings, repo, commit)
    return store.read_manifest(folder / store.DOWNLOAD_MANIFEST) is not None


def _revision_file(repo: str, revision: str, settings: Settings) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", lambda sign: f"%{ord(sign[0]):02x}", revision)
    return settings.store / "downloads" / repo.replace("/", "--") / "revisions" / name


def _calibration_of(convert: Convert) -> str | None:
    """Hash of the calibration texts; None for schemes that need none."""
    if convert.scheme != "awq":
        return None
    return calibration.digest(calibration.texts(convert.calibration, convert.calibration_tokens))


def _held_out_of(convert: Convert) -> str | None:
    """Hash of the held-out texts; None where they decide over no byte (over awq or plain rounding, they do)."""
    if convert.scheme != "awq":
        return None
    return calibration.digest(calibration.held_out(convert.gate.texts, convert.gate.tokens))
