"""PostgreSQL for every test that wants one: one server for the session, one database for each test."""

import os
import secrets
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql

from demo.children import Children
from demo.postgres import Cluster
from tasks.ledger.migrations import migrate
from tasks.settings import REPOSITORY

# A property holds or not: how fast it was tried says how busy the machine is.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


_OF_A_DAY = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "autovacuum": "off",
}
"""Processes are killed here, the machine is not: nothing is gained by what a server does to outlive that, and without
it a database for every test costs half."""

_BEGUN_FIRST = (
    "tests/demo/test_demo.py",
    "tests/weights/test_conversions.py",
    "tests/serving/test_real_vllm.py",
    "tests/batch/test_spark.py",
)
"""Files of many minutes each: where files run beside each other, none of them must begin last."""

_BEGUN_LATER = {"tests/chaos/test_with_airflow.py": "tests/serving"}
"""An idle Airflow takes half a core, so this one waits until the demo's is gone: it begins before that folder."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first; the tests marked `everything` are left out, unless they are asked for."""
    items.sort(key=lambda item: _turn_of(item.nodeid.partition("::")[0]))
    if not os.environ.get("QWEN_TEST_EVERYTHING"):
        for item in items:
            if item.get_closest_marker("everything"):
                item.add_marker(pytest.mark.skip(reason="only with QWEN_TEST_EVERYTHING=1"))


def _turn_of(file: str) -> tuple[int, str]:
    if file in _BEGUN_FIRST:
        return _BEGUN_FIRST.index(file), ""
    return len(_BEGUN_FIRST), _BEGUN_LATER.get(file, file)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real server with the roles and databases of the demo."""
    home = tmp_path_factory.mktemp("postgres")
    children = Children(home / "children", f"tests-{secrets.token_hex(4)}")
    cluster = Cluster(home / "cluster", children, settings=_OF_A_DAY)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def empty_database_url(postgres: Cluster) -> Iterator[str]:
    """A database of the test's own with nothing in it; it belongs to the role `ledger`."""
    yield from _database(postgres, template="template1")


@pytest.fixture
def database_url(postgres: Cluster, _migrated: str) -> Iterator[str]:
    """A database of the test's own with the ledger's schema, as a copy of one: quicker than to migrate."""
    yield from _database(postgres, template=_migrated)


@pytest.fixture(scope="session")
def _migrated(postgres: Cluster) -> str:
    with psycopg.connect(postgres.admin_url, autocommit=True) as admin:
        admin.execute("create database migrated owner ledger")
    migrate(postgres.url("ledger", "migrated"), REPOSITORY / "sql" / "migrations")
    return "migrated"


def _database(postgres: Cluster, template: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    identifier = sql.Identifier(name)
    with psycopg.connect(postgres.admin_url, autocommit=True) as admin:
        create = sql.SQL("create database {} template {} owner ledger strategy file_copy")
        admin.execute(create.format(identifier, sql.Identifier(template)))
    yield postgres.url("ledger", name)
    with psycopg.connect(postgres.admin_url, autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(identifier))
