"""Fetch the weights: every file hashed against what the hub says before it counts.

Keeps:
- Nothing partial is ever taken for whole: files gather in a staging folder, which becomes the download by one
  rename after the last hash was right. What a killed attempt had fetched is found there and proven again.
- A file that went missing or was changed later is fetched again, alone.
- Only safetensors and text are fetched. Pickled weights can run code when they are loaded, and so can the
  Python files of a repository.
"""

import logging
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tasks.contract import Context, Outcome
from tasks.errors import InputError, StageFailed, Unavailable
from tasks.node import lock
from tasks.settings import Settings
from tasks.weights import pin, source, store, tensors
from tasks.weights.hub import RemoteFile
from tasks.weights.store import File, Manifest

log = logging.getLogger(__name__)

_TEXT = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken", ".md"})
"""Configuration, tokenizer, chat template, licence."""

_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".npz"})

_TRIES = 3
"""For a file that arrives with wrong bytes: once can be the connection, three times is a broken mirror."""

_SHOW_EVERY_S = 1.0

_CONVERSION_SHARE = {"none": 0.0, "fp8": 1.0, "fp8_block": 1.0, "awq": 2.0}
"""Space that converting takes over size of the download, at most: embeddings stay as they are, so small models
shrink little, and awq makes two candidates. `none` shares the download's files."""

_SPARE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Plan:
    """What is missing of a download."""

    folder: Path
    manifest: Manifest | None
    """What it should hold; None: never completed, so the hub must be asked."""
    wrong: tuple[str, ...]
    leftover: bool
    """Whether a killed attempt left its staging folder."""
    noted: bool
    """Whether it is written down what commit the spec's branch or tag stood for; see `pin`."""

    @property
    def whole(self) -> bool:
        """Whether every file is there with the bytes that the hub announced."""
        return self.manifest is not None and not self.wrong

    @property
    def satisfied(self) -> bool:
        """Whether nothing is to be done."""
        return self.whole and not self.leftover and self.noted

    @property
    def reason(self) -> str:
        """See `tasks.contract`."""
        if self.manifest is None:
            return f"{self.folder.parent.name} at {self.folder.name[:12]} is not in the store"
        if self.wrong:
            return f"missing, changed or not the repository's: {', '.join(self.wrong)}"
        if self.leftover:
            return "a killed attempt left files behind"
        if not self.noted:
            return "all files are in the store, but not what the spec's branch or tag stood for"
        size = f"{self.manifest.bytes / 1e9:.2f} GB"
        return f"all {len(self.manifest.files)} files are in the store, {size}, and right"


def plan(context: Context) -> Plan:
    """Compare the store with the commit that the run is pinned to; asks the hub nothing.

    A run that is given a release needs nothing but the release.
    """
    repo, commit = _source(context)
    if source.release_named(repo) is not None:
        folder = store.release_folder(context.settings, context.run.pins["release_id"])
        return Plan(folder, store.read_manifest(folder / store.MANIFEST), (), leftover=False, noted=True)
    folder = store.download_folder(context.settings, repo, commit)
    manifest = store.read_manifest(folder / store.DOWNLOAD_MANIFEST)
    if manifest is not None and (manifest.about.get("repo"), manifest.about.get("commit")) != (repo, commit):
        manifest = None
    wrong = store.wrong_files(folder, manifest, context.settings) if manifest else []
    noted = pin.is_recalled(repo, context.run.spec.model.revision, commit, context)
    return Plan(folder, manifest, tuple(wrong), _staging(context).exists(), noted)


def apply(plan: Plan, context: Context) -> None:
    """Fetch what is missing.

    Raises:
        InputError: the repository holds no safetensors, or a name that leaves its folder.
        Unavailable: the hub did not answer, or the hub is needed and `HF_HUB_OFFLINE` forbids asking.
        StageFailed: the disk is too small, or the hub keeps sending other bytes than it announces.
        Busy: another run fetches the same and took too long.
    """
    repo, commit = _source(context)
    purpose = f"download of {repo} for run {context.run.run_id}"
    name = f"download-{repo.replace('/', '--')}-{commit[:12]}.lock"
    with lock.held(context.settings.locks / name, purpose, context.settings.weights_wait_s):
        plan = _plan_again(context)
        if source.release_named(repo) is not None:
            source.release_manifest(repo, context.settings)  # says that it is not there any more
            return
        # First, so that a kill cannot lose it; it means nothing until the download is whole.
        if not plan.noted:
            pin.recall_revision(repo, context.run.spec.model.revision, commit, context.settings)
        if plan.whole:
            store.remove(_staging(context))
        else:
            _complete(plan, context)


def verify(context: Context) -> Outcome:
    """Read the store again."""
    found = plan(context)
    if found.manifest is None or found.wrong:
        raise StageFailed(
            f"the download is not whole after all: {found.reason}; did something delete files below it?"
        )
    files, size = len(found.manifest.files), found.manifest.bytes
    commit = context.run.pins["commit"]
    facts = {"path": str(found.folder), "commit": commit, "bytes": size, "files": files}
    if source.release_named(context.run.spec.model.repo) is not None:
        return Outcome(f"the run is given release {found.folder.name}: there is nothing to download", facts)
    return Outcome(f"{files} files, {size / 1e9:.2f} GB, every hash as the hub says", facts)


_plan_again = plan


def wanted(files: list[RemoteFile]) -> list[RemoteFile]:
    """Of a repository's files, those a checkpoint is made of.

    Raises:
        InputError: a name leaves its folder, or the weights are not safetensors.
    """
    for file in files:
        store.safe_name(file.name)
    chosen = [file for file in files if _is_wanted(Path(file.name))]
    if not any(file.name.endswith(".safetensors") for file in chosen):
        pickled = [file.name for file in files if Path(file.name).suffix in _PICKLED]
        has = f"only {', '.join(pickled[:3])}, which can run code when loaded" if pickled else "none"
        raise InputError(f"model.repo: weights are taken as .safetensors only, and the repository has {has}")
    return chosen


def _is_wanted(path: Path) -> bool:
    if any(part.startswith(".") for part in path.parts):
        return False
    if path.suffix == ".safetensors":
        return len(path.parts) == 1  # deeper ones belong to other uses of the repository
    return path.suffix in _TEXT or path.name.startswith(("LICENSE", "NOTICE"))


def _complete(plan: Plan, context: Context) -> None:
    """Gather every file in staging, from the folder as it is and from the hub, and publish it."""
    repo, commit = _source(context)
    settings = context.settings
    staging = _staging(context)
    if plan.manifest is not None:
        files = [_announced(name, plan.manifest) for name in plan.manifest.files]
    else:
        if settings.hub_offline and source.needs_the_hub(repo):
            raise Unavailable(
                f"{repo} at {commit} is not in {settings.store}, and HF_HUB_OFFLINE forbids asking for it"
            )
        files = wanted(source.files_of(repo, commit, settings))
    _gather(files, plan, staging)
    missing = [file for file in files if not (staging / file.name).exists()]
    if missing and settings.hub_offline and source.needs_the_hub(repo):
        raise Unavailable(f"{missing[0].name} of {repo} must be fetched again, and HF_HUB_OFFLINE forbids it")
    _require_space(files, missing, staging, context)
    _fetch_all(missing, files, staging, context)
    for part in staging.rglob("*.part"):
        part.unlink()
    about = {"kind": "download", "repo": repo, "commit": commit}
    # Of large files the hub names the sha256, which was just proven; of small ones only git's hash.
    small = [file for file in files if file.sha256 is None]
    computed = store.sha256_of_all(staging / file.name for file in small)
    sha256 = {file.name: file.sha256 for file in files} | {
        f.name: s for f, s in zip(small, computed, strict=True)
    }
    described = {file.name: File(file.size, sha256[file.name] or "") for file in files}
    tensors.read(staging)
    store.publish(staging, plan.folder, store.DOWNLOAD_MANIFEST, Manifest(about, described), settings)


def _gather(files: list[RemoteFile], plan: Plan, staging: Path) -> None:
    """Keep in staging what is right there, and link what is right in the folder; delete the rest."""
    staging.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in files}
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if not path.is_dir() and name.removesuffix(".part") not in names:
            path.unlink()
    for file in files:
        target = staging / file.name
        if target.exists() and not _is_right(target, file):
            target.unlink()
        if not target.exists() and _is_right(plan.folder / file.name, file):
            store.put(plan.folder / file.name, target)


def _fetch_all(missing: list[RemoteFile], files: list[RemoteFile], staging: Path, context: Context) -> None:
    """Fetch several files at once, largest first, and show how many bytes of all are there."""
    total = sum(file.size for file in files)
    progress = _Progress(total - sum(file.size for file in missing))
    with ThreadPoolExecutor(context.settings.hub_connections, "fetch") as threads:
        largest_first = sorted(missing, key=lambda file: -file.size)
        pending = {threads.submit(_fetch_one, file, staging, context, progress) for file in largest_first}
        try:
            while pending:
                done, pending = wait(pending, _SHOW_EVERY_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                progress.show(context, total)
        except BaseException:
            progress.stopped.set()
            for future in pending:
                future.cancel()
            raise


def _fetch_one(file: RemoteFile, staging: Path, context: Context, progress: "_Progress") -> None:
    repo, commit = _source(context)
    part = staging / f"{file.name}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, _TRIES + 1):
        if part.exists():
            progress.add(part.stat().st_size)
        source.fetch(repo, commit, file, part, context.settings, progress.add)
        if _is_right(part, file):
            part.replace(staging / file.name)
            return
        log.warning("%s arrived with wrong bytes (try %d of %d)", file.name, attempt, _TRIES)
        progress.add(-part.stat().st_size)
        part.unlink()
    where = context.settings.hub_endpoint or "huggingface.co"
    raise StageFailed(
        f"{file.name} of {repo}: what {where} sends does not have the hash that it announces "
        f"({(file.sha256 or file.blob_id or '')[:12]}...), {_TRIES} times. Nothing was published; if "
        f"HF_ENDPOINT is a mirror or a proxy stands between, its copy is broken"
    )


class _Progress:
    """Bytes that are there, counted from several threads."""

    def __init__(self, done: int) -> None:
        self.stopped = threading.Event()
        self._done = done
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._at_start = done

    def add(self, count: int) -> None:
        """Count bytes; ends the calling transfer once another one has failed."""
        if self.stopped.is_set():
            raise _Stopped
        with self._lock:
            self._done += count

    def show(self, context: Context, total: int) -> None:
        """To the ledger and the log."""
        done = max(0, min(self._done, total))
        rate = max(0, self._done - self._at_start) / max(time.monotonic() - self._began, 0.001)
        context.claim.progress(done, total, "bytes", bytes_per_s=round(rate))
        left_s = (total - done) / rate if rate else float("inf")
        log.info("%.2f of %.2f GB, %.1f MB/s, %.0f s left", done / 1e9, total / 1e9, rate / 1e6, left_s)


class _Stopped(Exception):
    """Another file's transfer failed, so this one ends too."""


def _is_right(path: Path, file: RemoteFile) -> bool:
    try:
        if path.is_symlink() or path.stat().st_size != file.size:
            return False
        if file.sha256 is not None:
            return store.sha256_of_all([path]) == [file.sha256]
        return store.git_blob_id(path) == file.blob_id
    except OSError:
        return False


def _announced(name: str, manifest: Manifest) -> RemoteFile:
    """A file as the hub described it when the manifest was made: its sha256 was proven then."""
    file = manifest.files[name]
    return RemoteFile(name, file.size, file.sha256, None)


def _require_space(
    files: list[RemoteFile], missing: list[RemoteFile], staging: Path, context: Context
) -> None:
    there = sum(part.stat().st_size for part in staging.rglob("*.part"))
    weights = sum(file.size for file in files if file.name.endswith(".safetensors"))
    to_fetch = sum(file.size for file in missing)
    release = int(weights * _CONVERSION_SHARE[context.run.spec.convert.scheme])
    what = f"fetching {to_fetch / 1e9:.2f} GB and making the release of {release / 1e9:.2f} GB"
    store.require_space(context.settings, max(0, to_fetch - there) + release + _SPARE_BYTES, what)


def _source(context: Context) -> tuple[str, str]:
    return context.run.spec.model.repo, str(context.run.pins["commit"])


def _staging(context: Context) -> Path:
    repo, commit = _source(context)
    return _staging_folder(context.settings, repo, commit)


def _staging_folder(settings: Settings, repo: str, commit: str) -> Path:
    return settings.store / "staging" / f"{store.DOWNLOAD_STAGING}{repo.replace('/', '--')}-{commit}"
