"""Small actions for the harness's own tests; run as a module, the child of one of them."""

import ctypes
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def link_often(folder: str, count: int) -> None:
    """Make a file and `count` links to it, from one line of code."""
    top = Path(folder)
    top.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(top / "first")
    for number in range(count):
        with suppress(FileExistsError):
            os.symlink("first", top / str(number))


def parent(folder: str) -> None:
    """Start this module as a child, and report its failure."""
    subprocess.run([sys.executable, "-m", "tests.kill.acts", folder], check=True)


def call_driver() -> None:
    """Read and change through pynvml, where the library's functions are stand-ins of this test."""
    import pynvml

    class Library:
        """Answers every call with success."""

        @staticmethod
        def nvmlDeviceGetCount_v2(count: object) -> int:
            return 0

        @staticmethod
        def nvmlDeviceSetMigMode(device: object, mode: object, status: object) -> int:
            return 0

    pynvml.nvmlLib = Library()
    pynvml.nvmlDeviceGetCount()
    pynvml.nvmlDeviceSetMigMode(ctypes.c_void_p(), 1)


def read_then_write(url: str) -> None:
    """Four transactions that read, three that write, each kind in every way that psycopg has."""
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute("select 1")
        connection.commit()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("select 1")
        with connection.transaction():
            connection.execute("select count(*) from ledger.run")
        with connection.transaction():
            connection.execute("update ledger.run set tenant = tenant")
    with psycopg.connect(url) as connection:
        connection.execute("update ledger.run set tenant = tenant")
        connection.commit()
        connection.execute("select 1")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("update ledger.run set tenant = tenant")


def touch(path: str) -> None:
    """Calls `mark`, which no wrapped function does."""
    mark(path)


def mark(path: str) -> None:
    """Does something that the harness does not see by itself."""


def _child(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "draft").open("w") as file:
        file.write("whole")
        file.flush()
        os.fsync(file.fileno())
    os.rename(folder / "draft", folder / "whole")


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
