"""The locks: complete, hashed, and without a word about where anything was found."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "environments"
LOCKS = sorted(FOLDER / f"{name}.txt" for name in ("airflow", "autoawq", "convert", "serving", "spark", "uv"))


def requirements(lock: Path) -> list[str]:
    """The requirements of a lock, each with its continuation lines joined."""
    joined = lock.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_requirement_has_one_version_and_a_hash(lock):
    found = requirements(lock)
    assert found
    for requirement in found:
        assert re.match(r"[a-z0-9][a-z0-9.-]*(\[[a-z0-9,-]+\])?==\S+", requirement), requirement
        assert "--hash=sha256:" in requirement, requirement


def test_torch_is_pinned_by_version_alone():
    assert re.fullmatch(r"torch==[\d.]+\+cpu\n", FOLDER.joinpath("torch.txt").read_text(encoding="utf-8"))
    for lock in LOCKS:
        assert not any(requirement.startswith("torch==") for requirement in requirements(lock)), lock


def test_no_file_here_holds_an_address_or_a_local_path():
    for path in FOLDER.rglob("*"):
        if path.suffix in {".txt", ".in", ".overrides", ".py", ".toml"} and "egg-info" not in str(path):
            text = path.read_text(encoding="utf-8")
            assert "://" not in text, path
            for option in ("--index-url", "--extra-index-url", "--find-links"):
                assert not re.search(rf"^{option}", text, re.MULTILINE), path
            assert " @ " not in text or path.suffix == ".py", path
