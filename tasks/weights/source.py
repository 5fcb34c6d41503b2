"""Where weights come from, by what `model.repo` says: the hub (OWNER/NAME), a folder of this node (/PATH), or a
release that is in the store already (release:ID).
"""

from collections.abc import Callable
from pathlib import Path

from tasks.errors import InputError
from tasks.settings import Settings
from tasks.weights import folder, hub, store
from tasks.weights.hub import RemoteFile
from tasks.weights.store import Manifest

_RELEASE = "release:"


def release_named(repo: str) -> str | None:
    """The id of the release that `model.repo` names; None when it names something to download."""
    return repo.removeprefix(_RELEASE) if repo.startswith(_RELEASE) else None


def release_manifest(repo: str, settings: Settings) -> Manifest:
    """The manifest of the release that `model.repo` names.

    Raises:
        InputError: the store holds no such release; names those it holds.
    """
    name = release_named(repo) or ""
    found = store.releases(settings)
    if name not in found:
        known = ", ".join(found) or "none"
        raise InputError(f"model.repo: there is no release {name!r} in {settings.store}; there are: {known}")
    return found[name]


def needs_the_hub(repo: str) -> bool:
    """Whether it is on the hub."""
    return release_named(repo) is None and not folder.is_folder(repo)


def commit_of(repo: str, revision: str, settings: Settings) -> str:
    """The commit that a revision names now; of a folder, a name for what it holds now.

    Raises:
        InputError, Unavailable: see `hub.commit_of` and `folder.commit_of`.
    """
    return folder.commit_of(Path(repo)) if folder.is_folder(repo) else hub.commit_of(repo, revision, settings)


def files_of(repo: str, commit: str, settings: Settings) -> list[RemoteFile]:
    """Every file there is at that commit, with what its content should be.

    Raises:
        InputError: also when the folder holds something else by now.
        Unavailable: the hub did not answer.
    """
    if not folder.is_folder(repo):
        return hub.files_of(repo, commit, settings)
    if folder.commit_of(Path(repo)) != commit:
        raise InputError(f"model.repo: {repo} was changed since this run started: start another run")
    return folder.files_of(Path(repo))


def fetch(
    repo: str, commit: str, file: RemoteFile, part: Path, settings: Settings, on_bytes: Callable[[int], None]
) -> None:
    """Bring `part` to the size of `file`; see `hub.fetch` and `folder.fetch`."""
    if folder.is_folder(repo):
        folder.fetch(Path(repo), file, part, on_bytes)
    else:
        hub.fetch(repo, commit, file, part, settings, on_bytes)
