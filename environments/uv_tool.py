"""uv, brought by pip at a pinned version, and told to look where pip is told to look.

Torch's CPU build is on no ordinary package registry. Where pip is configured with a folder or page that has
it (find-links), uv is pointed there; elsewhere uv takes it from PyTorch's own index (--torch-backend cpu).
"""

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent


class Failed(Exception):
    """A step failed; the message says which, shows the end of its output, and says what to do."""


def run_logged(
    command: list[str], log: Path, *, output: IO[bytes] | None = None, extra: dict[str, str] | None = None
) -> None:
    """Runs `command` in the repository root; its output goes to `log`.

    Raises:
        Failed: it ended with another status than 0.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    with log.open("ab") as record:
        record.write(f"$ {' '.join(command)}\n".encode())
        record.flush()
        # close_fds=False: the setup lock must live as long as the tool that works under it
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=inherited | (extra or {}),
            stdin=subprocess.DEVNULL,
            stdout=output or record,
            stderr=record,
            close_fds=False,
        )
    if ended.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        shown = "\n".join(f"    {line}" for line in last)
        what = " ".join(Path(part).name if part.startswith("/") else part for part in command)
        raise Failed(
            f"'{what}' ended with status {ended.returncode}:\n{shown}\n"
            f"  All of it is in {log}. If the package registry is reachable and the disk has room, run"
            " 'make setup' again: what is ready stays."
        )


@dataclass(frozen=True)
class Uv:
    binary: Path
    requirements: Path
    """The file that pins uv itself; part of every environment's stamp."""

    @staticmethod
    def bring(folder: Path, requirements: Path) -> "Uv":
        """Makes the small environment that holds uv, unless it is there as `requirements` says."""
        uv = Uv(folder / "bin" / "uv", requirements)
        stamp, wanted = folder / "setup-stamp", f"{folder}\n{requirements.read_text(encoding='utf-8')}"
        if uv.binary.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return uv
        log = folder.parent / "logs" / "uv.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        print("setup: bringing uv", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        run_logged([sys.executable, "-m", "venv", str(folder)], log)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--require-hashes"]
        run_logged([*pip, "-r", str(requirements)], log)
        stamp.write_text(wanted, encoding="utf-8")
        return uv

    def run(self, arguments: list[str], log: Path, *, find_links: bool = False) -> None:
        extra = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
        extra["UV_HTTP_TIMEOUT"] = os.environ.get("UV_HTTP_TIMEOUT", "180")
        told = self._pip_settings()
        if "index-url" in told and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & set(os.environ):
            extra["UV_DEFAULT_INDEX"] = told["index-url"]
        if find_links:
            extra["UV_FIND_LINKS"] = self._find_links(told)
        run_logged([str(self.binary), *arguments], log, extra=extra)

    def install_torch(self, python: Path, pinned: Path, log: Path) -> None:
        """Installs the pinned CPU build of torch alone; a later `pip sync` then finds it installed.

        A lock cannot hold its hash, and `pip sync` alone could not tell the two sources apart.
        """
        install = ["pip", "install", "--python", str(python), "--no-deps", "-r", str(pinned)]
        self._with_torch(install, log)

    def compile(
        self, inputs: list[str], lock: Path, upgrade: bool, log: Path, *, torch: bool = False
    ) -> None:
        """Resolves `inputs` to `lock`, with hashes, and with no address of an index."""
        plain = ["--no-header", "--no-emit-index-url", "--no-emit-find-links", "--generate-hashes"]
        command = ["pip", "compile", "--quiet", "--python-version", "3.11", *plain, *inputs]
        command += ["--output-file", str(lock.relative_to(ROOT)), *(["--upgrade"] if upgrade else [])]
        if torch:
            self._with_torch(command, log)
        else:
            self.run(command, log)

    def _with_torch(self, arguments: list[str], log: Path) -> None:
        failures = []
        if self._find_links(self._pip_settings()):
            try:
                self.run(arguments, log, find_links=True)
                return
            except Failed as failure:
                failures.append(str(failure))
        try:
            self.run([*arguments, "--torch-backend", "cpu"], log)
        except Failed as failure:
            wanted = (
                "  Torch's CPU build was not found: let pip's find-links name a folder that has its wheel"
                " (pip config set global.find-links FOLDER), or make PyTorch's own index reachable."
            )
            raise Failed("\n".join([*failures, str(failure), wanted])) from failure

    def _find_links(self, told: dict[str, str]) -> str:
        """uv's form of the list: commas, where pip has blanks."""
        given = os.environ.get("UV_FIND_LINKS", "").split(",")
        places = [*given, *told.get("find-links", "").split()]
        return ",".join(dict.fromkeys(place for place in places if place))

    def _pip_settings(self) -> dict[str, str]:
        return _pip_settings(self.binary.parent / "python")


@cache
def _pip_settings(python: Path) -> dict[str, str]:
    """What pip is told by its files and by the environment, the environment last."""
    pip = [str(python), "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
    told: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:"):
            told[name] = str(ast.literal_eval(value))
    return told


_MISLEADING = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT"}
"""A shell with an environment of its own must not change what is made here."""
