"""What is known of the model before it is downloaded, and after."""

import pytest

from tasks.errors import InputError, Unavailable
from tasks.weights import hub, store, tensors

PINS = {"commit": "c" * 40, "release_id": "name-awq-g128-0123456789ab"}


def test_a_hub_that_does_not_answer_is_downloads_to_report(preflight, spec, monkeypatch):
    def fail(*_):
        raise Unavailable("no route")

    monkeypatch.setattr(hub, "files_of", fail)
    checks = {check["check"]: check for check in preflight(spec()).facts["checks"]}
    assert "not known without the hub" in checks["disk"]["found"]


def test_a_folder_on_the_node_has_a_size_without_the_hub(preflight, spec, tmp_path, monkeypatch):
    monkeypatch.delattr(hub, "files_of")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x" * 1024)
    checks = {check["check"]: check for check in preflight(spec(model={"repo": str(model)})).facts["checks"]}
    assert checks["disk"]["found"].endswith("0.0 GiB wanted")


def test_a_downloaded_model_is_measured_where_it_is_and_its_group_size_checked(
    preflight, spec, settings, monkeypatch
):
    monkeypatch.delattr(hub, "files_of")
    folder = store.download_folder(settings, "owner/name", PINS["commit"])
    folder.mkdir(parents=True)
    manifest = store.Manifest({}, {"model.safetensors": store.File(10, "0" * 64)})
    (folder / store.DOWNLOAD_MANIFEST).write_text(manifest.dumps())

    def refuse(place, size):
        assert (place, size) == (folder, 64)
        raise InputError("convert.group_size: 64 does not divide the 96 inputs of a layer")

    monkeypatch.setattr(tensors, "check_group_size", refuse)
    with pytest.raises(InputError, match=r"one problem.*\n  convert\.group_size: 64 does not divide"):
        preflight(spec(convert={"scheme": "awq", "group_size": 64}))
