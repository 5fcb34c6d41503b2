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
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError
from pydantic_settings import SettingsError

from tasks import settings as deployment
from tasks.errors import InputError, StageError
from tasks.settings import Settings, variable
from tasks.spec import RunSpec, read
from tasks.stage_list import STAGES

if TYPE_CHECKING:
    from tasks.ledger import Run


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
    """A verb that is a stage: start the run if it has not started, then execute the stage."""
    from tasks import stages
    from tasks.ledger import Ledger, load

    spec = _spec(options)
    if getattr(options, "dry_run", False):
        # No run is started: today is as good as any other day.
        day = options.date or datetime.now(UTC).isoformat()
        return _dry_run(spec, options.run or _name_of(spec, day), settings)
    run_id = options.run or _name_of(spec, options.date)
    if spec is not None:
        _refuse_bad_input(spec, run_id, settings)
    with Ledger(settings.database_url(), settings.sql) as ledger:
        run = (
            load(ledger, run_id)
            if spec is None
            else stages.freeze(ledger, run_id, spec, _date(options.date), settings)
        )
    if spec is not None and options.date is not None:
        _refuse_another_day(spec, options.date, run)
    result = stages.execute(options.verb, run.run_id, settings=settings)
    text = f"{result.stage}: {result.message} ({result.seconds:.1f} s)"
    if "checks" in result.facts:
        from tasks.preflight.check import table

        text = f"{table(result.facts['checks'])}\n{text}"
    return Answer(vars(result), text)


def _dry_run(spec: RunSpec | None, run_id: str, settings: Settings) -> Answer:
    """What provision would change; starts no run."""
    from tasks.gpu import sizing
    from tasks.gpu.preview import preview
    from tasks.ledger import Ledger, load
    from tasks.ledger.claims import facts_of

    with Ledger(settings.database_url(), settings.sql) as ledger:
        wanted = spec or load(ledger, run_id).spec
        release = facts_of(ledger, run_id, "convert")
        needs = sizing.of_facts(release, wanted.serving) if release else None
        return Answer(*preview(wanted, settings, ledger, run_id, needs))


def _refuse_bad_input(spec: RunSpec, run_id: str, settings: Settings) -> None:
    """Bad input is refused before a run starts; later its input may be gone, and the run must still be ended."""
    from tasks.ledger import Ledger
    from tasks.ledger.runs import find
    from tasks.preflight import check_spec

    try:
        check_spec(spec, settings)
    except InputError as refusal:
        try:
            with Ledger(settings.database_url(), settings.sql, patience_s=5.0) as ledger:
                if find(ledger, run_id) is not None:
                    return
        except StageError:
            pass  # what is wrong with the input is the better news
        raise refusal from None


def _refuse_another_day(spec: RunSpec, date: str, run: "Run") -> None:
    """A run keeps the dates that it started with, and whoever names another one means another run."""
    from tasks.spec.freeze import resolve_dates

    then, asked = run.spec, resolve_dates(spec, _date(date))
    # What its deadline is was resolved, too, and not by this date.
    asked = asked.model_copy(
        update={"limits": asked.limits.model_copy(update={"deadline": then.limits.deadline})}
    )
    if then != asked:
        raise InputError(
            f"--date {date}: run {run.run_id!r} was started for another date, and a run keeps its dates (its "
            f"batch.input is {then.batch.input}): give this one another name with --run"
        )


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

    spec = _spec(options)
    name = options.run or _name_of(spec, options.date)
    return Answer(*report(settings, name))


def _close(options: argparse.Namespace, settings: Settings) -> Answer:
    from tasks.cli.close import close

    return Answer(*close(settings, options.run))


def _spec(options: argparse.Namespace) -> RunSpec | None:
    if options.spec is not None:
        return read(options.spec)
    if options.run is None:
        raise InputError(f"{options.verb} needs --spec FILE, or --run NAME of a run that has started")
    return None


def _name_of(spec: RunSpec | None, date: str | None) -> str:
    """Without --run, calling verbs with one spec, for one day, one after the other is one run."""
    from tasks.spec.freeze import holds_dates, resolve_dates

    assert spec is not None, "without a spec the run is named"
    if date is None and holds_dates(spec):
        raise InputError(
            "the spec holds dates, and commands for two days are two runs: say which day with --date 2026-05-31, or "
            "which run with --run NAME"
        )
    # Without what is a default: a field that comes with an upgrade must not make another run of it.
    said = resolve_dates(spec, _date(date)).model_dump_json(exclude_defaults=True)
    return f"cli-{sha256(said.encode()).hexdigest()[:8]}"


def _date(text: str | None) -> datetime:
    if text is None:
        return datetime.now(UTC)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"--date {text!r} is not a date; write it as 2026-05-31") from None


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
