"""What the machine itself must have: Python 3.11 with venv, libnuma1 for vLLM, Java 17 for Spark."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys

from uv_tool import Failed


def check_python() -> None:
    if sys.version_info[:2] != (3, 11):
        raise Failed(
            f"Python 3.11 is needed, this is {sys.version.split()[0]}: all environments are locked for that"
            " version. Name it: make setup PYTHON=/usr/bin/python3.11"
        )


def interpreter() -> str:
    """The Python below any virtual environment that this runs in."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def bring_what_is_missing() -> None:
    """Installs what is missing by apt-get, as root on Debian.

    Raises:
        Failed: it is not root, or apt-get failed; names all that is missing and the command that brings it.
    """
    missing = _missing()
    if not missing:
        return
    packages = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Failed(f"this machine lacks {packages}: install them (as root: apt-get install {packages})")
    print(f"setup: apt-get install {packages}", flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        ended = subprocess.run(
            ["apt-get", "-qq", *command], env=quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if ended.returncode:
            last = (ended.stdout + ended.stderr).strip().splitlines()[-5:]
            raise Failed("\n    ".join([f"'apt-get {' '.join(command)}' failed:", *last]))
    if still := _missing():
        raise Failed(f"apt-get installed {packages}, and this Python still lacks {' '.join(still)}")


def _missing() -> list[str]:
    """The Debian packages that would bring what is not there."""
    packages = []
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        packages.append("python3.11-venv")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        packages.append("libnuma1")
    if _java_version() < 17:
        packages.append("openjdk-17-jre-headless")
    return packages


def _java_version() -> int:
    """The major version of the Java that Spark would take; 0 without one."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if java is None:
        return 0
    try:
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', shown)
    return int(found[1]) if found else 0
