"""Runs actions in processes of their own, each forked from one that has imported everything already.

Importing the stages takes a second or two, and a kill test runs hundreds of them. Requests come line by line
on standard input, answers go to standard output; `tests.kill.launcher` is the other side.
"""

import faulthandler
import gc
import json
import logging
import os
import pkgutil
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from importlib import import_module
from typing import Any

import tasks
from tests.kill import points

_PRELOADED = (
    *("pyarrow.parquet", "pyarrow.compute", "pyarrow.dataset", "huggingface_hub.hf_api", "tokenizers"),
    *("aiohttp.web", "jinja2.sandbox", "pynvml", "tempfile", "shutil", "uuid"),
)
"""What stages import when they act."""


def serve() -> None:
    """Answer requests until standard input ends."""
    points.install()
    for name in (*_PRELOADED, *(module.name for module in pkgutil.walk_packages(tasks.__path__, "tasks."))):
        with suppress(ImportError):
            import_module(name)
    # What the collector does not look at stays shared with the forked processes.
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["modules"]:
            import_module(name)
        pid = os.fork()
        if pid == 0:
            _run(request)
        _answer({"pid": pid})
        _, status = os.waitpid(pid, 0)
        _answer({"status": os.waitstatus_to_exitcode(status)})


def _run(request: dict[str, Any]) -> None:
    """In the forked process; never returns."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    os.environ.clear()
    os.environ.update(request["environment"])
    orders = points.Orders(**request["orders"])
    status = 1
    try:
        _forget_settings()
        for name, module in request["stages"].items():
            _add_stage(name, module)
        module, _, function = request["call"].partition(":")
        call = getattr(import_module(module), function)
        points.arm(orders)
        result = call(*request["args"])
        is_record = is_dataclass(result) and not isinstance(result, type)
        points.note(orders, result=asdict(result) if is_record else result)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        points.note(orders, error=f"{type(error).__name__}: {error}")
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _forget_settings() -> None:
    from tasks import settings

    settings.current.cache_clear()


def _add_stage(name: str, module: str) -> None:
    """A stage that exists only in this process, for the harness's own tests."""
    from tasks.stage_list import STAGES, Stage

    STAGES[name] = Stage(name, module, name, frozenset([name]), "A stage of a test.")


def _answer(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
