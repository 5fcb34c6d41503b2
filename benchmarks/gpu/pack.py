"""Builds what the benchmarks need on a machine without network: numbered folders of a bounded size.

    python -m benchmarks.gpu.pack OUT [--limit-mib 60]

Runs where packages can be downloaded. Python 3.12 and PyTorch 2.11 for CUDA 13 are expected over there; vLLM
0.26.0 is the newest release built for that PyTorch. Left out because they are large and were not needed:
FlashAttention 2, FlashMLA, DeepGEMM.
"""

import argparse
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parent / "packs"

VLLM = "0.26.0"

_GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
"""manylinux versions that are taken; pip matches each of them exactly."""

_PARTS = {
    "vllm-python": ("vllm", f"vllm-{VLLM}.dist-info"),
    "vllm-kernels": ("vllm/_C_stable_libtorch.abi3.so",),
    "vllm-small": (
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/cumem_allocator.abi3.so",
        "vllm/fs_io_C.abi3.so",
        "vllm/spinloop.abi3.so",
        "vllm/_rust_tool_parser.abi3.so",
    ),
    "vllm-flash3": ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",),
    "vllm-rs": ("vllm/vllm-rs",),
}
"""vLLM's wheel in parts that each fit into a pack."""

_CHECKED_OUT = ("tasks", "sql", "demo", "benchmarks", "tests/weights")
"""What travels of the checkout."""

_LEFT_OUT = (".so", ".hpp", ".cuh", ".h", "vllm-rs")
"""Of `vllm-python`."""


@dataclass(frozen=True)
class Item:
    """A file to carry."""

    environment: str
    """The environment it is for, or `project`'s checkout."""
    path: Path

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.path.stat().st_size


def main() -> None:
    """Build the packs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-mib", type=float, default=60.0)
    parser.add_argument("--downloads", type=Path, help="where wheels are kept between calls")
    given = parser.parse_args()
    downloads: Path = given.downloads or given.out / "downloads"
    items = [Item("checkout", _checkout(downloads))]
    for environment in ("project", "convert", "serving"):
        items += [Item(environment, path) for path in _wheels(environment, downloads / environment)]
    items += [Item("serving", path) for path in _vllm(downloads)]
    for number, pack in enumerate(in_packs(items, int(given.limit_mib * 2**20)), start=1):
        for item in pack:
            place = given.out / str(number) / item.environment
            place.mkdir(parents=True, exist_ok=True)
            (place / item.path.name).unlink(missing_ok=True)
            (place / item.path.name).hardlink_to(item.path)
        print(f"{given.out / str(number)}: {sum(item.bytes for item in pack) / 2**20:.0f} MiB")


def in_packs(items: Iterable[Item], limit_bytes: int) -> list[list[Item]]:
    """Items in packs of at most `limit_bytes`.

    In the given order of environments, so that the first packs are enough to begin with; within one, the
    largest first.

    Raises:
        SystemExit: one item alone is larger.
    """
    order = {name: rank for rank, name in enumerate(dict.fromkeys(item.environment for item in items))}
    packs: list[list[Item]] = []
    room: list[int] = []
    for item in sorted(items, key=lambda item: (order[item.environment], -item.bytes)):
        if item.bytes > limit_bytes:
            sys.exit(f"{item.path.name} has {item.bytes} bytes, and a pack holds {limit_bytes}")
        fits = next((number for number, left in enumerate(room) if left >= item.bytes), None)
        if fits is None:
            packs.append([])
            room.append(limit_bytes)
            fits = len(packs) - 1
        packs[fits].append(item)
        room[fits] -= item.bytes
    return packs


def _wheels(environment: str, folder: Path) -> list[Path]:
    _download(["-r", str(LISTS / f"{environment}.txt")], folder)
    return sorted(folder.glob("*.whl"))


def _vllm(downloads: Path) -> list[Path]:
    _download([f"vllm=={VLLM}"], downloads / "vllm")
    (wheel,) = (downloads / "vllm").glob("vllm-*.whl")
    unpacked = downloads / "vllm" / "unpacked"
    made = [downloads / "vllm" / f"{part}.txz" for part in _PARTS]
    if all(path.exists() for path in made):
        return made
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    for path, members in zip(made, _PARTS.values(), strict=True):
        draft = path.with_suffix(".new")
        with tarfile.open(draft, "w:xz", preset=2) as packed:
            for member in members:
                packed.add(unpacked / member, member, filter=_slim if path == made[0] else None)
        draft.rename(path)
    return made


def _slim(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith(_LEFT_OUT) else member


def _checkout(downloads: Path) -> Path:
    """The project's tracked and new files: code, SQL and the kit itself."""
    downloads.mkdir(parents=True, exist_ok=True)
    path = downloads / "checkout.txz"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *_CHECKED_OUT],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    with tarfile.open(path, "w:xz") as packed:
        for name in listed.stdout.splitlines():
            if (REPOSITORY / name).is_file():
                packed.add(REPOSITORY / name, name)
    return path


def _download(wanted: Sequence[str], folder: Path) -> None:
    """Wheels for the machine over there, without what they need: the lists are complete."""
    tags = [*(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC), "manylinux2014_x86_64", "manylinux1_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for abi in ("cp312", "abi3", "none"):
        options += ["--abi", abi]
    for tag in tags:
        options += ["--platform", tag]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(folder), *wanted]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
