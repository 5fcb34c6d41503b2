"""The Hugging Face hub, or a mirror of it, through its own client.

Keeps: every failure is either the user's (`InputError`, names the field), passing (`Unavailable`, after
bounded retries that honour Retry-After) or the operator's (`StageFailed`). The token comes from the
environment alone and is sent to the hub alone. Nothing is decided here about what counts: see `download`.
"""

import errno
import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, file_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from tasks.errors import InputError, StageFailed, Unavailable
from tasks.settings import Settings

log = logging.getLogger(__name__)

# Left to itself the client waits as long as a 429 asks, an hour and more, five times: who waits is decided here.
file_download.http_stream_backoff = partial(file_download.http_stream_backoff, max_retries=0)  # type: ignore[attr-defined]

Answer = TypeVar("Answer")

_ATTEMPTS = 4
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
"""A hub that asks for a longer pause than this is left alone: the next try of the stage goes on from here."""

_ANSWER_TIMEOUT_S = 15.0

_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})

_NETWORK_ERRORS: tuple[type[BaseException], ...] = (HfHubHTTPError.__mro__[1], OSError)
"""What the client lets through when a connection fails. Its HTTP library, whose base error this is, changed
its name between versions of the client (httpx, httpx2)."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository, with what the hub says its content is."""

    name: str
    size: int
    sha256: str | None
    """Of large files (LFS)."""
    blob_id: str | None
    """git's hash of small files."""


def commit_of(repo: str, revision: str, settings: Settings) -> str:
    """The commit that a branch, tag or commit of a repository names now.

    Raises:
        InputError: the repository or the revision does not exist, or the token does not open it.
        Unavailable: the hub did not answer.
    """
    info = _ask(
        lambda: _api(settings).model_info(repo, revision=revision, timeout=_ANSWER_TIMEOUT_S),
        repo,
        revision,
        settings,
    )
    if not info.sha:
        raise StageFailed(f"the hub at {_endpoint(settings)} named no commit for {repo} at {revision}")
    return str(info.sha)


def files_of(repo: str, commit: str, settings: Settings) -> list[RemoteFile]:
    """Every file of the repository at that commit, sorted by name.

    Raises:
        InputError, Unavailable: as for `commit_of`.
    """
    entries = _ask(
        lambda: list(_api(settings).list_repo_tree(repo, recursive=True, revision=commit)),
        repo,
        commit,
        settings,
    )
    files = [
        RemoteFile(entry.path, entry.lfs.size, entry.lfs.sha256, None)
        if entry.lfs is not None
        else RemoteFile(entry.path, entry.size, None, entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile)
    ]
    return sorted(files, key=lambda file: file.name)


def fetch(
    repo: str, commit: str, file: RemoteFile, part: Path, settings: Settings, on_bytes: Callable[[int], None]
) -> None:
    """Bring `part` to the size of `file`, going on after the bytes it holds already.

    Args:
        on_bytes: called with the number of bytes that came (negative: of bytes that are thrown away). What it
            raises ends the transfer.

    Raises:
        InputError, Unavailable: as for `commit_of`.
        StageFailed: `part` cannot be written; a full disk is told as that.
    """
    disable_progress_bars()
    url = hf_hub_url(repo, file.name, revision=commit, endpoint=settings.hub_endpoint)
    headers = build_hf_headers(token=_token(settings))
    # Compressed on the way, a file's length would be unknown and a rest of it could not be asked for.
    headers["Accept-Encoding"] = "identity"

    def go_on() -> None:
        with _Counting(part, on_bytes, settings) as target:
            here = target.seek(0, io.SEEK_END)
            if here > file.size:
                target.truncate(0)
                here = 0
            http_get(url, target, resume_size=here, headers=headers, expected_size=file.size)

    _ask(go_on, repo, commit, settings)


class _Counting(io.FileIO):
    """A file that tells how many bytes it gained, and whose own errors are not taken for the hub's."""

    def __init__(self, path: Path, on_bytes: Callable[[int], None], settings: Settings) -> None:
        self._path = path
        self._store = settings.store
        self._on_bytes = on_bytes
        with self._own_errors():
            path.touch()
            super().__init__(path, "r+")

    def write(self, data: Any) -> int:
        view = memoryview(data)
        written = 0
        with self._own_errors():
            while written < len(view):
                written += super().write(view[written:]) or 0
        self._on_bytes(written)
        return written

    def truncate(self, size: int | None = None) -> int:
        with self._own_errors():
            before = self.seek(0, io.SEEK_END) if size is not None else _end_of(self)
            kept = super().truncate(size)
            self.seek(kept)
        self._on_bytes(kept - before)
        return kept

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StageFailed(
                    f"the disk below {self._store} is full: remove old releases or downloads; what was fetched is kept"
                ) from None
            raise StageFailed(f"{self._path} cannot be written: {error.strerror}") from None


def _end_of(file: io.FileIO) -> int:
    here = file.tell()
    end = file.seek(0, io.SEEK_END)
    file.seek(here)
    return end


def _ask(call: Callable[[], Answer], repo: str, revision: str, settings: Settings) -> Answer:
    """`call`, repeated while the trouble is passing, its errors in this project's terms."""
    where = _endpoint(settings)
    wait_s = _FIRST_WAIT_S
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call()
        except HFValidationError as error:
            raise InputError(
                f"model.repo: {repo!r} is not the name of a repository (OWNER/NAME): {error}"
            ) from None
        except RevisionNotFoundError:
            raise InputError(
                f"model.revision: repository {repo} at {where} has no branch, tag or commit {revision!r}"
            ) from None
        except GatedRepoError:
            raise InputError(
                f"model.repo: {repo} at {where} is gated: accept its terms there and set HF_TOKEN to a token "
                f"of that account"
            ) from None
        except RepositoryNotFoundError:
            raise InputError(
                f"model.repo: there is no repository {repo} at {where}, or it is private and HF_TOKEN "
                f"does not open it"
            ) from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise InputError(
                    f"model.repo: the hub at {where} refused {repo} ({status}): check HF_TOKEN"
                ) from None
            if status not in _PASSING_STATUS:
                raise StageFailed(f"the hub at {where} answered {status} for {repo} at {revision}") from None
            trouble = f"it answered {status}"
            wait_s = max(wait_s, _retry_after_s(error))
        except _NETWORK_ERRORS as error:
            trouble = (str(error).strip() or type(error).__name__).splitlines()[0]
        if attempt == _ATTEMPTS or wait_s > _LONGEST_WAIT_S:
            break
        log.warning("the hub at %s: %s; next try in %.0f s", where, trouble, wait_s)
        time.sleep(wait_s)
        wait_s *= 2
    raise Unavailable(
        f"the hub at {where} is not to be had for {repo}: {trouble} ({attempt} tries). Nothing is lost, "
        f"try again later; HF_ENDPOINT names a mirror, HF_HUB_OFFLINE=1 takes what is on disk"
    )


def _retry_after_s(error: HfHubHTTPError) -> float:
    try:
        return float(error.response.headers.get("Retry-After", "0"))
    except ValueError:  # a date (RFC 9110): rare, and the usual wait does
        return 0.0


def _api(settings: Settings) -> HfApi:
    return HfApi(endpoint=settings.hub_endpoint, token=_token(settings))


def _token(settings: Settings) -> str | bool:
    """The token, or False: the client must not look for one in somebody's home folder."""
    return settings.hub_token.get_secret_value() if settings.hub_token else False


def _endpoint(settings: Settings) -> str:
    return settings.hub_endpoint or "huggingface.co"
