"""Preflight looks at everything that a run needs, changes nothing, and says all problems at once."""

from types import SimpleNamespace

import pytest

from tasks.errors import InputError, StageFailed
from tasks.weights import hub


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_when_all_is_well_nothing_changes_and_every_check_is_listed(preflight, spec, settings, tmp_path):
    preflight(spec())  # the first makes the lock file of its stage
    before = files_below(tmp_path)
    result = preflight(spec())
    assert not result.changed
    lock_file = settings.locks / "run-1-preflight.lock"
    assert {**files_below(tmp_path), lock_file: 0} == {**before, lock_file: 0}
    checks = {check["check"]: check for check in result.facts["checks"]}
    assert all(
        set(check) == {"check", "found", "needed", "ok", "to_do"} and check["ok"] for check in checks.values()
    )
    assert set(checks) == {
        *("batch.input", "batch.output", "batch.sampling.max_tokens", "serving.extra_args"),
        *("node", "layout", "layout.cpu", "disk"),
        *("environments", "java", "secret", "ledger", "ledger url", "ports"),
        *("open files", "connections", "port range", "network", "clock"),
    }
    assert checks["batch.input"]["found"] == "1 file(s) with columns id, prompt"
    assert checks["layout"]["found"].startswith("no NVIDIA driver on this node; ")


def test_another_node_than_the_specs_is_refused(preflight, spec):
    with pytest.raises(InputError, match="node: the spec asks for 'local', and this host is 'dgx-9'"):
        preflight(spec(), node="dgx-9")


def test_a_full_disk_is_said_with_what_is_wanted(preflight, spec, monkeypatch):
    monkeypatch.setattr(hub, "files_of", lambda *_: [SimpleNamespace(size=1 << 60)])
    with pytest.raises(StageFailed, match=r"disk: .* a model of 1073741824\.0 GiB wants 2362232012\.8 GiB"):
        preflight(spec())


def test_a_user_error_and_an_operators_are_said_together_and_the_users_comes_first(preflight, spec, tmp_path):
    with pytest.raises(InputError, match="2 problems") as refused:
        preflight(spec(batch={"prompt": "text"}), java_home=tmp_path)
    assert "batch.prompt:" in str(refused.value)
    assert "java:" in str(refused.value)
