"""Arguments, exit statuses and output of the command line.

`--json` prints one JSON object on standard output and nothing else there; logs go to standard error. Exit
status: 0 done or nothing to do; 2 bad input; 3 busy; 4 failed. An error that a user can cause has no traceback.
"""

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_settings import SettingsError

from tasks import settings as deployment
from tasks.errors import InputError, StageError
from tasks.settings import Settings, variable
from tasks.stage_list import STAGES


@dataclass(frozen=True)
class Answer:
    """What a verb has to say: to a program, and to a person."""

    document: dict[str, Any]
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    options = _parser().parse_args(arguments)
    wants_json: bool = options.json
    try:
        settings = _settings()
        logging.basicConfig(
            stream=sys.stderr,
            level=settings.log_level,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        verb: Callable[[argparse.Namespace, Settings], Answer] = options.act
        answer = verb(options, settings)
    except StageError as error:
        failure = {
            "error": type(error).__name__,
            "message": str(error),
            "remedy": error.remedy.value,
        }
        _say(Answer(failure, ""), wants_json)
        print(f"qwen-pipeline {options.verb}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    _say(answer, wants_json)
    return 0


def _stage(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli.stage import execute

    return Answer(*execute(options, settings))


def _migrate(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.ledger.migrations import migrate

    applied = migrate(settings.database_url(), settings.sql / "migrations")
    text = f"applied {', '.join(applied)}" if applied else "nothing to do: the ledger's schema is up to date"
    return Answer({"applied": applied}, text)


def _reap(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.reap import as_facts, reap

    report = reap(settings, run_id=options.run, force=options.force)
    return Answer(as_facts(report), report.message)


def _status(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli.probe import probe
    from tasks.cli.status import status, worker_log

    if options.probe:
        return Answer(*probe(settings))
    if options.log is not None:
        if options.run is None:
            raise InputError("status --log needs --run NAME: logs belong to a run")
        return Answer(*worker_log(settings, options.run, options.log, options.lines))
    return Answer(*status(settings, options.run))


def _endpoints(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli.endpoints import endpoints_verb

    return Answer(*endpoints_verb(settings, options.run, options.key_file))


def _releases(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli import releases

    return Answer(*releases.listing(settings))


def _verify_release(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli import releases

    return Answer(*releases.verify(settings, options.release))


def _remove_release(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli import releases

    return Answer(*releases.remove(settings, options.release, force=options.force))


def _report(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli.report import report
    from tasks.cli.stage import run_of

    return Answer(*report(settings, run_of(options)))


def _close(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli.close import close

    return Answer(*close(settings, options.run))


def _settings() -> Settings:
    try:
        return deployment.current()
    except SettingsError as error:
        named = re.search(r'"(\w+)"', str(error))
        place = variable(named[1]) if named else str(error)
        raise InputError(
            f"a setting in the environment is wrong:\n  {place}: this is no JSON, as lists and objects are written"
        ) from None
    except ValidationError as error:
        lines = [f"  {variable(str(item['loc'][0]))}: {item['msg']}" for item in error.errors()]
        raise InputError("\n".join(["a setting in the environment is wrong:", *lines])) from None


def _say(answer: Answer, wants_json: bool) -> None:
    if wants_json:
        print(json.dumps(answer.document, default=str, ensure_ascii=False))
    elif answer.text:
        print(answer.text)


class _Parser(argparse.ArgumentParser):
    """argparse, with the project's way of saying no."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n(see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="qwen-pipeline", description="Prompts in, answers out, GPUs given back.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for stage in STAGES.values():
        verb = _verb(verbs, stage.name, stage.says, _stage)
        verb.add_argument(
            "--spec",
            type=Path,
            metavar="FILE",
            help="the run spec (YAML); see docs/run-spec.md",
        )
        verb.add_argument("--run", metavar="NAME", help="the run's name; default: made from the spec")
        verb.add_argument(
            "--date",
            metavar="DATE",
            help="what {{ ds }} in the spec means; default, with --run: now",
        )
        if stage.name == "provision":
            verb.add_argument(
                "--dry-run", action="store_true", help="show what would change, take and change nothing"
            )
    report = _verb(verbs, "report", "Rows, tokens and time of a run.", _report)
    report.add_argument("--spec", type=Path, metavar="FILE")
    report.add_argument("--run", metavar="NAME")
    report.add_argument("--date", metavar="DATE", help="what {{ ds }} in the spec means")
    close = _verb(verbs, "close", "Say that a run by hand is over: done, or failed.", _close)
    close.add_argument("--run", metavar="NAME", required=True)
    status = _verb(verbs, "status", "What is held, running and done.", _status)
    status.add_argument("--run", metavar="NAME", help="one run with its stages and workers")
    status.add_argument("--log", metavar="WORKER", help="with --run: a worker's log, or `keeper`'s")
    status.add_argument("--lines", type=int, default=100, metavar="N", help="of the log (default: 100)")
    status.add_argument(
        "--probe", action="store_true", help="exit status 0 when this node is as the ledger says, else 4"
    )
    endpoints = _verb(verbs, "endpoints", "Where a run's workers can be asked, and how.", _endpoints)
    endpoints.add_argument("--run", metavar="NAME", required=True)
    endpoints.add_argument(
        "--key-file", type=Path, metavar="FILE", help="write the pool's key there (a new file, mode 0600)"
    )
    reap = _verb(
        verbs,
        "reap",
        "End what outlived its lease on this node; safe at any time.",
        _reap,
    )
    reap.add_argument("--run", metavar="NAME", help="only what belongs to this run")
    reap.add_argument(
        "--force",
        action="store_true",
        help="with --run: even if its lease is still good",
    )
    _verb(verbs, "releases", "The releases in this node's store, and who needs them.", _releases)
    verify = _verb(
        verbs, "verify-release", "Read every byte of a release against its manifest.", _verify_release
    )
    verify.add_argument("release", metavar="ID")
    remove = _verb(verbs, "remove-release", "Delete a release that nobody needs.", _remove_release)
    remove.add_argument("release", metavar="ID")
    remove.add_argument("--force", action="store_true", help="even if an open run is pinned to it")
    _verb(verbs, "migrate", "Bring the ledger's schema up to date.", _migrate)
    return parser


def _verb(
    verbs: "argparse._SubParsersAction[_Parser]",
    name: str,
    says: str,
    act: Callable[[argparse.Namespace, Settings], Answer],
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=says, description=says)
    verb.add_argument("--json", action="store_true", help="one JSON object on standard output")
    verb.set_defaults(act=act)
    return verb


if __name__ == "__main__":
    # A reader that goes away (a closed pipe) is no failure of ours.
    try:
        sys.exit(main())
    except BrokenPipeError:
        os._exit(0)
