"""The schema is brought up to date once, whoever tries, however often, and whatever kills them."""

import signal
from pathlib import Path

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from tasks.errors import Unavailable
from tasks.ledger.migrations import migrate, pending
from tests.runs import SQL, outputs, python, wait_until

GATE = 42
"""An advisory lock that the slow migration waits for, so that a test decides when it goes on."""

MIGRATE = """
import sys
from pathlib import Path
from tasks.ledger.migrations import migrate
print(*migrate(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.fixture
def admin(empty_database_url):
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "0001_first.sql").write_text("create table first (n integer);")
    (tmp_path / "0002_second.sql").write_text(
        f"create table second (n integer);\n"
        f"do $$ begin perform pg_advisory_xact_lock({GATE}); end $$;\n"
        f"create table third (n integer);"
    )
    return tmp_path


def waiting_for_a_lock(admin):
    # A transaction would see the activity as it was when it first looked.
    assert admin.info.transaction_status is TransactionStatus.IDLE
    return admin.execute(
        "select count(*) from pg_stat_activity "
        "where wait_event_type = 'Lock' and datname = current_database()"
    ).fetchone()[0]


def tables(admin):
    rows = admin.execute("select tablename from pg_tables where schemaname = 'public' order by 1").fetchall()
    return [name for (name,) in rows if "yoyo" not in name]


def test_the_schema_of_the_ledger_is_made_once(empty_database_url, admin):
    names = pending(empty_database_url, SQL / "migrations")
    assert names == sorted(path.stem for path in (SQL / "migrations").glob("*.sql"))
    assert migrate(empty_database_url, SQL / "migrations") == names
    assert pending(empty_database_url, SQL / "migrations") == []
    assert migrate(empty_database_url, SQL / "migrations") == []
    # The role's first schema is the one with its own name: the records must not move there when it appears.
    assert admin.execute("select count(*) from pg_tables where tablename = '_yoyo_migration'").fetchone() == (
        1,
    )


def test_looking_for_what_is_missing_changes_nothing(empty_database_url, admin, folder):
    assert pending(empty_database_url, folder) == ["0001_first", "0002_second"]
    assert admin.execute("select count(*) from pg_tables where schemaname = 'public'").fetchone() == (0,)


def test_a_database_that_is_not_there_is_unavailable(empty_database_url, folder):
    nobody_listens = psycopg.conninfo.make_conninfo(empty_database_url, port="1")
    for look in (migrate, pending):
        with pytest.raises(Unavailable, match="cannot be reached"):
            look(nobody_listens, folder)


def test_a_migration_killed_in_its_middle_is_applied_by_the_next_try(empty_database_url, admin, folder):
    admin.execute("select pg_advisory_lock(%s)", [GATE])
    with python(MIGRATE, empty_database_url, str(folder)) as killed:
        wait_until(lambda: waiting_for_a_lock(admin))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    admin.execute("select pg_advisory_unlock(%s)", [GATE])
    assert migrate(empty_database_url, folder) == ["0002_second"]
    assert tables(admin) == ["first", "second", "third"]


def test_a_migration_killed_before_it_is_recorded_is_applied_by_the_next_try(
    empty_database_url, admin, folder
):
    migrate(empty_database_url, folder)
    (folder / "0003_fourth.sql").write_text("create table fourth (n integer);")
    with (
        psycopg.connect(empty_database_url) as other,
        python(MIGRATE, empty_database_url, str(folder)) as killed,
    ):
        # Reading the records goes on, writing one waits: that is where it is killed.
        other.execute("lock table _yoyo_migration in share mode")
        wait_until(lambda: waiting_for_a_lock(admin))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert migrate(empty_database_url, folder) == ["0003_fourth"]
    assert tables(admin) == ["first", "fourth", "second", "third"]


def test_two_at_once_apply_each_migration_once(empty_database_url, admin, folder):
    admin.execute("select pg_advisory_lock(%s)", [GATE])
    with (
        python(MIGRATE, empty_database_url, str(folder)) as one,
        python(MIGRATE, empty_database_url, str(folder)) as other,
    ):
        wait_until(lambda: waiting_for_a_lock(admin) == 2)
        admin.execute("select pg_advisory_unlock(%s)", [GATE])
        applied = sorted(name for text in outputs([one, other]) for name in text.split())
    assert applied == ["0001_first", "0002_second"]


def test_a_lock_row_that_a_killed_process_left_does_not_hold_up_the_next(empty_database_url, admin, folder):
    migrate(empty_database_url, folder)
    admin.execute("insert into yoyo_lock (locked, ctime, pid) values (1, now(), 1)")
    (folder / "0003_fourth.sql").write_text("create table fourth (n integer);")
    assert migrate(empty_database_url, folder) == ["0003_fourth"]
    assert admin.execute("select count(*) from yoyo_lock").fetchone() == (0,)


def test_a_migration_that_fails_leaves_nothing_of_itself(empty_database_url, admin, folder):
    migrate(empty_database_url, folder)
    (folder / "0003_wrong.sql").write_text("create table half (n integer);\nselect no_such_column from half;")
    with pytest.raises(psycopg.errors.UndefinedColumn):
        migrate(empty_database_url, folder)
    assert "half" not in tables(admin)
    assert pending(empty_database_url, folder) == ["0003_wrong"]
