"""A stand-in for spark-submit: the driver's work without Spark's, whose JVM takes most of what a small run takes."""

import sys

from tasks import settings as deployment
from tasks.ledger import Claim, Ledger
from tests.batch.without_spark import answer_without_spark


def main() -> None:
    """As the driver is called: ... --run NAME --epoch N."""
    print("this is a stand-in for spark-submit", file=sys.stderr, flush=True)
    _, run_id, _, epoch = sys.argv[-4:]
    settings = deployment.current()
    with Ledger(settings.database_url(), settings.sql) as ledger:
        answer_without_spark(Claim(ledger, run_id, "run", int(epoch)), settings, every_s=1.0)


if __name__ == "__main__":
    main()
