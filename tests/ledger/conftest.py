from collections.abc import Iterator

import pytest

from tasks.ledger import Ledger
from tests.runs import open_ledger


@pytest.fixture
def ledger(database_url: str) -> Iterator[Ledger]:
    """A ledger of the test's own."""
    with open_ledger(database_url) as opened:
        yield opened
