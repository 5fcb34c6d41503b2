"""A ledger that several threads of one process use."""

import threading

import pytest

from tasks.errors import Unavailable
from tests.runs import a_run


def test_the_transaction_of_one_thread_is_not_part_of_another_threads(ledger):
    a_run(ledger, "kept")
    entered = threading.Event()

    def second():
        with ledger.transaction():
            entered.set()
        a_run(ledger, "of-the-second")

    thread = threading.Thread(target=second)
    with pytest.raises(ZeroDivisionError), ledger.transaction() as connection:  # noqa: PT012
        connection.execute("delete from run where run_id = 'kept'")
        thread.start()
        assert not entered.wait(0.2)
        raise ZeroDivisionError
    thread.join()
    assert entered.is_set()
    with ledger.transaction() as connection:
        found = {row["run_id"] for row in connection.execute("select run_id from run")}
    assert found == {"kept", "of-the-second"}


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        ("set local lock_timeout = '1ms'; delete from run where run_id = 'held'", "lock timeout"),
        ("set local statement_timeout = '1ms'; select pg_sleep(60)", "statement timeout"),
        ("do $$ begin raise disk_full using message = 'No space left on device'; end $$", "No space left"),
    ],
)
def test_what_the_database_cannot_do_for_now_can_be_tried_again_on_the_same_connection(ledger, refused, says):
    a_run(ledger, "held")
    with ledger.again() as other, other.transaction() as holding:
        holding.execute("select from run where run_id = 'held' for update")
        with pytest.raises(Unavailable, match=f"{says}.*try again"), ledger.transaction() as connection:
            connection.execute(refused)
    with ledger.transaction() as connection:
        assert connection.execute("delete from run where run_id = 'held'").rowcount == 1
