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
import importlib, json, pathlib, sys
import tasks
folder = pathlib.Path(tasks.__file__).parent
for path in sorted(folder.rglob("*.py")):
    if path.name != "__main__.py":
        parts = path.relative_to(folder.parent).with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
heavy = [name for name in ("torch", "vllm", "pyspark", "airflow") if name in sys.modules]
print(json.dumps({"folder": str(folder), "heavy": heavy}))
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


def test_tasks_is_installed_and_imports_from_anywhere(imported):
    assert Path(imported["folder"]) == REPOSITORY / "tasks"


def test_no_module_pulls_in_a_heavy_library(imported):
    assert imported["heavy"] == []
