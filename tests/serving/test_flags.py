"""extra_args against the flags that the installed vLLM knows."""

import json
import logging
from pathlib import Path

import pytest

from tasks.errors import InputError
from tasks.serving import flags


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """What set-up wrote."""
    path = tmp_path / "vllm-flags.json"
    listed = ["--block-size", "--async-scheduling", "--no-async-scheduling", "--port"]
    path.write_text(json.dumps({"version": "0.32.0", "flags": listed}))
    return path


def test_known_flags_pass_however_they_are_spelt(known: Path) -> None:
    flags.check({"block_size": 16, "async-scheduling": False, "no-async-scheduling": True}, known)


def test_an_unknown_flag_is_refused_with_the_nearest_one(known: Path) -> None:
    with pytest.raises(
        InputError, match=r"serving\.extra_args\.blok_size.*0\.32\.0.*did you mean block-size"
    ):
        flags.check({"blok_size": 16}, known)


@pytest.mark.parametrize("name", ["port", "api_key", "served-model-name", "enforce_eager"])
def test_what_the_pipeline_sets_itself_is_refused(known: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"serving\.extra_args\.{name}: the pipeline sets"):
        flags.check({name: "x"}, known)


def test_all_wrong_flags_are_named_at_once(known: Path) -> None:
    with pytest.raises(InputError) as caught:
        flags.check({"port": 1, "nonsense": 2}, known)
    assert "port" in str(caught.value)
    assert "nonsense" in str(caught.value)


def test_without_the_list_there_is_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        flags.check({"nonsense": 2}, tmp_path / "missing.json")
    assert "is not checked" in caplog.text
