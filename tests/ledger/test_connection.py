"""A ledger that several threads of one process use."""

import threading

import pytest

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
