"""How long a task waits for what another run holds."""

import pytest

from tests.runs import a_run, open_ledger


@pytest.mark.parametrize("dag", ["qwen_nightly_prod", "qwen_nightly_never"])
def test_a_run_waits_as_long_as_it_was_told_when_it_started_whatever_its_file_says_now(
    act, database_url, dag
):
    with open_ledger(database_url) as ledger:
        a_run(ledger, f"{dag}.run-1", limits={"wait": "4h"})
    assert act(dag, "provision", waited_h=3)["raised"] == "AirflowRescheduleException"
    came = act(dag, "provision", waited_h=5)
    assert came["raised"] == "AirflowFailException"
    assert came["message"] == "held by another run [limits.wait is over]"
