"""A verb that is a stage: `qwen-pipeline provision --spec run.yaml`, and which run that means."""

from argparse import Namespace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from tasks import stages
from tasks.errors import InputError, StageError
from tasks.ledger import Ledger, Run, load
from tasks.ledger.claims import facts_of
from tasks.ledger.runs import find
from tasks.preflight import check_spec
from tasks.preflight.check import table
from tasks.settings import Settings
from tasks.spec import RunSpec, read
from tasks.spec.freeze import holds_dates, resolve_dates


def execute(options: Namespace, settings: Settings) -> tuple[dict[str, Any], str]:
    """Start the run if it has not started, then execute the stage: its result, as a document and as text.

    Raises:
        InputError: the spec is wrong, or not that of the run; see also `stages.freeze` and `stages.execute`.
    """
    spec = _spec(options)
    if getattr(options, "dry_run", False):
        # No run is started: today is as good as any other day.
        day = options.date or datetime.now(UTC).isoformat()
        return _dry_run(spec, options.run or name_of(spec, day), settings)
    run_id = _run_of(options, spec)
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
        text = f"{table(result.facts['checks'])}\n{text}"
    return vars(result), text


def run_of(options: Namespace) -> str:
    """The name of the run that is meant.

    Raises:
        InputError: nothing says which.
    """
    return _run_of(options, _spec(options))


def _run_of(options: Namespace, spec: RunSpec | None) -> str:
    return str(options.run or name_of(spec, options.date))


def _dry_run(spec: RunSpec | None, run_id: str, settings: Settings) -> tuple[dict[str, Any], str]:
    """What provision would change; starts no run."""
    from tasks.gpu import sizing
    from tasks.gpu.preview import preview

    with Ledger(settings.database_url(), settings.sql) as ledger:
        wanted = spec or load(ledger, run_id).spec
        release = facts_of(ledger, run_id, "convert")
        needs = sizing.of_facts(release, wanted.serving) if release else None
        return preview(wanted, settings, ledger, run_id, needs)


def _refuse_bad_input(spec: RunSpec, run_id: str, settings: Settings) -> None:
    """Bad input is refused before a run starts; later its input may be gone, and the run must still be ended."""
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


def _refuse_another_day(spec: RunSpec, date: str, run: Run) -> None:
    """A run keeps the dates that it started with, and whoever names another one means another run."""
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


def _spec(options: Namespace) -> RunSpec | None:
    if options.spec is not None:
        return read(options.spec)
    if options.run is None:
        raise InputError(f"{options.verb} needs --spec FILE, or --run NAME of a run that has started")
    return None


def name_of(spec: RunSpec | None, date: str | None) -> str:
    """Without --run, calling verbs with one spec, for one day, one after the other is one run."""
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
