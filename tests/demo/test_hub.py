"""The local hub, asked by the real huggingface_hub client."""

import hashlib
import json
import os
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest
from huggingface_hub import HfApi, RepoFile, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from demo.hub import Hub
from demo.hub_faults import Faults, Refusal
from tasks.errors import InputError

REPO = "owner/some-model"
WEIGHTS = "model.safetensors"


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root" / REPO
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "sub" / "empty.txt").write_text("")
    (folder / WEIGHTS).write_bytes(hashlib.sha256(b"weights").digest() * 100_000)
    (folder / ".manifest.json").write_text("not for the hub")
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def no_xet(monkeypatch):
    """Xet is for the real hub's storage; without it a defect cannot reach for the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)


def download(hub, tmp_path, **options):
    return Path(
        snapshot_download(REPO, endpoint=hub.url, cache_dir=tmp_path / "cache", token=False, **options)
    )


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".manifest.json"
    }


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_snapshot_has_the_bytes_of_the_folder(root, tmp_path):
    with Hub(root) as hub:
        snapshot = download(hub, tmp_path)
        assert contents(snapshot) == contents(root / REPO)
        assert snapshot.name == HfApi(endpoint=hub.url, token=False).model_info(REPO).sha


def test_sizes_and_hashes_are_those_that_git_and_git_lfs_would_give(root):
    with Hub(root) as hub:
        info = HfApi(endpoint=hub.url, token=False).model_info(REPO, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings}
    assert set(siblings) == {"config.json", "sub/empty.txt", WEIGHTS}
    assert siblings["sub/empty.txt"].blob_id == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert siblings["config.json"].lfs is None
    for path, sibling in siblings.items():
        if sibling.lfs is None:
            command = ["git", "hash-object", root / REPO / path]
            assert subprocess.check_output(command, text=True).strip() == sibling.blob_id
    weights = root / REPO / WEIGHTS
    assert siblings[WEIGHTS].lfs.sha256 == sha256(weights)
    assert siblings[WEIGHTS].lfs.size == siblings[WEIGHTS].size == weights.stat().st_size


def test_the_tree_agrees_with_the_model_info(root):
    with Hub(root) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        entries = list(api.list_repo_tree(REPO, recursive=True))
        top = {entry.path for entry in api.list_repo_tree(REPO)}
        siblings = api.model_info(REPO, files_metadata=True).siblings
    files = {entry.path: (entry.size, entry.blob_id) for entry in entries if isinstance(entry, RepoFile)}
    assert files == {sibling.rfilename: (sibling.size, sibling.blob_id) for sibling in siblings}
    assert top == {"config.json", WEIGHTS, "sub"}


def test_a_body_that_ends_early_is_resumed_where_it_ended(root, tmp_path, monkeypatch):
    chunk = 64_000  # what the client holds before it writes; 10 MB by default
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", chunk)
    got = (root / REPO / WEIGHTS).stat().st_size // 2 // chunk * chunk
    with Hub(root, faults=Faults(truncated={WEIGHTS: 1})) as hub:
        snapshot = download(hub, tmp_path)
        ranges = [seen.range for seen in hub.seen if seen.method == "GET" and seen.path.endswith(WEIGHTS)]
    assert ranges == [None, f"bytes={got}-"]
    assert sha256(snapshot / WEIGHTS) == sha256(root / REPO / WEIGHTS)


def test_wrong_bytes_of_the_right_size_can_only_be_told_by_their_hash(root, tmp_path):
    with Hub(root, faults=Faults(wrong_bytes=frozenset({WEIGHTS}))) as hub:
        got = download(hub, tmp_path) / WEIGHTS
        info = HfApi(endpoint=hub.url, token=False).model_info(REPO, files_metadata=True)
    promised = next(sibling.lfs for sibling in info.siblings if sibling.rfilename == WEIGHTS)
    assert got.stat().st_size == promised.size
    assert sha256(got) != promised.sha256


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_says_when_to_come_again_and_ends(root, tmp_path, status):
    refusal = Refusal(status, times=1, path="/resolve/", retry_after_s=1)
    with Hub(root, faults=Faults(refusals=(refusal,))) as hub:
        with pytest.raises(HfHubHTTPError) as refused:
            HfApi(endpoint=hub.url, token=False).get_hf_file_metadata(
                url=f"{hub.url}/{REPO}/resolve/main/config.json"
            )
        assert refused.value.response.status_code == status
        assert refused.value.response.headers["Retry-After"] == "1"
        assert contents(download(hub, tmp_path)) == contents(root / REPO)


def test_what_is_not_there_is_told_apart(root, tmp_path):
    with Hub(root) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("owner/nothing")
        with pytest.raises(RevisionNotFoundError):
            api.model_info(REPO, revision="v2")
        with pytest.raises(RevisionNotFoundError):
            api.model_info(REPO, revision="0" * 40)
        with pytest.raises(RemoteEntryNotFoundError):
            list(api.list_repo_tree(REPO, "nothing"))
        for name in ("nothing.json", ".manifest.json"):
            with pytest.raises(RemoteEntryNotFoundError):
                hf_hub_download(REPO, name, endpoint=hub.url, cache_dir=tmp_path / "cache", token=False)


def get(hub, path, **headers):
    connection = HTTPConnection(hub.url.removeprefix("http://"))
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Range"), response.read()
    finally:
        connection.close()


def test_a_range_is_answered_by_these_bytes_alone(root):
    content = (root / REPO / WEIGHTS).read_bytes()
    size = len(content)
    path = f"/{REPO}/resolve/main/{WEIGHTS}"
    with Hub(root) as hub:
        assert get(hub, path, Range="bytes=5-9") == (206, f"bytes 5-9/{size}", content[5:10])
        assert get(hub, path, Range="bytes=-3") == (206, f"bytes {size - 3}-{size - 1}/{size}", content[-3:])
        assert get(hub, path, Range=f"bytes={size - 1}-") == (
            206,
            f"bytes {size - 1}-{size - 1}/{size}",
            content[-1:],
        )
        assert get(hub, path, Range=f"bytes={size}-") == (416, f"bytes */{size}", b"")
        assert get(hub, path, Range="lines=1-2") == (200, None, content)


@pytest.mark.parametrize(
    "path",
    [
        f"/{REPO}/resolve/main/../../../outside/secret",
        f"/{REPO}/resolve/main/%2E%2E/%2E%2E/%2E%2E/outside/secret",
        "/../outside/resolve/main/secret",
        "/owner/../resolve/main/some-model/config.json",
        "/owner/.hidden/resolve/main/secret",
    ],
)
def test_nothing_but_the_repositories_is_served(root, path):
    for folder in (root.parent / "outside", root / "owner" / ".hidden"):
        folder.mkdir()
        (folder / "secret").write_text("secret")
    with Hub(root) as hub:
        assert get(hub, path)[0] == 404


def test_the_commit_is_the_content(root, tmp_path):
    with Hub(root) as hub:
        api = HfApi(endpoint=hub.url, token=False)
        before = api.model_info(REPO).sha
        config = root / REPO / "config.json"
        original = config.read_text()
        config.write_text('{"model_type": "qwen3"}')
        assert api.model_info(REPO).sha != before
        with pytest.raises(RevisionNotFoundError):
            api.model_info(REPO, revision=before)
        config.write_text(original)
        assert api.model_info(REPO, revision=before).sha == before


def test_a_second_server_reads_no_file_to_hash_it_again(root, monkeypatch):
    with Hub(root) as hub:
        first = HfApi(endpoint=hub.url, token=False).model_info(REPO).sha

    def never(place, size_bytes):
        raise AssertionError(f"{place} is hashed again")

    monkeypatch.setattr("demo.hub_files._hash_file", never)
    with Hub(root) as hub:
        assert HfApi(endpoint=hub.url, token=False).model_info(REPO).sha == first


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org"])
def test_it_listens_on_a_loopback_address_only(root, host):
    with pytest.raises(InputError, match="loopback"):
        Hub(root, host=host)


def test_the_command_serves_the_client_of_another_process(root, tmp_path):
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "demo.hub", "--root", root, "--ready-file", ready]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not ready.exists():
            assert server.poll() is None, "the hub ended"
            assert time.monotonic() < deadline, "the hub did not become ready"
            time.sleep(0.02)
        code = f"import huggingface_hub as h; print(h.snapshot_download({REPO!r}))"
        environment = os.environ | {"HF_ENDPOINT": ready.read_text(), "HF_HOME": str(tmp_path / "home")}
        printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        assert json.loads((Path(printed.strip()) / "config.json").read_text()) == {"model_type": "qwen2"}
    finally:
        server.kill()
        server.wait()
