import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import psycopg
import pytest

from demo.children import Children
from demo.postgres import Cluster
from tasks.errors import StageFailed


@pytest.fixture(scope="module")
def closed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that only its owner can pass, as /root is."""
    folder = tmp_path_factory.mktemp("closed")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def children(closed_folder: Path) -> Children:
    return Children(closed_folder / "var" / "children", f"test-postgres-{token_hex(4)}")


@pytest.fixture(scope="module")
def made(closed_folder: Path, children: Children) -> Iterator[Cluster]:
    """What a start that was killed in its middle left is there already."""
    home = closed_folder / "var" / "postgres"
    (home / "data.new" / "base").mkdir(parents=True)
    (home / "password.new").write_text("left behind")
    cluster = Cluster(home, children)
    yield cluster
    cluster.stop()
    children.end_all()


@pytest.fixture
def cluster(made: Cluster) -> Cluster:
    made.start()
    return made


def ask(url: str, query: str = "select current_user") -> object:
    with psycopg.connect(url, connect_timeout=10) as connection:
        row = connection.execute(query).fetchone()
        return row[0] if row else None


def main_pid(cluster: Cluster) -> int:
    return int((cluster.data / "postmaster.pid").read_text().splitlines()[0])


def kill_main(cluster: Cluster, children: Children) -> None:
    os.kill(main_pid(cluster), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while children.find("postgres") is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_runs_below_a_closed_folder_and_opens_none(cluster: Cluster, closed_folder: Path) -> None:
    assert ask(cluster.url("ledger")) == "ledger"
    assert stat.S_IMODE(closed_folder.stat().st_mode) == 0o700


def test_a_killed_start_leaves_nothing_behind(cluster: Cluster) -> None:
    assert not (cluster.home / "data.new").exists()
    assert not (cluster.home / "password.new").exists()


def test_what_was_committed_is_on_disk(cluster: Cluster) -> None:
    assert ask(cluster.admin_url, "show fsync") == "on"
    assert ask(cluster.admin_url, "show synchronous_commit") == "on"


@pytest.mark.parametrize("role", ["airflow", "ledger"])
def test_a_role_owns_its_database(cluster: Cluster, role: str) -> None:
    assert ask(cluster.url(role)) == role
    with psycopg.connect(cluster.url(role)) as connection:
        connection.execute("create schema mine create table t (x int)")
        connection.rollback()


def test_a_role_cannot_enter_the_database_of_another(cluster: Cluster) -> None:
    with pytest.raises(psycopg.OperationalError, match="permission denied"):
        ask(cluster.url("ledger", "airflow"))


@pytest.mark.parametrize("role", ["airflow", "ledger", "postgres"])
def test_a_wrong_password_is_refused(cluster: Cluster, role: str) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        ask(f"postgresql://{role}:wrong@127.0.0.1:{cluster.port}/postgres")


def test_passwords_are_private_and_in_no_log(cluster: Cluster) -> None:
    secrets = cluster.home / "passwords.json"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    command = Path(f"/proc/{main_pid(cluster)}/cmdline").read_text()
    for role in ("airflow", "ledger", "postgres"):
        password = cluster.url(role).partition(":")[2].partition("@")[0].rpartition(":")[2]
        assert len(password) > 20
        assert password not in cluster.log.read_text() + command


def test_starting_what_runs_changes_nothing(cluster: Cluster) -> None:
    before = main_pid(cluster)
    cluster.start()
    assert main_pid(cluster) == before


def test_it_starts_again_after_a_kill_with_all_that_was_committed(cluster: Cluster) -> None:
    with psycopg.connect(cluster.url("ledger")) as connection:
        connection.execute("create table if not exists kept (x int)")
        connection.execute("insert into kept values (1)")
    port = cluster.port
    os.kill(main_pid(cluster), signal.SIGKILL)
    cluster.start()  # at once: the dying process still looks alive, its children still hold its memory
    assert cluster.port == port
    assert ask(cluster.url("ledger"), "select count(*) > 0 from kept") is True
    with psycopg.connect(cluster.url("ledger")) as connection:
        connection.execute("drop table kept")


def test_a_stranger_with_the_process_id_of_the_killed_server_does_not_stop_it(
    cluster: Cluster, children: Children
) -> None:
    kill_main(cluster, children)
    mark = cluster.data / "postmaster.pid"
    owner = mark.stat()
    # Of the server's own user, or PostgreSQL can tell by itself that it is a stranger.
    as_owner = {"user": owner.st_uid, "group": owner.st_gid} if os.geteuid() == 0 else {}
    stranger = subprocess.Popen(["sleep", "600"], **as_owner)
    try:
        first, rest = mark.read_text().split("\n", 1)
        assert int(first) != stranger.pid
        mark.write_text(f"{stranger.pid}\n{rest}")
        cluster.start()
        assert ask(cluster.url("ledger")) == "ledger"
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_it_moves_when_its_port_was_taken_while_it_was_down(cluster: Cluster) -> None:
    cluster.stop()
    before = cluster.port
    with socket.create_server(("127.0.0.1", before)):
        cluster.start()
        assert cluster.port != before
        assert ask(cluster.url("ledger")) == "ledger"


def test_a_lost_password_is_named(cluster: Cluster) -> None:
    secrets = cluster.home / "passwords.json"
    kept = secrets.read_bytes()
    secrets.unlink()
    try:
        with pytest.raises(StageFailed, match=r"passwords\.json was lost or replaced, delete the folder"):
            cluster.start()
    finally:
        secrets.write_bytes(kept)


def test_stop_leaves_no_process_and_a_free_port(cluster: Cluster, children: Children) -> None:
    connection = psycopg.connect(cluster.url("ledger"))
    connection.execute("select 1")  # an open transaction does not hold it up
    cluster.stop()
    connection.close()
    assert children.living() == []
    ours = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _mentions(path, children.deployment)]
    assert ours == []
    socket.create_server(("127.0.0.1", cluster.port)).close()


def _mentions(cmdline: Path, deployment: str) -> bool:
    try:
        return deployment.encode() in cmdline.read_bytes()
    except OSError:
        return False
