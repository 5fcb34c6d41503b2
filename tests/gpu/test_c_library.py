"""The same code over a C library: pointers, sizes and versions of structures, which Python objects do not check."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.settings import REPOSITORY

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here: the stand-in cannot be built")

CUT_AND_RESTORE = """
import json, sys
from pathlib import Path
from tasks.gpu import change, inventory, planner
from tasks.gpu.layouts import Step, difference, spot_of
from tasks.settings import Settings

settings = Settings(home=Path(sys.argv[1]))
change.rights.missing = lambda *_: ""
change.lock_path = lambda _: Path(sys.argv[1]) / "lock"

def shown():
    (gpu,) = inventory.read(settings).gpus
    return [gpu.mig_mode, [f"{one.name}@{one.placement.start} {one.is_whole}" for one in gpu.instances]]

def cut(counts):
    (gpu,) = inventory.read(settings).gpus
    choice = planner.choose(gpu, counts)
    return change.carry_out(difference(gpu, choice.layout, choice.destroy).steps(), settings).error

said = [inventory.read(settings).driver_version, shown(), cut({"3g.40gb": 1, "1g.10gb": 2}), shown()]
(gpu,) = inventory.read(settings).gpus
steps = [Step("destroy", gpu.uuid, spot_of(one)) for one in gpu.instances] + [Step("mode", gpu.uuid, on=False)]
said += [change.carry_out(steps, settings).error, shown(), inventory.read(settings).gpus[0].ailments]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in under the real one's name."""
    folder = tmp_path_factory.mktemp("nvml")
    assert COMPILER is not None
    source = Path(__file__).with_name("standin_nvml.c")
    subprocess.run(
        [
            *(COMPILER, "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
            *("-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1", source),
        ],
        check=True,
    )
    return folder


def run(code: str, library: Path, home: Path) -> subprocess.CompletedProcess[str]:
    # The loader reads the variable once, when the process starts.
    environment = {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-c", code, home], env=environment, capture_output=True, text=True, check=False
    )


def test_a_gpu_is_cut_and_emptied_again_through_real_pointers(library, tmp_path):
    ran = run(CUT_AND_RESTORE, library, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [
        "1.2.3-standin",
        [False, []],
        "",
        [True, ["3g.40gb@0 True", "1g.10gb@4 True", "1g.10gb@5 True"]],
        "",
        [False, []],
        [],
    ]


def test_a_pointer_to_something_else_ends_the_process_there(library, tmp_path):
    wrong = (
        "import pynvml; pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByIndex(0);"
        "pynvml.nvmlGpuInstanceDestroy(gpu)"
    )
    ran = run(wrong, library, tmp_path)
    assert (ran.returncode, "a pointer to something else" in ran.stderr) == (-6, True)
