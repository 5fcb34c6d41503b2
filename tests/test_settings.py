"""The settings of a deployment."""

from pathlib import Path

import pytest

from tasks.errors import InputError
from tasks.settings import Settings
from tasks.settings_reference import render

REPOSITORY = Path(__file__).resolve().parents[1]


def test_every_setting_has_its_reason_on_the_reference_page():
    without = [name for name, field in Settings.model_fields.items() if not field.description]
    assert without == []
    assert (REPOSITORY / "docs/settings.md").read_text() == render(), (
        "write it anew: .venv/bin/python -m tasks.settings_reference > docs/settings.md"
    )


def test_two_homes_are_two_deployments(tmp_path):
    assert Settings(home=tmp_path / "a").deployment != Settings(home=tmp_path / "b").deployment


def test_the_flags_that_are_known_are_those_of_the_vllm_that_serves(tmp_path):
    other = Settings(home=tmp_path, python_serving=Path("/opt/vllm/bin/python"))
    assert other.serving_flags == Path("/opt/vllm/vllm-flags.json")
    assert other.serving_flags != Settings(home=tmp_path).serving_flags


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o644)
    with pytest.raises(InputError, match="readable by others: chmod 600"):
        Settings(home=tmp_path).secret()
    secret.chmod(0o600)
    assert Settings(home=tmp_path).secret() == b"0123456789abcdef0123456789abcdef"


def test_a_short_secret_is_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("short")
    with pytest.raises(InputError, match="holds 5 bytes; at least 16"):
        Settings(home=tmp_path).secret()


def test_the_ledger_url_comes_from_its_file_and_shows_in_no_message(tmp_path):
    file = tmp_path / "url"
    file.write_text("postgresql://u:topsecret@127.0.0.1/l\n")
    settings = Settings(home=tmp_path, ledger_url_file=file)
    assert settings.database_url() == "postgresql://u:topsecret@127.0.0.1/l"
    assert "topsecret" not in repr(settings)
    assert "topsecret" not in repr(Settings(home=tmp_path, ledger_url="postgresql://u:topsecret@127.0.0.1/l"))


def test_no_ledger_says_what_to_set(tmp_path):
    with pytest.raises(InputError, match="QWEN_PIPELINE_LEDGER_URL_FILE"):
        Settings(home=tmp_path, ledger_url=None, ledger_url_file=None).database_url()
