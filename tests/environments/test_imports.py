"""`tasks` is installed in each environment, imports in each, and costs no heavy import in any."""

import json
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = {
    "airflow": REPOSITORY / ".venv",
    "spark": REPOSITORY / ".envs" / "spark",
    "serving": REPOSITORY / ".envs" / "serving",
    "convert": REPOSITORY / ".envs" / "convert",
}
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import tasks
names = [m.name for m in pkgutil.walk_packages(tasks.__path__, "tasks.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
heavy = [name for name in ("torch", "vllm", "pyspark", "airflow") if name in sys.modules]
print(json.dumps({"origin": tasks.__file__, "names": names, "heavy": heavy}))
"""


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def imported(request, tmp_path_factory):
    """What importing every module of `tasks` did in one environment, from a folder that is not ours."""
    python = ENVIRONMENTS[request.param] / "bin" / "python"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    ended = subprocess.run(
        [python, "-c", IMPORT_ALL],
        cwd=elsewhere,
        env={"PATH": "/usr/bin:/bin", "HOME": str(elsewhere), "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_every_module_imports_in_every_environment(imported):
    sources = REPOSITORY.joinpath("tasks").rglob("*.py")
    expected = {path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".") for path in sources}
    expected = {name.removesuffix(".__init__") for name in expected if not name.endswith("__main__")}
    assert set(imported["names"]) | {"tasks"} == expected
    assert Path(imported["origin"]).is_relative_to(REPOSITORY)


def test_no_module_pulls_in_a_heavy_library(imported):
    assert imported["heavy"] == []
