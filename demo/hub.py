"""A local server that speaks the Hugging Face hub's protocol for model folders on this machine.

    python -m demo.hub --port 0 --root DIR --ready-file FILE

With HF_ENDPOINT set to its address, the real huggingface_hub client downloads `owner/name` from the folder
DIR/owner/name: revision, tree, and files with ETag, X-Repo-Commit, sizes and sha256 of LFS files, Range.

Keeps: it listens on a loopback address only; it serves one commit, that of the folder's content now, under
its hash and as `main`; it reads files and changes none; no file is held in memory. It never speaks of Xet
(no X-Xet-Hash, no xetHash): the client would then take the bytes from elsewhere.

The protocol is what huggingface_hub 1.33 and 2.4 ask for (file_download.py, _snapshot_download.py,
hf_api.py and utils/_http.py there).
"""

import argparse
import ipaddress
import json
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from demo.hub_documents import model_info, tree
from demo.hub_faults import Faults
from demo.hub_files import CHUNK_BYTES, HubFile, Repository, Snapshot
from tasks.errors import InputError, StageError

_REPO = r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)"  # no leading dot: neither hidden folders nor ".."
_INFO = re.compile(rf"/api/models/{_REPO}(?:/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?")
_RESOLVE = re.compile(rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")

_log = logging.getLogger("demo.hub")


@dataclass(frozen=True)
class Seen:
    """A request that was served. For tests."""

    method: str
    path: str
    range: str | None


class Hub:
    """The server. As a context manager it serves from threads of this process until the block ends."""

    def __init__(
        self, root: Path, *, host: str = "127.0.0.1", port: int = 0, faults: Faults | None = None
    ) -> None:
        """Listen at once; port 0 takes a free one.

        Raises:
            InputError: `host` is not a loopback address of IPv4, or the port is taken.
        """
        if not _is_loopback(host):
            raise InputError(
                f"host {host} is no loopback address such as 127.0.0.1; the hub asks nobody for a password "
                f"and so serves this machine only"
            )
        self.seen: deque[Seen] = deque(maxlen=1000)
        self.faults = faults or Faults()
        self.tags: dict[str, str] = {}
        """Further names of commits, for every repository that has the commit. For tests."""
        self._root = root
        self._repositories: dict[str, Repository] = {}
        self._lock = threading.Lock()
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise InputError(f"port {port} of {host}: {error.strerror}; choose another, or 0") from error
        self._server.hub = self

    @property
    def url(self) -> str:
        """What HF_ENDPOINT must be."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def repository(self, repo_id: str) -> Repository | None:
        """The folder of that name under the root, as long as it is there."""
        folder = self._root / repo_id
        if not folder.is_dir():
            return None
        with self._lock:
            return self._repositories.setdefault(repo_id, Repository(folder))

    def serve(self) -> None:
        """Serve until the process ends or `close` is called."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve, name="hub", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub


@dataclass
class _NotFound(Exception):
    """The client tells these apart by X-Error-Code alone."""

    code: str
    message: str
    commit: str | None = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        _log.info(format, *args)

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.server.hub.seen.append(Seen(self.command, url.path, self.headers.get("Range")))
        refusal = self.server.hub.faults.refusal(url.path)
        if refusal is not None:
            self._send_json(refusal.status, {"error": "fault"}, {"Retry-After": str(refusal.retry_after_s)})
            return
        try:
            self._route(url.path, parse_qs(url.query))
        except _NotFound as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            if error.commit:
                headers["X-Repo-Commit"] = error.commit
            self._send_json(HTTPStatus.NOT_FOUND, {"error": error.message}, headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client went away

    def _route(self, path: str, query: dict[str, list[str]]) -> None:
        if match := _TREE.fullmatch(path):
            snapshot = self._snapshot(match)
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            folder = unquote(match["path"] or "")
            entries = tree(snapshot, folder, recursive=recursive)
            if not entries:
                raise _NotFound("EntryNotFound", f"no folder {folder} in {match['repo']}", snapshot.commit)
            for entry in entries:
                if "lfs" in entry and self.server.hub.faults.lies_about(entry["path"]):
                    entry["lfs"]["oid"] = "0" * 64
            self._send_json(HTTPStatus.OK, entries, {"X-Repo-Commit": snapshot.commit})
        elif match := _INFO.fullmatch(path):
            snapshot = self._snapshot(match)
            document = model_info(match["repo"], snapshot, blobs="blobs" in query)
            self._send_json(HTTPStatus.OK, document, {"X-Repo-Commit": snapshot.commit})
        elif match := _RESOLVE.fullmatch(path):
            snapshot = self._snapshot(match)
            name = unquote(match["path"])
            if name not in snapshot.files:
                raise _NotFound("EntryNotFound", f"no file {name} in {match['repo']}", snapshot.commit)
            self._send_file(snapshot.files[name], snapshot.commit)
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": f"this hub serves nothing at {path}"}, {})

    def _snapshot(self, match: re.Match[str]) -> Snapshot:
        repository = self.server.hub.repository(match["repo"])
        if repository is None:
            raise _NotFound("RepoNotFound", f"no repository {match['repo']}")
        snapshot = repository.snapshot()
        revision = unquote(match["revision"] or "main")
        if self.server.hub.tags.get(revision, revision) not in ("main", snapshot.commit):
            raise _NotFound("RevisionNotFound", f"no revision {revision} of {match['repo']}")
        return snapshot

    def _send_json(self, status: int, document: object, headers: dict[str, str]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, file: HubFile, commit: str) -> None:
        wanted = self._wanted_range(file)
        if wanted is None:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("Content-Range", f"bytes */{file.size_bytes}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        partial = len(wanted) != file.size_bytes
        self.send_response(HTTPStatus.PARTIAL_CONTENT if partial else HTTPStatus.OK)
        if partial:
            self.send_header("Content-Range", f"bytes {wanted.start}-{wanted.stop - 1}/{file.size_bytes}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{file.etag}"')
        if file.lfs:
            self.send_header("X-Linked-Size", str(file.size_bytes))
            self.send_header("X-Linked-Etag", f'"{file.etag}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(wanted)))
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(file, wanted)

    def _wanted_range(self, file: HubFile) -> range | None:
        """The bytes that the request asks for; None when the file has none of them."""
        whole = range(file.size_bytes)
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None or match.groups() == ("", ""):
            return whole
        first, last = match.groups()
        wanted = whole[int(first) : int(last) + 1 if last else None] if first else whole[-int(last) :]
        return wanted or None

    def _send_body(self, file: HubFile, wanted: range) -> None:
        faults = self.server.hub.faults
        if faults.truncates(file.path):
            wanted = wanted[: len(wanted) // 2]
            self.close_connection = True
        for chunk in _chunks(file.place, wanted):
            if faults.falsifies(file.path) and chunk.end == file.size_bytes:
                chunk = _Chunk(chunk.data[:-1] + bytes([chunk.data[-1] ^ 1]), chunk.end)
            self.wfile.write(chunk.data)


@dataclass(frozen=True)
class _Chunk:
    data: bytes
    end: int  # offset in the file of the byte after it


def _chunks(place: Path, wanted: range) -> Iterator[_Chunk]:
    with place.open("rb") as file:
        file.seek(wanted.start)
        position = wanted.start
        while position < wanted.stop:
            data = file.read(min(CHUNK_BYTES, wanted.stop - position))
            if not data:
                return  # the file shrank meanwhile: the client sees too few bytes
            position += len(data)
            yield _Chunk(data, position)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.hub", description="Serve model folders as the hub does.")
    parser.add_argument("--root", type=Path, required=True, help="holds the folders OWNER/NAME")
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--ready-file", type=Path, help="gets the address once the hub listens")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Serve until killed; returns the exit status."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        hub = Hub(options.root, host=options.host, port=options.port)
    except StageError as error:
        print(f"demo.hub: {error}", file=sys.stderr)
        return error.exit_status
    if options.ready_file is not None:
        draft = options.ready_file.with_name(f".{options.ready_file.name}.{os.getpid()}")
        draft.write_text(hub.url)
        draft.replace(options.ready_file)
    try:
        hub.serve()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
