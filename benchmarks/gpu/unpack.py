"""Lays packs out on the GPU machine: three environments over its PyTorch, and the checkout.

    python3 unpack.py KIT PACK...

KIT/project, KIT/serving and KIT/convert are environments like those of `make setup`; each sees the packages
of the interpreter that runs this, after its own. Needs nothing but the standard library, and can be called
again with further packs.
"""

import site
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ENVIRONMENTS = ("project", "serving", "convert")

_TOLD_BY_METADATA = ("torch", "transformers", "safetensors")
"""Whose versions the pipeline reads in an environment, without importing them."""

_VLLM = """\
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # processes that vLLM starts import this file again
    sys.exit(main())
"""


def main() -> None:
    """Unpack."""
    kit, packs = Path(sys.argv[1]).absolute(), [Path(pack) for pack in sys.argv[2:]]
    for name in ENVIRONMENTS:
        _make(kit, name)
    jobs = []
    for pack in packs:
        for name in ENVIRONMENTS:
            jobs += [(path, packages(kit, name)) for path in sorted((pack / name).glob("*.*"))]
        jobs += [(path, kit / "checkout") for path in (pack / "checkout").glob("*.txz")]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda job: _extract(*job), jobs))
    # As an installer does: else the first start of a worker compiles every module that it imports.
    folders = sorted({str(target) for _, target in jobs})
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", *folders], check=False)
    print(f"{len(jobs)} file(s) unpacked below {kit}")


def packages(kit: Path, name: str) -> Path:
    """Where an environment's own packages are."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return kit / name / "lib" / version / "site-packages"


def _make(kit: Path, name: str) -> None:
    place = kit / name
    if (place / "bin" / "vllm").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    beside = site.getsitepackages()[0]
    # A line of a .pth file is a folder that is searched after the environment's own packages.
    (packages(kit, name) / "beside.pth").write_text(f"{kit / 'checkout'}\n{beside}\n")
    for package in _TOLD_BY_METADATA:
        for found in Path(beside).glob(f"{package}-*.dist-info"):
            (packages(kit, name) / found.name).symlink_to(found)
    (place / "bin" / "vllm").write_text(_VLLM)


def _extract(path: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for member in wheel.infolist():
                name = member.filename
                # Files that pip would put elsewhere; of those only packages are of use here.
                for place in ("purelib", "platlib"):
                    name = name.split(f".data/{place}/", 1)[-1]
                if ".data/" in name or name.endswith("/"):
                    continue
                made = target / name
                made.parent.mkdir(parents=True, exist_ok=True)
                made.write_bytes(wheel.read(member))
                mode = member.external_attr >> 16
                if mode:
                    made.chmod(mode | 0o644)
    else:
        with tarfile.open(path) as archive:
            archive.extractall(target, filter="tar")


if __name__ == "__main__":
    main()
